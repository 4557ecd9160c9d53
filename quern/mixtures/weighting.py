"""Finds weights of sources by their sizes: as they are, by temperature, as even as caps on repetition allow, or drawn
around them.

Weights are counted in samples of the budget, whole numbers, so that a recipe reads just so many of each source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from quern.errors import InputError
from quern.mixtures.recipe import MixtureSource
from quern.mixtures.word import rounded

__all__ = ["DECAY", "draw", "even_weights", "fresh_tokens", "most_samples", "tempered", "weigh"]

DECAY = 15.387756
"""Repetitions after which one more is worth 1/e of a fresh reading: R*_D of Muennighoff et al. (2023, 2305.16264,
appendix A), fitted on C4 for models of up to 9 billion parameters."""

_TRIES = 1000
"""Mixtures that are drawn until one has sources that give enough."""


def tempered(sizes: Sequence[int], alpha: float) -> list[float]:
    """Sizes to the power ``alpha``, which draws small sources up: 1 leaves shares as they are, 0 makes them equal
    (Conneau & Lample 2019, section 3.1: 0.5 and 0.7; XLM-R: 0.3)."""
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha: expected a number from 0 to 1, got {alpha:g}")
    return [float(size) ** alpha if size else 0.0 for size in sizes]


def even_weights(weights: Sequence[float], limits: Sequence[int], total: int) -> list[int]:
    """Whole numbers that add up to ``total``, in proportion to ``weights`` where none is above its limit; what a limit
    cuts off goes to the others in proportion. With equal weights this is UniMax (Chung et al. 2023, 2304.09151).

    Raises:
        InputError: the limits of sources with weight add up to less.
    """
    left = [place for place, weight in enumerate(weights) if weight > 0]
    most = sum(limits[place] for place in left)
    if most < total:
        raise InputError(
            f"max_epochs: {total:,} samples are planned, and the sources give {most:,} at most; expected fewer steps, "
            f"or more epochs"
        )
    parts = {place: Fraction(weights[place]) for place in left}
    exact, rest, whole = [Fraction(0)] * len(weights), Fraction(total), sum(parts.values())
    for place in sorted(left, key=lambda place: limits[place] / parts[place]):  # the first that a limit cuts off first
        exact[place] = min(Fraction(limits[place]), rest * parts[place] / whole)
        rest -= exact[place]
        whole -= parts[place]
    return rounded(exact, total)  # none above its limit, which is whole


def weigh(sources: Sequence[MixtureSource], samples: int, alpha: float) -> list[int]:
    """Samples of each source in a budget of so many: in proportion to its tokens to the power ``alpha``, and none read
    more often than its ``max_epochs``.

    Two samples of each source's limit are left, by which an order may be above a share at any time.

    Raises:
        InputError: they do not give so many, or ``alpha`` is wrong.
    """
    sizes = [source.tokens if source.windows else 0 for source in sources]
    return even_weights(tempered(sizes, alpha), most_samples(sources), samples)


def most_samples(sources: Sequence[MixtureSource]) -> list[int]:
    """How many samples of each source a recipe may ask for: those of its ``max_epochs``, but two."""
    return [max(math.floor(own.max_epochs * own.windows) - 2, 0) for own in sources]


def fresh_tokens(tokens: int, epochs: float) -> float:
    """The number of tokens read once that ``epochs`` readings of ``tokens`` are worth: U + U R* (1 - e^(-R / R*)) with
    R = epochs - 1 repetitions (Muennighoff et al. 2023, equation 5)."""
    if epochs <= 1:
        return tokens * epochs
    return tokens * (1 + DECAY * (1 - math.exp(-(epochs - 1) / DECAY)))


def draw(
    sizes: Sequence[float], limits: Sequence[int], total: int, number: int, seed: int,
    strength: tuple[float, float], least: float,
) -> list[int]:  # fmt: skip
    """The samples of each source in run ``number``, ``total`` in all and none above its limit.

    Run 0 has the shares of ``sizes``. The others are Dirichlet (strength · shares), with a strength drawn evenly in its
    logarithm (RegMix, 2407.01492, section 3.1, draws from several): the larger, the closer to the shares. Shares below
    ``least`` become 0 and the rest larger in proportion, so that mixtures are sparse. What limits cut off goes to the
    others; a mixture whose sources cannot give so much is drawn again.

    Each run's numbers are made of (seed, number) alone: more runs change none of those before.

    Raises:
        InputError: no mixture that is drawn has sources that give ``total``.
    """
    whole = sum(sizes)
    shares = np.array([size / whole for size in sizes])
    if number == 0:
        return even_weights(shares.tolist(), limits, total)
    random = np.random.default_rng([seed, number])
    low, high = (math.log(end) for end in strength)
    for _ in range(_TRIES):
        drawn = np.zeros(len(sizes))
        drawn[shares > 0] = random.dirichlet(math.exp(random.uniform(low, high)) * shares[shares > 0])
        drawn[drawn < min(least, drawn.max())] = 0.0
        if sum(limit for limit, share in zip(limits, drawn, strict=True) if share > 0) >= total:
            return even_weights(drawn.tolist(), limits, total)
    raise InputError(
        f"draw: {_TRIES} mixtures were drawn whose sources do not give {total:,} samples within max_epochs; expected "
        "fewer steps, a greater strength or a smaller min_share"
    )
