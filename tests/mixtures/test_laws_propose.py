"""Proposals of mixing laws: the best mixture is cvxpy's, is where no share can gain, and says when it extrapolates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from quern.errors import InputError, QuernError
from quern.mixtures.laws.fit import fit
from quern.mixtures.laws.propose import Proposal, Wish, propose, to_dict
from quern.mixtures.laws.simplex import minimise
from support.laws import known, loss, plant
from support.oracles import mixing_proposals

GOLDEN = json.loads(mixing_proposals.FILE.read_text())
NAMES = [f"s{number}" for number in range(12)]


def solved(problem: dict[str, Any]) -> Proposal:
    rows = list(zip(problem["constants"], problem["slopes"], strict=True))
    fits = {f"f{number}": known("log-linear", np.array([c, *t])) for number, (c, t) in enumerate(rows)}
    sources = len(problem["caps"])
    weights = dict(zip(fits, problem["weights"], strict=True))
    wish = Wish(weights, np.array(problem["caps"]), np.array(problem["prior"]), problem["kl"])
    return propose(fits, np.eye(sources), NAMES[:sources], wish)


@pytest.mark.parametrize("problem", GOLDEN, ids=range(len(GOLDEN)))
def test_proposals_are_those_of_cvxpy(problem: dict[str, Any]) -> None:
    found = solved(problem).shares
    np.testing.assert_allclose(found, problem["shares"], atol=1e-6)
    assert solved(problem).unique
    assert found.sum() == pytest.approx(1.0, abs=1e-14)
    assert (found >= 0).all()
    assert (found <= np.array(problem["caps"]) + 1e-12).all()


def test_cvxpy_says_so_today() -> None:
    pytest.importorskip("cvxpy")
    for problem in GOLDEN:
        np.testing.assert_allclose(mixing_proposals.solve(problem), problem["shares"], atol=1e-6)


@pytest.mark.parametrize("problem", GOLDEN, ids=range(len(GOLDEN)))
def test_no_exchange_between_two_sources_gains(problem: dict[str, Any]) -> None:
    """The condition of Karush, Kuhn and Tucker, from slopes that are written down here."""
    shares, caps = solved(problem).shares, np.array(problem["caps"])
    slopes, weights = np.array(problem["slopes"]), np.array(problem["weights"])
    gradient = (weights * np.exp(slopes @ shares)) @ slopes
    if problem["kl"]:
        gradient = gradient + problem["kl"] * np.log(np.maximum(shares, 1e-300) / np.array(problem["prior"]))
    more, less = shares < caps - 1e-7, shares > 1e-7
    assert gradient[more].min() >= gradient[less].max() - 1e-5


@pytest.mark.slow
def test_steep_laws_have_a_best_mixture_too() -> None:
    """Slopes up to the bound of a fit, 50: no exchange between two sources gains, in units of the steepest slope."""
    for seed in range(30):
        random = np.random.default_rng([15, seed])
        count, families = int(random.integers(2, 25)), int(random.integers(1, 6))
        slopes = random.normal(0, random.choice([1, 10, 25]), (families, count)).clip(-50, 50)
        fits = {str(row): known("log-linear", np.array([1.0, *own])) for row, own in enumerate(slopes)}
        wish = Wish(dict.fromkeys(fits, 1 / families), np.full(count, max(0.4, 1.5 / count)))
        shares = propose(fits, np.eye(count), [str(number) for number in range(count)], wish).shares
        gradient = np.exp(slopes @ shares) @ slopes / families
        steepest = np.abs(np.exp(slopes.mean(axis=1)) @ slopes / families).max()
        more, less = shares < wish.caps - 1e-6, shares > 1e-6
        assert gradient[less].max() - gradient[more].min() < 1e-5 * max(steepest, 1e-3)


def test_what_has_no_number_has_no_best_mixture() -> None:
    with pytest.raises(QuernError, match="the best mixture was not found"):
        minimise(lambda at: (np.full(3, np.nan), np.eye(3)), np.ones(3))


@pytest.mark.slow
def test_linear_laws_are_a_linear_program() -> None:
    random = np.random.default_rng(8)
    for _ in range(20):
        slopes, weights = random.uniform(1, 4, (3, 6)), random.dirichlet(np.ones(3))
        caps = np.minimum(random.uniform(0.1, 0.7, 6), 1.0)
        caps *= max(1.0, 1.3 / caps.sum())
        fits = {name: known("linear", row) for name, row in zip("abc", slopes, strict=True)}
        found = propose(fits, np.eye(6), NAMES[:6], Wish(dict(zip("abc", weights, strict=True)), caps))
        expected = linprog(
            weights @ slopes, A_eq=np.ones((1, 6)), b_eq=[1.0], bounds=list(zip([0] * 6, caps, strict=True))
        )
        np.testing.assert_allclose(found.shares, expected.x, atol=1e-6)
        assert found.loss[0] == pytest.approx(expected.fun, abs=1e-9)


def of(parameters: Sequence[float], form: str = "linear", **changes: Any) -> Proposal:
    sources = len(parameters) - (form == "log-linear")
    tried = changes.pop("tried", np.vstack([np.eye(sources), 0.9 * np.eye(sources) + 0.1 / sources]))
    wish = Wish({"all": 1.0}, changes.pop("caps", np.ones(sources)), **changes)
    return propose({"all": known(form, np.array(parameters))}, tried, NAMES[:sources], wish)


def test_a_proposal_that_is_not_the_only_one_says_so() -> None:
    """Two sources of one slope: what the better third cannot give is theirs, in any shares."""
    found = of([2.0, 2.0, 1.0], caps=np.array([1.0, 1.0, 0.4]))
    assert not found.unique
    np.testing.assert_allclose(found.shares, [0.3, 0.3, 0.4], atol=0.01)  # inside their set
    assert found.warnings == ("other mixtures are predicted to be just as good; with kl > 0 there is one",)
    one = of([2.0, 2.0, 1.0], caps=np.array([1.0, 1.0, 0.4]), prior=np.array([0.2, 0.1, 0.7]), kl=0.01)
    np.testing.assert_allclose(one.shares, [0.4, 0.2, 0.4], atol=1e-6)
    assert one.warnings == ()


def test_a_source_that_is_as_good_as_two_others_together_leaves_more_than_one() -> None:
    """e^(-2a - c) + e^(-2b - c) is 2/e wherever a = b; a family of c alone decides."""
    slopes = [[-2.0, 0.0, -1.0], [0.0, -2.0, -1.0], [0.0, 0.0, -0.5]]
    for families, unique in ((2, False), (3, True)):
        fits = {str(row): known("log-linear", np.array([1.0, *own])) for row, own in enumerate(slopes[:families])}
        wish = Wish(dict.fromkeys(fits, 1 / families), np.full(3, 0.9))
        found = propose(fits, np.eye(3), NAMES[:3], wish)
        assert found.shares[0] == pytest.approx(found.shares[1], abs=1e-6)
        assert found.unique == unique
    without = propose(fits, np.eye(3), NAMES[:3], Wish({"0": 0.5, "1": 0.5, "2": 0.0}, np.full(3, 0.9)))
    assert not without.unique  # the third family does not count
    assert found.shares[2] == pytest.approx(0.9, abs=1e-6)


def test_linear_laws_that_make_up_for_each_other_leave_more_than_one() -> None:
    fits = {name: known("linear", np.array(own)) for name, own in (("a", [1.0, 2.0, 1.5]), ("b", [2.0, 1.0, 1.5]))}
    assert not propose(fits, np.eye(3), NAMES[:3], Wish({"a": 0.5, "b": 0.5}, np.ones(3))).unique
    assert propose(fits, np.eye(3), NAMES[:3], Wish({"a": 0.6, "b": 0.4}, np.ones(3))).unique
    assert of([3.0, 1.0, 2.0], caps=np.array([1.0, 0.5, 0.4])).unique  # two at their caps, and the rest is the third's


def test_what_the_prior_has_nothing_of_stays_out() -> None:
    found = of([1.0, 2.0, 3.0], prior=np.array([0.0, 0.5, 0.5]), kl=0.1)
    assert found.shares[0] == 0.0
    odds = np.exp((3.0 - 2.0) / 0.1)  # shares are the prior's times e^(-loss / kl)
    np.testing.assert_allclose(found.shares[1:], [odds / (1 + odds), 1 / (1 + odds)], atol=1e-8)


def test_a_divergence_alone_gives_the_prior_within_caps() -> None:
    prior = np.array([0.5, 0.3, 0.15, 0.05])
    found = of([2.0] * 4, prior=prior, kl=1.0, caps=np.array([0.2, 1, 1, 1]))
    np.testing.assert_allclose(found.shares, [0.2, *(0.8 * prior[1:] / prior[1:].sum())], atol=1e-8)


def test_a_proposal_outside_of_what_was_tried_says_so() -> None:
    """The two best sources were tried, but never one without the other."""
    tried = np.array([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [0.3, 0.3, 0.4]])
    found = of([1.0, 1.5, 3.0], tried=tried)
    assert found.outside == pytest.approx(0.5)  # from (1, 0, 0) to (1/2, 1/2, 0) half must move
    assert found.warnings[0].startswith("the proposal is no average of mixtures that were tried: 50.0%")
    assert found.warnings[1] == "s0: a share of 100.00% lies outside of what was tried, 20.00% to 50.00%"
    assert found.warnings[2] == "s1: a share of 0.00% lies outside of what was tried, 20.00% to 50.00%"
    inside = of([1.0, 1.5, 3.0], tried=tried, caps=np.array([0.5, 0.5, 1.0]))
    assert inside.outside == pytest.approx(0.0, abs=1e-6)
    assert inside.warnings == ()
    box = np.array([[1.0, 0, 0], [0, 1.0, 0], [0, 0.4, 0.6], [0.4, 0, 0.6]])
    corner = of([3.0, 2.9, 1.0], tried=box, caps=np.array([1.0, 0.2, 0.6]))
    assert corner.outside == pytest.approx(0.0, abs=1e-6)


def test_a_law_that_explains_nothing_says_so() -> None:
    random = np.random.default_rng(14)
    mixtures = random.dirichlet(np.ones(3), 12)
    noise, law = 2 + random.normal(size=12) / 10, loss("linear", np.array([1.0, 2.0, 3.0]), mixtures)
    fits = {name: fit("linear", mixtures, own, NAMES[:3]) for name, own in (("noise", noise), ("law", law))}
    for weight, expected in ((0.5, 1), (0.0, 0)):
        found = propose(fits, mixtures, NAMES[:3], Wish({"noise": weight, "law": 1 - weight}, np.ones(3)))
        assert (
            sum("predicts runs that were left out no better than their mean" in one for one in found.warnings)
            == expected
        )
    assert not any(one.startswith("law: the law") for one in found.warnings)


def test_a_source_that_one_run_reads_is_named() -> None:
    found = of([1.0, 1.5, 3.0], tried=np.array([[0.5, 0.5, 0.0], [0.6, 0.4, 0.0], [0.2, 0.2, 0.6]]))
    assert "s2: one run alone reads it, which no leave-one-out error and no interval counts" in found.warnings
    again = of([1.0, 1.5, 3.0], tried=np.array([[0.5, 0.5, 0.0], [0.6, 0.4, 0.0], [0.2, 0.2, 0.6], [0.2, 0.2, 0.6]]))
    assert again.warnings == found.warnings  # the same mixture again is no other run


def test_intervals_are_the_jackknife_of_fits_without_a_run() -> None:
    """By hand, for the mean of two families and for what is gained on the prior."""
    random = np.random.default_rng(9)
    mixtures, prior = random.dirichlet(np.ones(3), 15), np.array([0.2, 0.3, 0.5])
    planted = [plant("linear", 3, random) for _ in range(2)]
    measured = [loss("linear", own, mixtures) + 0.1 * random.normal(size=15) for own in planted]
    fits = {name: fit("linear", mixtures, own, NAMES[:3]) for name, own in zip("ab", measured, strict=True)}
    found = propose(fits, mixtures, NAMES[:3], Wish({"a": 0.25, "b": 0.75}, np.full(3, 0.6), prior))
    assert found.gain is not None
    best = [np.linalg.lstsq(mixtures, y, rcond=None)[0] for y in measured]
    for value, at in ((found.loss, found.shares), (found.gain, prior - found.shares)):
        without = []
        for out in range(15):
            keep = np.arange(15) != out
            own = [np.linalg.lstsq(mixtures[keep], y[keep], rcond=None)[0] @ at for y in measured]
            without.append(0.25 * own[0] + 0.75 * own[1])
        error = np.sqrt(14 / 15 * np.sum((np.array(without) - np.mean(without)) ** 2))
        assert value[0] == pytest.approx(sum(w * (y @ at) for w, y in zip((0.25, 0.75), best, strict=True)))
        assert value[1] == pytest.approx(2.1788128 * error)  # Student's, 12 degrees of freedom


@pytest.mark.long
def test_intervals_hold_the_true_loss_of_the_proposal() -> None:
    """Of 100 planted pairs of laws; three standard deviations of so many draws."""
    inside = 0
    for draw in range(100):
        random = np.random.default_rng([11, draw])
        mixtures = random.dirichlet(np.ones(4), 32)
        planted = {name: plant("log-linear", 4, random) for name in "ab"}
        fits = {
            name: fit(
                "log-linear", mixtures, loss("log-linear", own, mixtures) + 0.01 * random.normal(size=32), NAMES[:4]
            )
            for name, own in planted.items()
        }
        found = propose(fits, mixtures, NAMES[:4], Wish({"a": 0.5, "b": 0.5}, np.full(4, 0.6)))
        true = sum(0.5 * float(loss("log-linear", own, [found.shares])[0]) for own in planted.values())
        inside += abs(found.loss[0] - true) <= found.loss[1]
    assert inside >= 95 - 3 * np.sqrt(100 * 0.05 * 0.95)


def test_equal_losses_are_plain_data_too() -> None:
    mixtures = np.random.default_rng(16).dirichlet(np.ones(3), 9)
    fits = {"all": fit("linear", mixtures, np.full(9, 2.0), NAMES[:3])}
    found = to_dict(propose(fits, mixtures, NAMES[:3], Wish({"all": 1.0}, np.ones(3))), fits)
    plain = json.loads(json.dumps(found, allow_nan=False))
    assert plain["families"]["all"]["left_out_explained"] is None
    assert plain["loss"][0] == pytest.approx(2.0)


def test_what_cannot_be_proposed_is_said() -> None:
    with pytest.raises(InputError, match=r"max_epochs: the caps on repetition leave 90.0% of the budget"):
        of([1.0, 2.0], caps=np.array([0.5, 0.4]))
    np.testing.assert_allclose(of([1.0, 2.0], caps=np.array([0.25, 0.75])).shares, [0.25, 0.75])
    assert of([1.0, 2.0, 3.0], caps=np.array([0.0, 1.0, 1.0])).shares[0] == 0.0
    with pytest.raises(InputError, match="kl: expected the tokens of the sources with it"):
        of([1.0, 2.0], kl=0.1)
