"""The mixture that the fitted laws propose, how far its predicted losses can be trusted, and what speaks against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quern.errors import InputError
from quern.mixtures.laws.fit import FORMS, Fit, Floats, distinct, losses
from quern.mixtures.laws.simplex import hull_distance, minimise

__all__ = ["Proposal", "Wish", "family_weights", "propose", "to_dict"]

_NEAR = 1e-6
"""Shares that differ by less are one."""


@dataclass(frozen=True, eq=False)
class Wish:
    """What a proposal is to minimise: Σ (weight · loss) over families, + kl · KL(p ‖ prior), within caps."""

    weights: Mapping[str, float]
    """By family; they add up to 1."""
    caps: Floats
    """[sources] The greatest share: max_epochs · tokens / budget, at most 1."""
    prior: Floats | None = None
    """[sources] Shares that ``kl`` draws to, and that the proposal is compared with."""
    kl: float = 0.0
    """In nats of loss a nat of divergence."""


def family_weights(given: Mapping[str, float], families: Iterable[str]) -> dict[str, float]:
    """A weight for each family, which add up to 1: as ``given``, or all the same where none is.

    Raises:
        InputError: one is of no family, or they are not numbers ≥ 0, of which one is above 0.
    """
    weights = {name: given.get(name, 0.0) if given else 1.0 for name in families}
    if wrong := [name for name in given if name not in weights]:
        raise InputError(f"weights: {wrong[0]!r}: expected one of {', '.join(weights)}")
    if min(weights.values()) < 0 or not 0 < (total := sum(weights.values())) < float("inf"):
        raise InputError("weights: expected numbers ≥ 0, of which one is above 0")
    return {name: own / total for name, own in weights.items()}


@dataclass(frozen=True, eq=False)
class Proposal:
    """Shares of sources, and predicted losses, each with how far its 95 % interval reaches to either side: of the law,
    without a run's own noise, by the jackknife over runs; it does not count that the same runs chose the shares."""

    sources: tuple[str, ...]
    shares: Floats
    """[sources]."""
    loss: tuple[float, float]
    """Weighted mean over families."""
    gain: tuple[float, float] | None
    """How far below that of the prior it is."""
    families: Mapping[str, tuple[float, float]]
    unique: bool
    """Whether no other mixture has the same predicted loss."""
    outside: float
    """The share that must move for the mixture to be an average of those that were tried; 0 inside their hull."""
    warnings: tuple[str, ...]


def propose(fits: Mapping[str, Fit], tried: Floats, sources: Sequence[str], wish: Wish) -> Proposal:
    """The shares that minimise ``wish`` over laws, by family and of one form, that were fitted to the mixtures
    ``tried`` [n, sources].

    Both forms are convex in the shares, so that there is one least value. Where several mixtures have it, which only
    ``kl`` > 0 excludes, the proposal is inside their set, and a warning says so.

    Raises:
        InputError: the caps leave no mixture, or ``kl`` has no prior.
    """
    if wish.kl and wish.prior is None:
        raise InputError("kl: expected the tokens of the sources with it: their shares are what it draws to")
    shares = _best(fits, wish)
    unique, outside = bool(wish.kl) or _unique(fits, wish, shares), hull_distance(shares, tried)
    doubts = [
        f"{name}: the law predicts runs that were left out no better than their mean does"
        for name, one in fits.items()
        if wish.weights[name] and one.explained <= 0
    ]
    return Proposal(
        tuple(sources),
        shares,
        _interval(fits, wish.weights, shares),
        None if wish.prior is None else _interval(fits, wish.weights, wish.prior, shares),
        {name: _interval({name: one}, {name: 1.0}, shares) for name, one in fits.items()},
        unique,
        outside,
        (*doubts, *_warnings(shares, tried, sources, unique, outside)),
    )


def _curved(fits: Mapping[str, Fit]) -> bool:
    return all(one.form == "log-linear" for one in fits.values())


def _laws(fits: Mapping[str, Fit], wish: Wish) -> tuple[Floats, Floats]:
    """Weights [k] and slopes t [k, sources] of the families."""
    slopes = [one.parameters[-len(wish.caps) :] for one in fits.values()]
    return np.array([wish.weights[name] for name in fits]), np.array(slopes)


def _unique(fits: Mapping[str, Fit], wish: Wish, shares: Floats) -> bool:
    """Whether every exchange among shares that are at no bound changes the loss: by p · t of a family, since exp is
    strictly convex; of linear laws, which make up for each other, by the sum."""
    weights, slopes = _laws(fits, wish)
    rows = slopes[weights > 0] if _curved(fits) else weights[None] @ slopes
    free = (shares > _NEAR) & (shares < wish.caps - _NEAR)
    matrix = np.vstack([rows / np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-300), np.ones(len(shares))])
    return bool(np.linalg.matrix_rank(matrix[:, free], tol=1e-9) == np.count_nonzero(free))


def _best(fits: Mapping[str, Fit], wish: Wish) -> Floats:
    prior = wish.prior if wish.prior is not None and wish.kl else np.ones(len(wish.caps))
    open_ = (wish.caps > 0) & (prior > 0)
    caps = np.minimum(wish.caps, 1.0)[open_]
    if caps.sum() < 1 - 1e-12:
        told = f"max_epochs: the caps on repetition leave {caps.sum():.1%} of the budget"
        raise InputError(f"{told}; expected more tokens, more epochs or a smaller budget")
    weights, slopes = _laws(fits, wish)
    slopes, prior, curved = slopes[:, open_], prior[open_], _curved(fits)

    def by_shares(at: Floats) -> tuple[Floats, Floats]:
        powers = weights * np.exp(slopes @ at) if curved else weights
        hessian = (slopes.T * powers) @ slopes * curved + np.diag(wish.kl / at)
        return powers @ slopes + wish.kl * (np.log(at / prior) + 1), hessian

    shares = np.zeros(len(wish.caps))
    alone = caps.sum() <= 1 + 1e-12  # there is but one mixture
    shares[open_] = caps / caps.sum() if alone else minimise(by_shares, caps)
    return shares


def _interval(
    fits: Mapping[str, Fit], weights: Mapping[str, float], mixture: Floats, less: Floats | None = None
) -> tuple[float, float]:
    """Weighted loss of a mixture, less that of another one, and how far its 95 % interval reaches: Student's, by the
    jackknife (Efron & Tibshirani 1993, section 11.5). All families leave out the same run at a time."""
    from scipy.stats import t

    def value(form: str, parameters: Floats) -> Floats:
        own = losses(form, parameters, mixture)
        return own if less is None else own - losses(form, parameters, less)

    found = float(sum(weights[name] * value(one.form, one.parameters) for name, one in fits.items()))
    without = np.sum([weights[name] * value(one.form, one.without) for name, one in fits.items()], axis=0)
    without = without[~np.isnan(without)]
    error = float(np.sqrt((len(without) - 1) * np.var(without)))
    return found, float(t.ppf(0.975, min(one.freedom for one in fits.values()))) * error


def _warnings(shares: Floats, tried: Floats, sources: Sequence[str], unique: bool, outside: float) -> Iterator[str]:
    if outside > _NEAR:
        yield (
            f"the proposal is no average of mixtures that were tried: {outside:.1%} of it would have to move; its "
            "losses are extrapolated"
        )
    for name, share, column in zip(sources, shares, distinct(tried)[0].T, strict=True):
        if np.count_nonzero(column) == 1:
            yield f"{name}: one run alone reads it, which no leave-one-out error and no interval counts"
        if not column.min() - _NEAR <= share <= column.max() + _NEAR:
            reach = f"{column.min():.2%} to {column.max():.2%}"
            yield f"{name}: a share of {share:.2%} lies outside of what was tried, {reach}"
    if not unique:
        yield "other mixtures are predicted to be just as good; with kl > 0 there is one"


def to_dict(proposal: Proposal, fits: Mapping[str, Fit]) -> dict[str, Any]:
    """Plain data: the proposal, and the law of each family with its errors."""
    plain = {name: own.tolist() if isinstance(own, np.ndarray) else own for name, own in vars(proposal).items()}
    families = {
        name: {
            "loss": proposal.families[name],
            "law": FORMS[own.form],
            "parameters": own.parameters.tolist(),
            "standard_errors": np.sqrt(np.diag(own.covariance)).tolist(),
            "sigma": own.sigma,
            "left_out_error": own.error,
            "left_out_explained": None if np.isnan(own.explained) else own.explained,
            "rank_correlation": None if np.isnan(own.rank_correlation) else own.rank_correlation,
        }
        for name, own in fits.items()
    }
    return {**plain, "families": families}
