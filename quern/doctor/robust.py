"""Finds the values of a fleet that lie too low, by median and median absolute deviation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEWEST", "Z", "below", "medians"]

Z = 5.3
"""Standard deviations below the median; of the normal distribution 6e-8 lies lower."""

FEWEST = 4
"""Below so many values there is no fleet: of two that differ, neither is the slow one."""

_NORMAL = 1.4826
"""Standard deviation of the normal distribution over its median absolute deviation."""


def below(
    values: NDArray[np.float64], spread: float | NDArray[np.float64], z: float = Z
) -> tuple[float, NDArray[np.bool_]]:
    """The median of values [N], and which lie too low: by more than ``z`` standard deviations, both the fleet's own and
    ``spread``, which is relative to the median, of each value or of all."""
    middle = float(np.median(values))
    own = _NORMAL * float(np.median(np.abs(values - middle)))
    return middle, values < middle - z * np.maximum(own, np.asarray(spread) * middle)


def medians(repeats: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """The median of each row; rows may be of different lengths, and one without repeats is 0."""
    if len({len(row) for row in repeats}) == 1 and repeats[0]:
        return np.asarray(np.median(np.array(repeats), axis=1), np.float64)
    return np.array([np.median(row) if row else 0.0 for row in repeats], np.float64)
