"""Fits a form to runs by least squares, and says how far it can be trusted: standard errors, leave-one-out errors.

A form is held-out loss as a function of the mixture p, the shares of m sources, which are ≥ 0 and add up to 1.

``log-linear``: L(p) = c + exp(p · t), c ≥ 0 (Chen et al. 2026, Olmix, 2602.12237). The exponential law of Ye et al.
(2024, Data mixing laws, 2403.16952), L(p) = c + k exp(p · t) with k > 0, is the same function: as shares add up to 1,
k exp(p · t) = exp(p · (t + ln k)). So there is one form, and k has no value of its own.

``linear``: L(p) = p · t, the linear regression of RegMix (Liu et al. 2024, 2407.01492). An intercept would be the same
function again. Parameters stand in one vector: (c, t) or t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quern.errors import InputError
from quern.words import counted

__all__ = ["FORMS", "Fit", "Floats", "by_parameters", "check_runs", "distinct", "fit", "losses"]

Floats = NDArray[np.float64]

FORMS: Mapping[str, str] = {"log-linear": "c + exp(p · t)", "linear": "p · t"}

_STARTS = (0.0, 0.5, 0.8, 0.95)
"""What a fit begins with for c, in least losses; for each of them t follows from a linear regression of ln(L - c)."""
_MOST_SLOPE = 50.0
"""Bound of |t|: exp(50) is no loss."""


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


@dataclass(frozen=True, eq=False)
class Fit:
    """A form with the parameters that fit n runs best; runs of equal mixtures are one, with their mean loss."""

    form: str
    parameters: Floats
    """[parameters]."""
    covariance: Floats
    """[parameters, parameters]: σ² (JᵀJ)⁻¹, zero for a c at its bound of 0."""
    sigma: float
    """Standard deviation of a run's loss around the law: the root of (squared residuals / degrees of freedom)."""
    freedom: int
    """Different mixtures without the number of parameters that are at no bound."""
    without: Floats
    """[n, parameters] Parameters fitted to all runs but one; NaN where the others do not tell the sources apart."""
    left_out: Floats
    """[n] Measured loss less that of the law that was fitted without the run; NaN where there is none."""
    measured: Floats
    """[n] The losses."""

    @property
    def left(self) -> NDArray[np.bool_]:
        """[n] The runs that can be left out."""
        return ~np.isnan(self.left_out)

    @property
    def error(self) -> float:
        """Root of the mean squared leave-one-out error, of the runs that can be left out."""
        return float(np.sqrt(np.mean(self.left_out[self.left] ** 2)))

    @property
    def explained(self) -> float:
        """1 - squared leave-one-out errors / squared deviations from the mean; NaN where all losses are equal."""
        measured = self.measured[self.left]
        spread = float(np.sum((measured - measured.mean()) ** 2))
        return 1 - float(np.sum(self.left_out[self.left] ** 2)) / spread if spread else float("nan")

    @cached_property
    def rank_correlation(self) -> float:
        """Spearman's, between measured losses and those of the laws fitted without the run."""
        from scipy.stats import spearmanr

        measured = self.measured[self.left]
        predicted = measured - self.left_out[self.left]
        if np.ptp(predicted) == 0 or np.ptp(measured) == 0:
            return float("nan")
        return float(spearmanr(measured, predicted).statistic)


def check_runs(form: str, mixtures: Floats, names: Sequence[str], what: str) -> None:
    """Raise an InputError if mixtures [n, sources] are too few for a form, or do not tell the sources apart."""
    if form not in FORMS:
        raise InputError(f"form: expected {' or '.join(FORMS)}, got {form!r}")
    count, sources = len(distinct(mixtures)[0]), mixtures.shape[1]
    parameters = sources + (form == "log-linear")
    if count < parameters + 2:
        told = f"{counted(parameters, 'parameter')} for {counted(sources, 'source')}"
        raise InputError(
            f"{what}: {form} has {told}; expected runs of at least {parameters + 2} different mixtures, got {count}"
        )
    if np.linalg.matrix_rank(mixtures) < sources:
        never = [name for name, column in zip(names, mixtures.T, strict=True) if not column.any()]
        why = f"no run reads {', '.join(never)}" if never else "shares of some sources always go together"
        raise InputError(f"{what}: the mixtures do not tell {sources} sources apart: {why}; expected other mixtures")


def distinct(mixtures: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """The different ones of mixtures [n, sources] in the order of their first runs: [different, sources]; and the place
    of each run's among them, [n]. Shares that differ by less than 1e-9 are equal."""
    _, first, place = np.unique(mixtures.round(9), axis=0, return_index=True, return_inverse=True)
    return mixtures[np.sort(first)], np.argsort(np.argsort(first))[place.reshape(-1)]


def fit(form: str, mixtures: Floats, measured: Floats, names: Sequence[str], what: str = "runs") -> Fit:
    """Fit ``form`` to mixtures [n, sources], rows of which add up to 1, and losses [n]; ``names``: of the sources.

    Runs of equal mixtures count as one, with the mean of their losses: a run of the same seed that is repeated tells
    nothing new. The log-linear form is fitted from several deterministic starts, with 0 ≤ c and an analytic Jacobian;
    each law without one run begins where that of all runs ends as well. Standard errors hold for independent noise of
    one size and a law that is true; leave-one-out errors assume neither.

    Raises:
        InputError: there are too few runs, they do not tell the sources apart, or a loss is not above 0; ``what``
            names them.
    """
    check_runs(form, mixtures, names, what)
    if not np.isfinite(measured).all() or measured.min() <= 0:
        raise InputError(f"{what}: expected losses above 0, got {measured[~(measured > 0)][0]:g}")
    mixtures, place = distinct(mixtures)
    measured = np.bincount(place, measured) / np.bincount(place)
    best = _parameters(form, mixtures, measured)
    count = len(measured)
    without = np.full((count, len(best)), np.nan)
    leverage = (np.linalg.qr(mixtures)[0] ** 2).sum(axis=1)
    for out in np.flatnonzero(leverage < 1 - 1e-9):  # at 1 the others do not tell the sources apart
        keep = np.arange(count) != out
        without[out] = _parameters(form, mixtures[keep], measured[keep], best)
    residuals = measured - losses(form, best, mixtures)
    free = np.ones(len(best), bool)
    free[0] = form == "linear" or best[0] > 1e-9 * measured.min()
    freedom = count - int(free.sum())
    sigma = float(np.sqrt(residuals @ residuals / freedom))
    jacobian = by_parameters(form, best, mixtures)[:, free]
    covariance = np.zeros((len(best),) * 2)
    covariance[np.ix_(free, free)] = sigma**2 * np.linalg.pinv(jacobian.T @ jacobian, hermitian=True)
    left_out = measured - losses(form, without, mixtures)
    return Fit(form, best, covariance, sigma, freedom, without, left_out, measured)


def _parameters(form: str, mixtures: Floats, measured: Floats, *more: Floats) -> Floats:
    """The best from all starts; ``more``: further ones."""
    from scipy.optimize import least_squares

    if form == "linear":
        return np.asarray(np.linalg.lstsq(mixtures, measured, rcond=None)[0])
    starts = [_start(mixtures, measured, share * measured.min()) for share in _STARTS]
    low = np.array([0.0] + [-_MOST_SLOPE] * mixtures.shape[1])
    high = np.array([measured.max()] + [_MOST_SLOPE] * mixtures.shape[1])
    found = [
        least_squares(
            lambda theta: losses(form, theta, mixtures) - measured, np.clip(begin, low, high),
            lambda theta: by_parameters(form, theta, mixtures), bounds=(low, high),
            xtol=1e-12, ftol=1e-14, gtol=1e-12, max_nfev=500,
        )
        for begin in (*starts, *more)
    ]  # fmt: skip
    return np.asarray(min(found, key=lambda one: one.cost).x)


def _start(mixtures: Floats, measured: Floats, constant: float) -> Floats:
    """(c, t) with t from ln(L - c) ~ p · t, weighted as errors of L are: d ln(L - c) = dL / (L - c)."""
    above = measured - constant
    slopes = np.linalg.lstsq(mixtures * above[:, None], np.log(above) * above, rcond=None)[0]
    return np.concatenate([[constant], slopes])
