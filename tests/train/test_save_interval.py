"""The interval that is chosen between saves, from what saves and steps are measured to take."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.errors import InputError
from quern.train.checkpoint.retention.save_interval import (
    Decision,
    Mtbf,
    SaveInterval,
    best_interval,
    estimate_mtbf,
    expected_waste,
)


def fed(cadence: SaveInterval, cost: float, delay: float, step: float, times: int = 8) -> SaveInterval:
    for _ in range(times):
        cadence.observe("cost", cost)
        cadence.observe("delay", delay)
        cadence.observe("step", step)
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
    waste = partial(expected_waste, cost_s=cost, mtbf_s=mtbf, restart_s=30.0, delay_s=delay)
    assert decision.waste == waste(decision.interval_s)
    steps = {1, 2, 3, *(max(1, decision.steps + d) for d in (-2, -1, 1, 2)), *np.geomspace(1, 1e6, 200).astype(int)}
    least = min(waste(int(n) * step) for n in steps if n == 1 or n * step * rounding <= bound)
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
    cadence.observe("cost", 500.0)
    cadence.observe("delay", 5000.0)
    cadence.observe("step", 900.0)
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


events = st.lists(st.tuples(st.sampled_from(["cost", "delay", "step", "ask"]), st.floats(0.01, 1e3)), max_size=60)


def replay(cadence: SaveInterval, actions: list[tuple[str, float]]) -> list[Decision]:
    answers = []
    for action, seconds in actions:
        if action == "ask":
            answers.append(cadence.next_interval())
        else:
            cadence.observe(action, seconds)
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
        ({"cost.5": 1.0}, "cost.5: is not a field of the save interval's state"),
        ({"speed": 1.0}, "speed: is not a field of the save interval's state"),
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


@pytest.mark.parametrize("value", [-1.0, math.nan, -math.inf, math.inf, "5", None, True])
def test_bad_measurements_are_named(value):
    cadence = SaveInterval(HOUR)
    for name in ("cost", "delay", "step"):
        with pytest.raises(InputError, match=f"^{name}_s: "):
            cadence.observe(name, value)
    with pytest.raises(InputError, match=r"^step_s: "):
        cadence.observe("step", 0.0)
    assert cadence.state() == {}
