"""How much a save interval wastes, and the best one: formulas against a simulation of failures and other formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import lambertw

from quern.errors import InputError
from quern.train.checkpoint.retention.save_interval import best_interval, daly_interval, expected_waste, young_interval

RUNS = 10_000


@dataclass(frozen=True)
class Regime:
    """In any unit of time."""

    cost: float
    mtbf: float
    restart: float
    delay: float

    def waste(self, interval: float) -> float:
        return expected_waste(interval, self.cost, self.mtbf, restart_s=self.restart, delay_s=self.delay)

    def best(self) -> float:
        return best_interval(self.cost, self.mtbf, delay_s=self.delay)


#: δ/M from 1e-5 to 0.3; a delay of the cost's length is a save that blocks until it is durable.
REGIMES = {
    "δ/M 1e-5, background": Regime(0.1, 1e4, 30.0, 20.0),
    "δ/M 1e-4, blocking": Regime(1.0, 1e4, 300.0, 1.0),
    "δ/M 1e-3, long restart": Regime(1.0, 1e3, 500.0, 10.0),
    "δ/M 1e-3, the delay is the floor": Regime(1.0, 1e3, 20.0, 150.0),
    "δ/M 0.01, background": Regime(1.0, 100.0, 5.0, 8.0),
    "δ/M 0.05, no restart": Regime(1.0, 20.0, 0.0, 3.0),
    "δ/M 0.1, restart as long as M": Regime(1.0, 10.0, 10.0, 1.0),
    "δ/M 0.1, a delay beyond M": Regime(1.0, 10.0, 1.0, 13.0),
    "δ/M 0.3, blocking": Regime(3.0, 10.0, 1.0, 3.0),
    "δ/M 0.3, background": Regime(3.0, 10.0, 4.0, 6.0),
}
WORK, STALL, WAIT, RESTART = range(4)


def simulate(regime: Regime, interval: float, failures: float, seed: int) -> tuple[float, float]:
    """The wasted share of wall time in RUNS runs, event by event, and its standard error.

    A run starts fresh; its clock runs from its first publication to the one after which it has made at least
    ``failures`` MTBFs of useful work, so that all of that work counts once. The standard error is that of a ratio of
    sums over independent runs (delta method). The same seed gives the same times of failure for every interval.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    gaps = rng.exponential(regime.mtbf, size=(64, RUNS))
    last = 1 + math.ceil(failures * regime.mtbf / interval)
    durations = np.array([interval, regime.cost, np.inf, regime.restart])  # a wait ends with a publication
    durable_after = max(regime.delay, regime.cost)

    run = np.arange(RUNS)
    failed = np.zeros(RUNS, np.int64)  # how many times
    failure_at = gaps[0].copy()
    phase = np.full(RUNS, WORK)
    phase_until = np.full(RUNS, interval)
    done = np.zeros(RUNS, np.int64)  # intervals of work that the weights in memory have seen
    published = np.zeros(RUNS, np.int64)
    writing = np.zeros(RUNS, np.int64)
    publish_at = np.full(RUNS, np.inf)
    began, took = np.zeros(RUNS), np.zeros(RUNS)
    while run.size:
        now = np.minimum(np.minimum(publish_at, phase_until), failure_at)
        publishes = publish_at <= now  # at one time: a publication, then the end of a phase, then a failure
        ends = ~publishes & (phase_until <= now)
        fails = ~publishes & ~ends

        published = np.where(publishes, writing, published)
        publish_at = np.where(publishes | fails, np.inf, publish_at)
        first = publishes & (published == 1)
        began[run[first]] = now[first]
        finished = publishes & (published == last)
        took[run[finished]] = now[finished] - began[run[finished]]

        done = np.where(fails, published, done + (ends & (phase == WORK)))
        wants = (ends & (phase == WORK)) | (publishes & (phase == WAIT))
        saves = wants & ~np.isfinite(publish_at)
        writing = np.where(saves, done, writing)
        publish_at = np.where(saves, now + durable_after, publish_at)
        goes = np.where(fails, RESTART, np.where(saves, STALL, np.where(wants, WAIT, WORK)))
        changes = ends | fails | saves
        phase = np.where(changes, goes, phase)
        phase_until = np.where(changes, now + durations[phase], phase_until)

        failed += fails
        if failed.max() >= len(gaps):
            gaps = np.concatenate([gaps, rng.exponential(regime.mtbf, size=(64, RUNS))])
        struck = np.flatnonzero(fails)
        failure_at[struck] = now[struck] + gaps[failed[struck], run[struck]]
        if finished.any():
            left = ~finished
            run, failed, failure_at, phase, phase_until = (
                run[left], failed[left], failure_at[left], phase[left], phase_until[left],
            )  # fmt: skip
            done, published, writing, publish_at = done[left], published[left], writing[left], publish_at[left]
    useful = (last - 1) * interval / took.mean()
    return 1 - useful, useful * took.std(ddof=1) / took.mean() / math.sqrt(RUNS)


#: MTBFs of useful work that a simulated run makes: over all runs, 30,000 failures or more.
LENGTH = 3.0


#: Where saves are many, a simulation has as many events.
SLOW_TO_SIMULATE = {
    "δ/M 1e-5, background", "δ/M 1e-4, blocking", "δ/M 1e-3, long restart", "δ/M 0.01, background",
    "δ/M 0.1, restart as long as M", "δ/M 0.3, background",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW_TO_SIMULATE)) for name in REGIMES]
)
def test_waste_is_that_of_the_simulation(name):
    """Within 4 standard errors (of a normal estimate, outside once in 16,000), which are below 1 % of the waste.

    At half, once and three times Young's interval, and where writes collide.
    """
    regime = REGIMES[name]
    young = math.sqrt(2 * regime.cost * regime.mtbf)
    collision = (regime.delay - regime.cost) / 2
    for number, interval in enumerate([young / 2, young, 3 * young, *([collision] if collision > 0 else [])]):
        found, error = simulate(regime, interval, LENGTH, seed=100 + number)
        assert error < 0.01 * found
        assert abs(regime.waste(interval) - found) < 4 * error, (interval, found, error)


def test_daly_s_examples():
    """Figures 3 to 5 of Daly 2006, δ 5 min: M 24 h gives 117 min, 6 h gives 57 min, 15 min gives 9.1 min."""
    found = [daly_interval(300.0, 60.0 * minutes) / 60 for minutes in (24 * 60, 6 * 60, 15)]
    assert [round(found[0]), round(found[1]), round(found[2], 1)] == [117, 57, 9.1]


def test_young_s_interval():
    assert young_interval(2.0, 100.0) == 20.0
    assert young_interval(0.0, 100.0) == 0.0


@pytest.mark.parametrize("name", REGIMES)
def test_the_best_interval_has_the_least_waste(name):
    """Of those from 1e-6 M to 10 M in steps of 0.2 %."""
    regime = REGIMES[name]
    least = min(regime.waste(regime.mtbf * math.exp(x)) for x in np.arange(math.log(1e-6), math.log(10), 0.002))
    assert regime.waste(regime.best()) <= least * (1 + 1e-12)


@pytest.mark.parametrize("ratio", [1e-8, 1e-5, 1e-3, 0.1, 0.3, 1.0, 2.0, 5.0, 30.0])
def test_the_best_interval_is_lambert_s(ratio):
    """Against SciPy's Lambert W, in Daly's own case; M from above as δ grows."""
    expected = 1 + lambertw(-math.exp(-1 - ratio)).real
    assert best_interval(7 * ratio, 7.0) == pytest.approx(7 * expected, rel=1e-7)
    assert best_interval(7 * ratio, 7.0) <= 7.0


costs = st.floats(1e-4, 1e5)
mtbfs = st.floats(1.0, 1e8)
shares = st.floats(1e-3, 1e3)


@given(costs, mtbfs, shares, st.floats(0, 1e5), st.floats(0, 1e5))
def test_waste_is_a_share_and_grows_with_what_costs(cost, mtbf, share, restart, delay):
    interval = share * young_interval(cost, mtbf)
    here = Regime(cost, mtbf, restart, delay)
    waste = here.waste(interval)
    assert 0 <= waste <= 1
    for worse in (
        replace(here, cost=1.5 * cost), replace(here, mtbf=mtbf / 1.5), replace(here, restart=restart + cost),
        replace(here, delay=delay + cost),
    ):  # fmt: skip
        assert worse.waste(interval) >= waste * (1 - 1e-9) - 1e-15
    if waste < 0.99 and cost > 1e-6 * interval:
        assert replace(here, cost=2 * cost, delay=delay + cost).waste(interval) > waste
    if waste < 0.99 and cost > 1e-6 * mtbf:
        assert replace(here, restart=restart + cost).waste(interval) > waste
        assert replace(here, delay=max(delay, cost) + cost).waste(interval) > waste


@given(costs, mtbfs, shares, st.floats(0, 1e5), st.floats(0, 1e5), st.sampled_from([1e-3, 60.0, 3600.0]))
def test_the_unit_of_time_does_not_matter(cost, mtbf, share, restart, delay, unit):
    interval = share * young_interval(cost, mtbf)
    here = Regime(cost, mtbf, restart, delay)
    there = Regime(cost * unit, mtbf * unit, restart * unit, delay * unit)
    assert there.waste(interval * unit) == pytest.approx(here.waste(interval), rel=1e-6, abs=1e-12)
    assert there.best() == pytest.approx(here.best() * unit, rel=1e-6)
    assert young_interval(there.cost, there.mtbf) == pytest.approx(young_interval(cost, mtbf) * unit)
    assert daly_interval(there.cost, there.mtbf) == pytest.approx(daly_interval(cost, mtbf) * unit)


@given(costs, mtbfs, st.floats(0, 1e6), st.floats(0.01, 100), st.floats(0, 1e6))
def test_no_interval_is_better_than_the_best(cost, mtbf, delay, factor, restart):
    here = Regime(cost, mtbf, restart, delay)
    assert here.waste(here.best()) <= here.waste(factor * here.best()) + 1e-9


@given(costs, mtbfs, st.floats(1.001, 100))
def test_the_best_interval_grows_with_cost_and_mtbf(cost, mtbf, factor):
    best = best_interval(cost, mtbf)
    assert 0 < best <= mtbf
    assert best_interval(cost * factor, mtbf) >= best
    assert best_interval(cost, mtbf * factor) > best
    assert best_interval(cost, mtbf, delay_s=cost * factor) >= best


@given(st.floats(1e-9, 1e-4), mtbfs)
def test_all_three_intervals_agree_where_saves_are_cheap(ratio, mtbf):
    """Young's within √(2δ/M)/3 (the next term), Daly's within (δ/M)^1.5."""
    cost = ratio * mtbf
    best = best_interval(cost, mtbf)
    assert best == pytest.approx(young_interval(cost, mtbf), rel=math.sqrt(2 * ratio) / 3 + 1e-6)
    assert best == pytest.approx(daly_interval(cost, mtbf), rel=ratio**1.5 + 1e-6)
    assert best != young_interval(cost, mtbf)


def test_limits():
    assert daly_interval(20.0, 10.0) == daly_interval(1e9, 10.0) == 10.0
    assert best_interval(1e9, 10.0) == 10.0
    assert best_interval(0.0, 10.0) == 0.0
    assert best_interval(0.0, 1e4, delay_s=7.0) == 7.0  # a write at a time
    assert best_interval(1e-30, 1e4) == pytest.approx(math.sqrt(2e-26))
    assert best_interval(1.0, 10.0, delay_s=500.0) == 10.0
    assert young_interval(1.0, math.inf) == daly_interval(1.0, math.inf) == best_interval(1.0, math.inf) == math.inf
    assert young_interval(0.0, math.inf) == best_interval(0.0, math.inf) == math.inf
    assert expected_waste(9.0, 1.0, math.inf, restart_s=50.0) == pytest.approx(0.1)
    assert expected_waste(9.0, 1.0, math.inf, delay_s=30.0) == pytest.approx(0.7)
    assert expected_waste(9.0, 1.0, 1e15, restart_s=50.0) == pytest.approx(0.1)
    assert expected_waste(9.0, 1.0, 1e-9) == expected_waste(1e9, 1e9, 1.0) == expected_waste(1e300, 0.0, 1e-300) == 1.0
    assert expected_waste(5.0, 0.0, 1e15) == pytest.approx(0.0, abs=1e-12)
    assert expected_waste(9.0, 5.0, 70.0, delay_s=1.0) == expected_waste(9.0, 5.0, 70.0, delay_s=5.0)


@pytest.mark.parametrize("value", [-1.0, math.nan, -math.inf, "5", None, True, math.inf, 0.0])
@pytest.mark.parametrize("field", ["interval_s", "cost_s", "mtbf_s", "restart_s", "delay_s"])
def test_bad_numbers_are_named(field, value):
    fields = {"interval_s": 10.0, "cost_s": 1.0, "mtbf_s": 100.0, "restart_s": 1.0, "delay_s": 2.0} | {field: value}
    positional = [fields.pop(name) for name in ("interval_s", "cost_s", "mtbf_s")]
    may_be = {"delay_s": (None, 0.0), "restart_s": (0.0,), "cost_s": (0.0,), "mtbf_s": (math.inf,)}.get(field, ())
    if any(type(value) is type(sound) and value == sound for sound in may_be):
        assert 0 <= expected_waste(*positional, **fields) <= 1
        return
    with pytest.raises(InputError, match=rf"^{field}: expected a number of seconds .* got {value!r}$"):
        expected_waste(*positional, **fields)
    if field in ("cost_s", "mtbf_s"):
        for interval in (young_interval, daly_interval, best_interval):
            with pytest.raises(InputError, match=f"^{field}: "):
                interval(*positional[1:])
    if field == "delay_s":
        with pytest.raises(InputError, match=r"^delay_s: "):
            best_interval(*positional[1:], delay_s=value)
