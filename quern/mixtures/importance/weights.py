"""Log importance weights, the noise with which documents are drawn by them, and what the weights are worth."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from quern.errors import InputError
from quern.mixtures.importance.features import I64
from quern.tokenize.place import keyed_hashes

__all__ = ["SMOOTHING", "effective_size", "gumbel", "log_ratio", "log_sums"]

F64 = NDArray[np.float64]

SMOOTHING = 1e-8
"""Added to each probability of both distributions; they are not divided by their sum again (data-selection 1.0.3)."""


def log_ratio(target: I64, raw: I64) -> F64:
    """float64[num_buckets]: log(p + s) - log(q + s) for the shares p of features in the target and q in the raw texts.

    Raises:
        InputError: one of them has no features.
    """
    for counts, name in ((target, "the target"), (raw, "the run")):
        if not counts.sum():
            raise InputError(f"{name} has no words; expected texts to count n-grams of")
    return np.log(target / target.sum() + SMOOTHING) - np.log(raw / raw.sum() + SMOOTHING)


def gumbel(seed: int, doc_ids: Iterable[bytes]) -> F64:
    """float64[n]: standard Gumbel noise, a function of the seed and each document's id and of nothing else.

    -log(-log(u)) of u = (h + 1/2) / 2^52, where h is the upper 52 bits of the keyed hash with the purpose "gumbel". A
    weight's logarithm plus this, of which the greatest k are taken, draws k without replacement by the weights (Gumbel
    top-k: Vieira 2014; Kool et al. 2019, 1903.06059).
    """
    uniform = ((keyed_hashes(seed, "gumbel", doc_ids) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    # NumPy's logarithm may differ in the last bit from one CPU to another
    return np.array([-math.log(-math.log(value)) for value in uniform.tolist()], np.float64)


def log_sums(log_weights: F64) -> tuple[float, float]:
    """The logarithms of the sum of weights and of the sum of their squares; -inf of none."""
    if not len(log_weights):
        return -math.inf, -math.inf
    return float(logsumexp(log_weights)), float(logsumexp(2 * log_weights))


def effective_size(sums: Iterable[tuple[float, float]]) -> float:
    """The effective sample size of all weights of which these are :func:`log_sums`: (sum of w)^2 / sum of w^2 (Kish
    1965), from 1, where one document has all the weight, to their number, where all weigh the same."""
    parts = np.array([*sums], np.float64).reshape(-1, 2)
    total, squares = (float(logsumexp(column)) if np.isfinite(column).any() else -math.inf for column in parts.T)
    return math.exp(2 * total - squares) if math.isfinite(total) else 0.0
