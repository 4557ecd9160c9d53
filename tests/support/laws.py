"""Mixing laws that are planted, and fits that have given parameters."""

from __future__ import annotations

import numpy as np

from quern.mixtures.laws.fit import Fit, Floats


def loss(form: str, parameters: Floats, mixtures: Floats) -> Floats:
    """c + k exp(Σ t r) as Ye et al. write it, with k = 1, or a sum of shares and slopes; [n]."""
    if form == "linear":
        return np.array([sum(t * r for t, r in zip(parameters, row, strict=True)) for row in mixtures])
    constant, *slopes = parameters
    return np.array([constant + np.exp(sum(t * r for t, r in zip(slopes, row, strict=True))) for row in mixtures])


def plant(form: str, sources: int, random: np.random.Generator) -> Floats:
    if form == "linear":
        return random.uniform(2.0, 4.0, sources)
    return np.concatenate([random.uniform(0.5, 2.0, 1), random.uniform(-2.0, 1.0, sources)])


def standard_error(found: Fit, mixture: Floats) -> float:
    """Of the predicted loss, by slopes from differences."""
    steps = [1e-6 * axis for axis in np.eye(len(found.parameters))]
    there = [loss(found.form, found.parameters + step, [mixture])[0] for step in steps]
    back = [loss(found.form, found.parameters - step, [mixture])[0] for step in steps]
    slopes = (np.array(there) - back) / 2e-6
    return float(np.sqrt(slopes @ found.covariance @ slopes))


def known(form: str, parameters: Floats, runs: int = 3) -> Fit:
    """A law without errors."""
    parameters = np.asarray(parameters, float)
    nothing = np.zeros(runs)
    square = np.zeros((len(parameters),) * 2)
    return Fit(form, parameters, square, 0.0, 1, np.tile(parameters, (runs, 1)), nothing, nothing + 1.0)
