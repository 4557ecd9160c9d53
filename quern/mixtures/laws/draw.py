"""Draws the mixtures of a swarm: Dirichlet around the sources' token shares, as whole samples of a run's budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quern.errors import InputError
from quern.mixtures.weighting import even_weights

__all__ = ["draw"]

_TRIES = 1000


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
