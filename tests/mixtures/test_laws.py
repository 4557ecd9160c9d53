"""Fits of mixing laws: planted laws are found within the stated errors, leaving runs out is leaving them out."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.optimize import approx_fprime, curve_fit, differential_evolution
from scipy.stats import norm, rankdata, t

from quern.errors import InputError
from quern.mixtures.laws.fit import FORMS, Floats, by_parameters, fit, losses
from support.laws import loss, plant, standard_error

NAMES = ["web", "books", "code", "wiki"]


@pytest.mark.parametrize("form", FORMS)
def test_forms_and_their_slopes(form: str) -> None:
    random = np.random.default_rng(1)
    parameters, mixtures = plant(form, 4, random), random.dirichlet(np.ones(4), 6)
    np.testing.assert_allclose(losses(form, parameters, mixtures), loss(form, parameters, mixtures), rtol=1e-13)
    for row, mixture in zip(by_parameters(form, parameters, mixtures), mixtures, strict=True):
        numeric = approx_fprime(parameters, lambda at, own=mixture: float(loss(form, at, [own])[0]), 1e-7)
        np.testing.assert_allclose(row, numeric, rtol=1e-5, atol=1e-6)


def test_the_exponential_law_is_the_log_linear_one() -> None:
    """Ye et al. have a factor k; on the simplex it is a shift of all slopes."""
    random = np.random.default_rng(2)
    mixtures, slopes, factor = random.dirichlet(np.ones(3), 20), random.normal(size=3), 1.7
    exponential = 0.8 + factor * np.exp(mixtures @ slopes)
    found = fit("log-linear", mixtures, exponential, NAMES[:3])
    np.testing.assert_allclose(found.parameters, [0.8, *(slopes + np.log(factor))], rtol=1e-6)


def coverage(form: str, sources: int, runs: int, draws: int) -> tuple[float, float, float]:
    """Shares of parameters and of predictions of other mixtures that are within their 95 % intervals, and that of σ's
    that are within a chi-square's."""
    within, predicted, sizes = [], [], []
    for draw in range(draws):
        random = np.random.default_rng([7, draw])
        mixtures, planted = random.dirichlet(np.ones(sources), runs), plant(form, sources, random)
        measured = loss(form, planted, mixtures) + 0.01 * random.normal(size=runs)
        found = fit(form, mixtures, measured, NAMES[:sources])
        reach = t.ppf(0.975, found.freedom)
        within.append(np.abs(found.parameters - planted) <= reach * np.sqrt(np.diag(found.covariance)))
        for other in random.dirichlet(np.ones(sources), 10):
            off = abs(float(losses(form, found.parameters, other)) - float(loss(form, planted, [other])[0]))
            predicted.append(off <= reach * standard_error(found, other))
        sizes.append(0.005 < found.sigma < 0.02)
    return float(np.mean(within)), float(np.mean(predicted)), float(np.mean(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_planted_laws_are_found_within_stated_errors(form: str) -> None:
    """Of 12 · 4 or 5 parameters 95 % are within 95 % intervals, but for what a binomial allows."""
    within, predicted, sizes = coverage(form, 4, 20, 12)
    assert within >= 0.85
    assert 0.85 <= predicted < 1.0
    assert sizes == 1.0


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_hundred_planted_laws_are_found_within_stated_errors(form: str) -> None:
    within, predicted, sizes = coverage(form, 4, 32, 100)
    below = norm.cdf(-3)  # three standard deviations of so many independent draws, 100
    assert below < 0.01
    room = 3 * np.sqrt(0.95 * 0.05 / 100)
    assert abs(within - 0.95) < room
    assert abs(predicted - 0.95) < room
    assert sizes == 1.0


@pytest.mark.parametrize("form", FORMS)
def test_leaving_a_run_out_is_a_fit_without_it(form: str) -> None:
    """The other fit is scipy's curve_fit, from the planted law, by Levenberg and Marquardt with numeric slopes."""
    random = np.random.default_rng(3)
    mixtures, planted = random.dirichlet(np.ones(3), 14), plant(form, 3, random)
    measured = loss(form, planted, mixtures) + 0.002 * random.normal(size=14)
    found = fit(form, mixtures, measured, NAMES[:3])

    def law(x: Floats, *at: float) -> Floats:
        return loss(form, np.array(at), x.T)

    expected = []
    for out in range(14):
        keep = np.arange(14) != out
        best, _ = curve_fit(law, mixtures[keep].T, measured[keep], p0=planted, xtol=1e-12, ftol=1e-12)
        expected.append(measured[out] - loss(form, best, mixtures[[out]])[0])
    np.testing.assert_allclose(found.left_out, expected, atol=2e-6)
    assert found.error == pytest.approx(np.sqrt(np.mean(np.square(expected))), rel=1e-4)
    assert found.explained == pytest.approx(1 - np.mean(np.square(expected)) / measured.var(), abs=1e-6)
    ranks = [rankdata(measured), rankdata(measured - expected)]
    assert found.rank_correlation == pytest.approx(np.corrcoef(ranks)[0, 1], abs=1e-9)
    best, covariance = curve_fit(law, mixtures.T, measured, p0=planted, xtol=1e-12, ftol=1e-12)
    np.testing.assert_allclose(found.parameters, best, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)), np.sqrt(np.diag(covariance)), rtol=1e-3)


@pytest.mark.slow
def test_starts_reach_the_least_squares_of_a_global_search() -> None:
    for seed in range(4):
        random = np.random.default_rng([5, seed])
        mixtures, planted = random.dirichlet(np.full(2, 0.5), 9), plant("log-linear", 2, random)
        measured = loss("log-linear", planted, mixtures) + 0.05 * random.normal(size=9)
        found = fit("log-linear", mixtures, measured, NAMES[:2])
        searched = differential_evolution(
            lambda at, x=mixtures, y=measured: float(np.sum((at[0] + np.exp(x @ at[1:]) - y) ** 2)),
            [(0.0, float(measured.max())), (-20.0, 5.0), (-20.0, 5.0)], seed=1, tol=1e-10,
        )  # fmt: skip
        assert found.sigma**2 * found.freedom <= searched.fun * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_alone_reads_a_source_is_not_predicted(form: str) -> None:
    """Nothing is known of the source without it; the other runs are predicted, and the errors are theirs."""
    random = np.random.default_rng(12)
    mixtures = np.vstack([np.column_stack([random.dirichlet(np.ones(2), 11), np.zeros(11)]), [0.3, 0.3, 0.4]])
    measured = loss(form, plant(form, 3, random), mixtures) + 0.01 * random.normal(size=12)
    found = fit(form, mixtures, measured, NAMES[:3])
    assert list(np.flatnonzero(~found.left)) == [11]
    assert np.isnan(found.without[11]).all()
    assert found.error == pytest.approx(np.sqrt(np.mean(found.left_out[:11] ** 2)))
    without = fit(form, mixtures[:11, :2], measured[:11], NAMES[:2])  # the run tells the third source's slope alone
    np.testing.assert_allclose(found.left_out[:11], without.left_out, atol=1e-5)
    assert found.rank_correlation == pytest.approx(without.rank_correlation)


def test_a_constant_at_its_bound_is_no_parameter() -> None:
    random = np.random.default_rng(6)
    mixtures = random.dirichlet(np.ones(3), 20)
    measured = np.exp(mixtures @ np.array([0.5, 0.7, 0.9])) - 0.3 + 0.001 * random.normal(size=20)
    found = fit("log-linear", mixtures, measured, NAMES[:3])
    assert found.parameters[0] == pytest.approx(0.0, abs=1e-8)
    assert found.freedom == 20 - 3
    assert found.covariance[0, 0] == 0.0


@pytest.mark.parametrize("form", FORMS)
def test_equal_mixtures_are_one_run(form: str) -> None:
    """A run of the same seed and mixture has the same loss: it changes no parameter, error or degree of freedom."""
    random = np.random.default_rng(15)
    mixtures = random.dirichlet(np.ones(3), 9)
    measured = loss(form, plant(form, 3, random), mixtures) + 0.01 * random.normal(size=9)
    again = np.array([*range(9), 4, 0, 4])
    once, more = (fit(form, mixtures[rows], measured[rows], NAMES[:3]) for rows in (np.arange(9), again))
    np.testing.assert_allclose(more.left_out, once.left_out, atol=1e-9)
    np.testing.assert_allclose(more.covariance, once.covariance, rtol=1e-6)
    assert more.freedom == once.freedom
    with pytest.raises(InputError, match="different mixtures, got 3"):
        fit(form, mixtures[[0, 1, 2, 0, 1, 2]], measured[[0, 1, 2, 0, 1, 2]], NAMES[:3])


def test_what_cannot_be_fitted_is_said() -> None:
    random = np.random.default_rng(4)
    mixtures, measured = random.dirichlet(np.ones(3), 12), random.uniform(2, 3, 12)
    with pytest.raises(
        InputError,
        match="t: log-linear has 4 parameters for 3 sources; expected runs of at least 6 different mixtures, got 5",
    ):
        fit("log-linear", mixtures[:5], measured[:5], NAMES[:3], "t")
    with pytest.raises(InputError, match="t: expected losses above 0, got -1"):
        fit("linear", mixtures, np.where(np.arange(12) == 3, -1.0, measured), NAMES[:3], "t")
    two = mixtures[:, :2] / mixtures[:, :2].sum(axis=1, keepdims=True)
    with pytest.raises(InputError, match="no run reads code"):
        fit("linear", np.column_stack([two, np.zeros(12)]), measured, NAMES[:3])
    with pytest.raises(InputError, match="always go together"):
        fit("linear", np.column_stack([two[:, 0], two[:, 1] / 2, two[:, 1] / 2]), measured, NAMES[:3])
    with pytest.raises(InputError, match="form: expected log-linear or linear, got 'cubic'"):
        fit("cubic", mixtures, measured, NAMES[:3])


@pytest.fixture(scope="module")
def olmix(shared: Path) -> dict[str, Any]:
    folder = shared / "data" / "olmix"
    plain = yaml.safe_load((folder / "dclm_per_family.yaml").read_text())
    rows = {name: list(csv.DictReader((folder / f"dclm_{name}.csv").open())) for name in ("ratios", "metrics")}
    return {"plain": plain, **rows}


@pytest.mark.shared
@pytest.mark.parametrize(
    "place", [pytest.param(1, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.long) for n in (0, 2))]
)
def test_the_log_linear_law_predicts_olmix_runs_better_than_a_linear_one(olmix: dict[str, Any], place: int) -> None:
    """127 runs of 30M-parameter models, 24 domains (Olmix, figure 7 and table 3, finds the same of the two)."""
    names = list(olmix["plain"]["priors"]["token_counts"])
    mixtures = np.array([[float(row[name]) for name in names] for row in olmix["ratios"]])
    by_run = {row["run"]: row for row in olmix["metrics"]}
    for family, tasks in [*olmix["plain"]["eval"]["tasks"].items()][place : place + 1]:
        kept = [task for task in tasks if task not in olmix["plain"]["filtering"]["drop_metrics"]]
        measured = np.array([np.mean([float(by_run[row["run"]][task]) for task in kept]) for row in olmix["ratios"]])
        linear, log_linear = (fit(form, mixtures, measured, names, family) for form in ("linear", "log-linear"))
        hat = mixtures @ np.linalg.solve(mixtures.T @ mixtures, mixtures.T)
        left = np.diag(hat) < 1 - 1e-9  # all but the one run that reads a domain
        assert (left == linear.left).all()
        assert (left == log_linear.left).all()
        assert np.count_nonzero(~left) == np.count_nonzero((mixtures > 0).sum(axis=0) == 1) == 1
        shortcut = (measured - hat @ measured)[left] / (1 - np.diag(hat)[left])
        np.testing.assert_allclose(linear.left_out[left], shortcut, atol=1e-9)
        assert log_linear.error < 0.7 * linear.error
        assert log_linear.rank_correlation > linear.rank_correlation
        assert log_linear.rank_correlation > 0.8
