"""Finds weights of sources by their sizes: as they are, by temperature, or as even as caps on repetition allow.

Weights are counted in samples of the budget, whole numbers, so that a recipe reads just so many of each source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from quern.errors import InputError
from quern.mixtures.recipe import MixtureSource

__all__ = ["DECAY", "even_weights", "fresh_tokens", "most_samples", "tempered", "weigh"]

DECAY = 15.387756
"""Repetitions after which one more is worth 1/e of a fresh reading: R*_D of Muennighoff et al. (2023, 2305.16264,
appendix A), fitted on C4 for models of up to 9 billion parameters."""


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
    exact, rest = [Fraction(0)] * len(weights), Fraction(total)
    while left:
        whole = sum(Fraction(weights[place]) for place in left)
        full = [place for place in left if rest * Fraction(weights[place]) >= limits[place] * whole]
        if not full:
            for place in left:
                exact[place] = rest * Fraction(weights[place]) / whole
            break
        for place in full:
            exact[place] = Fraction(limits[place])
            rest -= limits[place]
        left = [place for place in left if place not in full]
    return _rounded(exact, total)


def _rounded(exact: Sequence[Fraction], total: int) -> list[int]:
    """By largest remainders, of equals the first; none above its limit, which is whole."""
    found = [math.floor(value) for value in exact]
    behind = sorted(range(len(exact)), key=lambda place: found[place] - exact[place])
    for place in behind[: total - sum(found)]:
        found[place] += 1
    return found


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
