"""How often to save: formulas against a simulation of failures, the MTBF against ledgers counted by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import lambertw

from quern.errors import InputError
from quern.train.checkpoint.retention.save_interval import (
    Decision,
    Mtbf,
    SaveInterval,
    best_interval,
    daly_interval,
    estimate_mtbf,
    expected_waste,
    observed_failures,
    young_interval,
)
from support.train import run_case as case

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


def regimes(*slow_to_simulate: str, without: tuple[str, ...] = ()) -> list[Any]:
    """Names, marked where saves are many and a simulation has as many events."""
    names = [name for name in REGIMES if name not in without]
    return [pytest.param(name, marks=pytest.mark.long) if name in slow_to_simulate else name for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    regimes(
        "δ/M 1e-5, background",
        "δ/M 1e-4, blocking",
        "δ/M 1e-3, long restart",
        "δ/M 0.01, background",
        "δ/M 0.1, restart as long as M",
        "δ/M 0.3, background",
    ),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    regimes(
        "δ/M 1e-5, background", "δ/M 1e-4, blocking", "δ/M 1e-3, long restart", "δ/M 0.1, a delay beyond M",
        "δ/M 0.1, restart as long as M", "δ/M 0.3, background", "δ/M 1e-3, the delay is the floor",
        without=("δ/M 0.01, background", "δ/M 0.05, no restart"),
    ),
)  # fmt: skip
def test_no_interval_of_a_fine_grid_is_better(name):
    """The chosen interval wastes at most 2 % more than the best of 29 intervals, 10 % apart, in the simulation.

    The grid goes around the larger of Young's interval and the delay by factors of 4; the same failures strike every
    interval, so that differences are not those of chance.
    """
    regime = REGIMES[name]
    centre = max(math.sqrt(2 * regime.cost * regime.mtbf), min(regime.delay, regime.mtbf))
    grid = [centre * 4 ** (place / 14) for place in range(-14, 15)]
    wasted = [simulate(regime, interval, LENGTH, seed=7)[0] for interval in grid]
    chosen, _ = simulate(regime, regime.best(), LENGTH, seed=7)
    assert chosen <= 1.02 * min(wasted)
    assert 0 < int(np.argmin(wasted)) < len(grid) - 1  # the best lies inside
    assert max(wasted) > 1.05 * min(wasted)


def test_daly_s_examples():
    """Figures 3 to 5 of Daly 2006, δ 5 min: M 24 h gives 117 min, 6 h gives 57 min, 15 min gives 9.1 min."""
    found = [daly_interval(300.0, 60.0 * minutes) / 60 for minutes in (24 * 60, 6 * 60, 15)]
    assert [round(found[0]), round(found[1]), round(found[2], 1)] == [117, 57, 9.1]


def test_young_s_interval():
    assert young_interval(2.0, 100.0) == 20.0
    assert young_interval(0.0, 100.0) == 0.0


def brute_force(regime: Regime) -> float:
    """The least waste of the formula on a grid from 1e-6 M to 10 M, in steps of 0.2 %."""
    return min(regime.waste(regime.mtbf * math.exp(x)) for x in np.arange(math.log(1e-6), math.log(10), 0.002))


@pytest.mark.parametrize("name", REGIMES)
def test_the_best_interval_has_the_least_waste(name):
    regime = REGIMES[name]
    assert regime.waste(regime.best()) <= brute_force(regime) * (1 + 1e-12)


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


BAD = [-1.0, math.nan, -math.inf, "5", None, True]


@pytest.mark.parametrize("value", [*BAD, math.inf, 0.0])
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


def lines(text: str) -> list[dict[str, Any]]:
    """A ledger: words ``kind@minutes`` after midnight."""
    found = []
    for word in text.split():
        kind, minute = word.split("@")
        stamp = (
            f"2026-01-{1 + int(minute) // 1440:02d}T{int(minute) // 60 % 24:02d}:{int(minute) % 60:02d}:00.500+00:00"
        )
        found.append({"time": stamp, "kind": kind, "step": 0, "data_step": 0, "order": "a"})
    return found


@pytest.mark.parametrize(
    ("text", "failures", "minutes"),
    [
        ("", 0, 0),
        ("order@0", 0, 0),
        ("order@0 start@1", 0, 0),
        ("order@0 start@1 checkpoint@31", 0, 30),
        ("start@0 checkpoint@10 end@20", 0, 20),
        ("start@0 checkpoint@10 stopped@20 resume@500 end@510", 0, 30),
        ("start@0 end@20 resume@500 end@510", 0, 30),
        # broken off after the checkpoint at 10; the outage until 60 is no running time
        ("start@0 checkpoint@10 resume@60 checkpoint@75", 1, 25),
        ("start@0 resume@1 resume@2 resume@3", 3, 0),
        ("start@0 checkpoint@10 skipped@12 spike@13 resume@60 skipped@61 resume@2000 checkpoint@2100 end@2101", 2, 115),
        # a person rolled back, once after a break; then it broke off and was resumed
        ("start@0 checkpoint@10 rollback@60 checkpoint@70 stopped@71 rollback@80 checkpoint@85 resume@90", 1, 26),
        # the new order of a resume is written before it, after the outage
        ("start@0 checkpoint@10 order@300 resume@301 checkpoint@311", 1, 20),
        # unknown lines prove nothing
        ("start@0 checkpoint@10 note@200 resume@301 checkpoint@311", 1, 20),
        # another machine's clock is behind
        ("start@100 checkpoint@40 resume@30 checkpoint@50", 1, 20),
    ],
)
def test_failures_of_ledgers_counted_by_hand(text, failures, minutes):
    assert observed_failures(lines(text)) == (failures, 60.0 * minutes)


def test_times_of_other_zones():
    entries = [
        {"kind": "start", "time": "2026-01-01T10:00:00+02:00"},
        {"kind": "checkpoint", "time": "2026-01-01T08:00:30"},
        {"kind": "end", "time": "2026-01-01T08:01:00Z"},
    ]
    assert observed_failures(entries) == (0, 60.0)
    assert observed_failures(entries[:2]) == (0, 30.0)


@pytest.mark.parametrize("value", ["yesterday", None, 5, ...])
def test_a_line_without_a_time_is_named(value):
    entries = lines("start@0 checkpoint@10")
    if value is ...:
        del entries[1]["time"]
    else:
        entries[1]["time"] = value
    with pytest.raises(InputError, match=r"^ledger: line 2: time: expected an ISO 8601 time, got "):
        observed_failures(entries)


@pytest.mark.slow
def test_failures_of_a_trainer(tmp_path):
    """Lines as the trainer writes them: a fresh run killed; rolled back; killed; resumed and stopped; resumed."""
    run = tmp_path / "run"
    paths = case.write_corpus(tmp_path / "data")

    def config(**changes):
        return case.settings(run, paths, checkpoint={"interval": 2}, **changes)

    back = config(resume={"step": 2})
    kinds = [
        case.live(config(), kill_at=5).start.kind, case.live(back, kill_at=5).start.kind,
        case.live(back, stop_at=5).start.kind, case.live(back).start.kind,
    ]  # fmt: skip
    assert kinds == ["start", "rollback", "resume", "resume"]
    entries = case.ledger(run)
    failures, running = observed_failures(entries)
    assert failures == 1
    assert 0 < running < 600
    found = estimate_mtbf(entries, 1, prior_s=1000.0)
    assert found == Mtbf((1000.0 + running) / 2, "observed", 1, running)


def test_the_mtbf_before_any_failure_is_that_of_llama_3():
    """419 interruptions in 54 days on 16,384 GPUs: every 3.09 h, and every 50,700 h a GPU."""
    at_scale = estimate_mtbf([], 16_384)
    assert at_scale.source == "assumed"
    assert at_scale.seconds == pytest.approx(54 * 24 * 3600 / 419)
    assert estimate_mtbf([], 1).seconds / 3600 == pytest.approx(50_700, rel=1e-3)


def test_what_is_configured_holds():
    entries = lines("start@0 resume@10 resume@20")
    assert estimate_mtbf(entries, 8, configured_s=500.0) == Mtbf(500.0, "configured")
    assert estimate_mtbf([], 8, configured_s=math.inf).seconds == math.inf
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match=r"^mtbf_s: "):
            estimate_mtbf([], 8, configured_s=value)
        with pytest.raises(InputError, match=r"^prior_s: "):
            estimate_mtbf([], 8, prior_s=value)
    for ranks in (0, -1, 1.5, True, None):
        with pytest.raises(InputError, match=r"^ranks: expected an integer ≥ 1"):
            estimate_mtbf([], ranks)


def test_failures_outweigh_the_prior_as_they_come():
    """Posterior of a rate with an exponential prior, integrated numerically; the MTBF is one over its mean."""
    prior, entries = 7200.0, lines("start@0 checkpoint@90 resume@100 checkpoint@110 resume@200 checkpoint@230")
    failures, running = 2, 60.0 * (90 + 10 + 30)
    rates = np.linspace(0, 60 / prior, 400_001)
    density = np.exp(-rates * prior) * rates**failures * np.exp(-rates * running)
    mean = (rates * density).sum() / density.sum()
    found = estimate_mtbf(entries, 8, prior_s=prior)
    assert found.seconds == pytest.approx(1 / mean, rel=1e-6)
    assert (found.source, found.failures, found.running_s) == ("observed", failures, running)


def test_one_failure_is_an_observation():
    found = estimate_mtbf(lines("start@0 resume@1"), 8, prior_s=7200.0)
    assert (found.seconds, found.source) == (3600.0, "observed")
    assert str(found) == "60 min (observed; 1 failure in 0 s)"


@pytest.mark.parametrize(("minutes", "source"), [(119, "assumed"), (120, "observed")])
def test_a_long_time_without_failure_is_an_observation(minutes, source):
    found = estimate_mtbf(lines(f"start@0 checkpoint@{minutes}"), 8, prior_s=7200.0)
    assert (found.seconds, found.source) == (7200.0 + 60 * minutes, source)


def test_the_estimate_finds_the_rate_of_a_poisson_process():
    """A ledger of 400 simulated failures with a save a minute: within 4 standard errors, and the share not seen."""
    rng, mtbf = np.random.Generator(np.random.PCG64(3)), 3600.0
    clock, entries = 0.0, []

    def note(kind: str, at: float) -> None:
        stamp = np.datetime64("2026-01-01T00:00:00.000") + np.timedelta64(round(at * 1000), "ms")
        entries.append({"kind": kind, "time": f"{stamp}+00:00"})

    for attempt in range(401):
        note("resume" if attempt else "start", clock)
        life = rng.exponential(mtbf)
        for minute in range(1, 1 + int(life // 60)):
            note("checkpoint", clock + 60 * minute)
        clock += life + rng.uniform(60, 6000)
    found = estimate_mtbf(entries, 16_384)
    assert found.failures == 400
    assert found.seconds == pytest.approx(mtbf, rel=4 / math.sqrt(400) + 60 / mtbf)


def fed(cadence: SaveInterval, cost: float, delay: float, step: float, times: int = 8) -> SaveInterval:
    for _ in range(times):
        cadence.observe_save(cost)
        cadence.observe_publish(delay)
        cadence.observe_step(step)
    return cadence


HOUR = Mtbf(3600.0, "configured")


def test_before_any_measurement_assumptions_are_stated():
    decision = SaveInterval(estimate_mtbf([], 16_384)).next_interval()
    assert decision.measured == ()
    assert (decision.cost_s, decision.delay_s, decision.step_s) == (10.0, 10.0, 60.0)
    assert decision.steps == 8  # √(2 · 10 s · 3.09 h) = 472 s
    assert str(decision).count("(assumed)") == 3
    assert "(assumed; 0 failures in 0 s)" in str(decision)


def test_a_decision_says_all_that_led_to_it():
    decision = fed(SaveInterval(HOUR, restart_s=90.0), 2.0, 20.0, 4.0).next_interval()
    assert (decision.cost_s, decision.delay_s, decision.step_s, decision.restart_s) == (2.0, 20.0, 4.0, 90.0)
    assert (decision.steps, decision.interval_s) == (30, 120.0)  # √(2 · 2 · 3600) = 120
    assert decision.young_s == 120.0
    assert decision.daly_s == pytest.approx(118.7, abs=0.1)
    assert decision.best_s == best_interval(2.0, 3600.0, delay_s=20.0)
    assert decision.waste == decision.best_waste == expected_waste(120.0, 2.0, 3600.0, restart_s=90.0, delay_s=20.0)
    assert (decision.mtbf, decision.reason) == (HOUR, "best")
    assert decision.measured == ("cost", "delay", "step")
    assert str(decision) == (
        "save every 30 steps = 2 min; waste 6.155% (best 6.155%); stall 2 s, published after 20 s, step 4 s, "
        "restart 90 s; mtbf 60 min (configured); best 119 s, Young 2 min, Daly 119 s"
    )
    by_hand = 1 - 120 / (
        3600 * math.exp((90 + 18) / 3600) * math.expm1(122 / 3600)
    )  # the delay is 18 s beyond the stall
    assert decision.waste == pytest.approx(by_hand)


@given(st.floats(1e-3, 300), st.floats(0, 1000), st.floats(1e-2, 600), st.floats(60, 1e7), st.floats(1, 2e4))
def test_no_whole_number_of_steps_within_the_bound_is_better(cost, delay, step, mtbf, bound):
    cadence = fed(SaveInterval(Mtbf(mtbf, "configured"), restart_s=30.0, max_interval_s=bound), cost, delay, step, 1)
    decision = cadence.next_interval()
    rounding = 1 + 1e-12  # a product that should be the bound may be rounded up
    assert decision.steps == 1 or decision.interval_s <= bound * rounding
    assert decision.interval_s == decision.steps * step
    there = Regime(cost, mtbf, 30.0, delay)
    assert decision.waste == there.waste(decision.interval_s)
    steps = {1, 2, 3, *(max(1, decision.steps + d) for d in (-2, -1, 1, 2)), *np.geomspace(1, 1e6, 200).astype(int)}
    least = min(there.waste(int(n) * step) for n in steps if n == 1 or n * step * rounding <= bound)
    assert decision.waste <= least * (1 + 1e-9) + 1e-12


def test_a_wrong_mtbf_cannot_cost_a_day():
    for mtbf in (1e9, math.inf):
        decision = fed(SaveInterval(Mtbf(mtbf, "configured")), 5.0, 5.0, 7.0).next_interval()
        assert (decision.steps, decision.reason) == (514, "bounded")  # 3598 s
        assert "bounded by max_interval_s 60 min" in str(decision)
    long_steps = fed(SaveInterval(Mtbf(1e9, "configured"), max_interval_s=100.0), 5.0, 5.0, 700.0).next_interval()
    assert long_steps.steps == 1
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match=r"^max_interval_s: "):
            SaveInterval(HOUR, max_interval_s=value)
    with pytest.raises(InputError, match=r"^restart_s: "):
        SaveInterval(HOUR, restart_s=-1.0)


def test_an_interval_that_steps_alone_shorten_is_not_called_bounded():
    decision = fed(SaveInterval(Mtbf(3300.0**2 / 20, "configured")), 10.0, 10.0, 1000.0).next_interval()
    assert 3000 < decision.best_s < 3600
    assert (decision.steps, decision.reason) == (3, "best")


def test_free_saves_are_made_at_every_step_and_no_more_often_than_they_are_written():
    assert fed(SaveInterval(HOUR), 0.0, 0.0, 2.0).next_interval().steps == 1
    assert fed(SaveInterval(HOUR), 0.0, 30.0, 2.0).next_interval().steps == 15


def test_one_bad_figure_moves_nothing():
    cadence = fed(SaveInterval(HOUR), 2.0, 20.0, 4.0)
    before = cadence.next_interval()
    cadence.observe_save(500.0)
    cadence.observe_publish(5000.0)
    cadence.observe_step(900.0)
    assert cadence.next_interval() == before
    fed(cadence, 50.0, 60.0, 10.0, times=8)  # and eight new ones are all that counts
    after = cadence.next_interval()
    assert (after.cost_s, after.delay_s, after.step_s) == (50.0, 60.0, 10.0)


def test_jitter_does_not_move_the_interval_and_a_change_does():
    rng = np.random.Generator(np.random.PCG64(5))
    cadence = fed(SaveInterval(HOUR), 2.0, 20.0, 4.0)
    steps = []
    for _ in range(300):
        fed(cadence, 2.0 * rng.uniform(0.8, 1.25), 20.0, 4.0 * rng.uniform(0.95, 1.05), times=1)
        decision = cadence.next_interval()
        assert decision.waste <= 1.01 * decision.best_waste
        assert 1 - decision.waste >= 0.99 * (1 - decision.best_waste)
        steps.append(decision.steps)
    assert len(set(steps)) == 1
    fresh = {fed(SaveInterval(HOUR), 2.0 * rng.uniform(0.8, 1.25), 20.0, 4.0).next_interval().steps for _ in range(50)}
    assert len(fresh) > 3  # the jitter would have moved it
    changed = fed(cadence, 8.0, 20.0, 4.0).next_interval()
    assert (changed.steps, changed.reason) == (
        fed(SaveInterval(HOUR), 8.0, 20.0, 4.0).next_interval().steps, "best",
    )  # fmt: skip


def test_what_is_kept_is_said_and_never_beyond_the_bound():
    cadence = fed(SaveInterval(HOUR), 2.0, 20.0, 4.0)
    assert cadence.next_interval().reason == "best"
    fed(cadence, 2.5, 20.0, 4.0)  # √(2 · 2.5 · 3600) = 134 s, or 33 steps
    kept = cadence.next_interval()
    assert (kept.steps, kept.reason) == (30, "kept")
    assert "steps = 2 min, kept; waste" in str(kept)
    cadence.max_interval_s = 110.0
    assert cadence.next_interval().steps == 27


def test_an_interval_that_wastes_four_percent_more_is_given_up():
    """The best is 1.32 times as long, and (1.32 + 1/1.32)/2 = 1.04."""
    cadence = fed(SaveInterval(HOUR, restart_s=0.0), 2.0, 2.0, 1.0)
    before = cadence.next_interval()
    after = fed(cadence, 3.5, 3.5, 1.0).next_interval()
    assert after.steps == pytest.approx(1.32 * before.steps, rel=0.02)
    assert after.reason == "best"


def test_where_nearly_all_is_wasted_the_useful_share_decides():
    """A waste of 0.99 is within 1 % of any: not the reason to keep an interval that does half of the work."""
    cadence = fed(SaveInterval(Mtbf(100.0, "configured"), restart_s=600.0), 1.0, 1.0, 1.0)
    before = cadence.next_interval()
    assert before.waste > 0.99
    cadence.mtbf = Mtbf(60.0, "configured")
    fed(cadence, 40.0, 40.0, 1.0)
    after = cadence.next_interval()
    assert after.steps > 2 * before.steps
    assert after.waste < expected_waste(before.interval_s, 40.0, 60.0, restart_s=600.0) <= 1.01 * after.waste


events = st.lists(st.tuples(st.sampled_from(["save", "publish", "step", "ask"]), st.floats(0.01, 1e3)), max_size=60)


def replay(cadence: SaveInterval, actions: list[tuple[str, float]]) -> list[Decision]:
    answers = []
    for action, seconds in actions:
        if action == "ask":
            answers.append(cadence.next_interval())
        else:
            getattr(cadence, f"observe_{action}")(seconds)
    return answers


@pytest.mark.slow
@given(events, events)
def test_a_restored_cadence_answers_as_the_one_before(before, after):
    """Through JSON; and the same inputs give the same answers."""
    cadence, twin = SaveInterval(HOUR), SaveInterval(HOUR)
    assert replay(cadence, before) == replay(twin, before)
    state = json.loads(json.dumps(cadence.state(), allow_nan=False))
    assert all(type(value) in (int, float) for value in state.values())
    restored = fed(SaveInterval(HOUR), 77.0, 88.0, 99.0)
    restored.next_interval()  # what it knew is gone
    restored.restore(state)
    assert restored.state() == cadence.state()
    assert replay(restored, after) == replay(cadence, after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost.0": -1.0}, "cost.0: expected a number of seconds ≥ 0, got -1.0"),
        ({"delay.1": math.nan}, "delay.1: expected a number of seconds ≥ 0, got nan"),
        ({"step.0": 0.0}, "step.0: expected a number of seconds > 0, got 0.0"),
        ({"step.1": "4"}, "step.1: expected a number of seconds > 0, got '4'"),
        ({"steps": 0}, "steps: expected an integer ≥ 1, got 0"),
        ({"steps": 2.5}, "steps: expected an integer ≥ 1, got 2.5"),
        ({"steps": True}, "steps: expected an integer ≥ 1, got True"),
        ({"cost.5": 1.0}, "cost.5: is no field of a cadence's state"),
        ({"speed": 1.0}, "speed: is no field of a cadence's state"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(change: Mapping[str, Any], message: str):
    cadence = fed(SaveInterval(HOUR), 2.0, 20.0, 4.0, times=2)
    cadence.next_interval()
    before = cadence.state()
    with pytest.raises(InputError) as caught:
        cadence.restore(before | change)
    assert str(caught.value) == message
    assert cadence.state() == before


@pytest.mark.parametrize("value", [*BAD, math.inf])
def test_bad_measurements_are_named(value):
    cadence = SaveInterval(HOUR)
    for name, field in (("save", "cost_s"), ("publish", "delay_s"), ("step", "step_s")):
        with pytest.raises(InputError, match=f"^{field}: "):
            getattr(cadence, f"observe_{name}")(value)
    with pytest.raises(InputError, match=r"^step_s: "):
        cadence.observe_step(0.0)
    assert cadence.state() == {}
