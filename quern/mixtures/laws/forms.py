"""Held-out loss as a function of the mixture p, the shares of m sources, which are ≥ 0 and add up to 1.

``log-linear``: L(p) = c + exp(p · t), c ≥ 0 (Chen et al. 2026, Olmix, 2602.12237). The exponential law of Ye et al.
(2024, Data mixing laws, 2403.16952), L(p) = c + k exp(p · t) with k > 0, is the same function: as shares add up to 1,
k exp(p · t) = exp(p · (t + ln k)). So there is one form, and k has no value of its own.

``linear``: L(p) = p · t, the linear regression of RegMix (Liu et al. 2024, 2407.01492). An intercept would be the same
function again. Parameters stand in one vector: (c, t) or t.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["FORMS", "Floats", "by_parameters", "losses"]

Floats = NDArray[np.float64]

FORMS: Mapping[str, str] = {"log-linear": "c + exp(p · t)", "linear": "p · t"}


def losses(form: str, parameters: ArrayLike, mixtures: ArrayLike) -> Floats:
    """L of mixtures [..., sources], by parameter vectors [..., parameters]; leading axes are broadcast."""
    theta, shares = np.asarray(parameters, float), np.asarray(mixtures, float)
    if form == "linear":
        return np.asarray((shares * theta).sum(-1))
    return np.asarray(theta[..., 0] + np.exp((shares * theta[..., 1:]).sum(-1)))


def by_parameters(form: str, parameters: Floats, mixtures: Floats) -> Floats:
    """dL/d(parameters) for mixtures [n, sources]: [n, parameters]."""
    if form == "linear":
        return mixtures
    powers = np.exp(mixtures @ parameters[1:])
    return np.column_stack([np.ones(len(mixtures)), powers[:, None] * mixtures])
