"""A run goes back by itself to a good checkpoint, leaves the guilty data out, and ends as if they had been skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.errors import GoBackError, QuernError
from quern.train.config import TrainConfig
from quern.train.history.back import asked_back, backs, left_out, spikes
from quern.train.history.ledger import Ledger, read_ledger
from support.train import run_case as case
from support.train.exposures import exposures

NAN, SPIKE = float("nan"), 1e4
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return case.write_corpus(tmp_path_factory.mktemp("data"))


def settings(run: Path, paths: list[str], **changes: Any) -> TrainConfig:
    guard = {"health_window": 2, **changes.pop("guard", {})}
    checkpoint = {"interval": 2, "keep_last": 20, "mode": "sync", **changes.pop("checkpoint", {})}
    return case.settings(run, paths, guard=guard, checkpoint=checkpoint, **changes)


def at(factors: dict[int, float]) -> Callable[[int], float]:
    return lambda data_step: factors.get(data_step, 1.0)


def until_it_ends(config: TrainConfig, factors: dict[int, float]) -> tuple[case.Left, int]:
    """What the same command leaves when it is given again each time that the run goes back, and how often it did."""
    for times in range(9):
        try:
            return case.live(config, factor=at(factors)), times
        except GoBackError:
            continue
    raise AssertionError("it goes back for ever")


@pytest.mark.parametrize(
    ("guard", "factors", "out", "to"),
    [
        pytest.param({"spike": "rollback_and_skip"}, {6: SPIKE}, [6], 4, id="spike", marks=LONG),
        pytest.param({"non_finite": "rollback_and_skip"}, {7: NAN}, [7], 4, id="not finite"),
        pytest.param(
            {"spike": "rollback_and_skip", "rollback_steps": 3}, {6: SPIKE}, [4, 5, 6], 4, id="and before", marks=LONG
        ),
        pytest.param(
            {"spike": "rollback_and_skip", "health_window": 9}, {6: SPIKE}, [6], 6, id="none is good", marks=LONG
        ),
        pytest.param(
            {"spike": "rollback_and_skip", "min_history": 4}, {5: SPIKE, 7: SPIKE}, [5, 7], 2, id="twice", marks=LONG
        ),
    ],
)
def test_it_ends_with_the_weights_of_a_run_that_skips(
    tmp_path: Path, paths: list[str], guard: dict[str, Any], factors: dict[int, float], out: list[int], to: int
) -> None:
    """The oracle goes back nowhere: what is left out there is not finite, and skipped on the device."""
    run = tmp_path / "run"
    config = settings(run, paths, guard=guard)
    left, times = until_it_ends(config, factors)
    plain = case.live(settings(tmp_path / "plain", paths), factor=at(dict.fromkeys(out, NAN)))
    assert (left.complete, times) == (True, len(factors))
    assert left.state.keys() == plain.state.keys()
    assert all(torch.equal(value, plain.state[name]) for name, value in left.state.items())
    told = case.ledger(run)
    assert [entry["leave_out"][-1] for entry in told if entry["kind"] == "back"] == sorted(factors)
    assert next(entry["step"] for entry in told if entry["kind"] == "rollback") == to
    last = max(place for place, entry in enumerate(told) if entry["kind"] == "rollback")
    skipped = [entry for entry in told[last:] if entry["kind"] == "skipped"]
    assert {entry["data_step"] for entry in skipped} == {step for step in out if step >= told[last]["data_step"]}
    assert {entry["reason"] for entry in skipped} == {"left_out"}


@LONG
def test_without_a_checkpoint_it_starts_over(tmp_path: Path, paths: list[str]) -> None:
    config = settings(tmp_path / "run", paths, guard={"spike": "rollback_and_skip"}, checkpoint={"interval": 0})
    left, _ = until_it_ends(config, {6: SPIKE})
    plain = case.live(settings(tmp_path / "plain", paths), factor=at({6: NAN}))
    assert all(torch.equal(value, plain.state[name]) for name, value in left.state.items())
    assert [left.start.kind, left.start.step] == ["rollback", 0]


def test_each_sequence_is_told_as_it_was_used(tmp_path: Path, paths: list[str]) -> None:
    config = settings(tmp_path / "run", paths, guard={"spike": "rollback_and_skip"})
    left, _ = until_it_ends(config, {6: SPIKE})
    entries, order = read_ledger(tmp_path / "run" / "ledger.jsonl"), left.start.mixture.order
    assert left.samples.keys() == {4, 5, 6, 7, 8}  # the life that ended well went on from step 4
    for data_step, samples in left.samples.items():
        for _, source, epoch, window in samples:
            found = exposures(entries, case.STEPS, order, source, epoch, window)
            assert [(one.step, one.data_step, one.applied) for one in found] == [(data_step, data_step, data_step != 6)]


def test_too_often_near_one_step_is_the_end(tmp_path: Path, paths: list[str]) -> None:
    guard = {"spike": "rollback_and_skip", "max_rollbacks": 1, "health_window": 4}
    config = settings(tmp_path / "run", paths, guard=guard)
    with pytest.raises(QuernError, match=r"step 7: spike, and the run has gone back 1 times .*max_rollbacks 1"):
        until_it_ends(config, {5: SPIKE, 7: SPIKE})
    assert case.told(tmp_path / "run", "back") == [5]


def test_what_the_user_asks_for_comes_first(tmp_path: Path, paths: list[str]) -> None:
    guard = {"spike": "rollback_and_skip"}
    config = settings(tmp_path / "run", paths, guard=guard)
    with pytest.raises(GoBackError):
        case.live(config, factor=at({6: SPIKE}))
    left = case.live(settings(tmp_path / "run", paths, guard=guard, resume={"step": 2}, data_skip=5))
    assert (left.start.step, left.start.data_step, left.complete) == (2, 7, True)


def test_the_learning_rate_is_lower_after_a_spike_also_over_a_kill(tmp_path: Path, paths: list[str]) -> None:
    guard = {"spike": "lower_lr", "lr_steps": 3, "lr_factor": 0.25, "min_history": 4}
    factors = {5: SPIKE}
    straight = case.live(settings(tmp_path / "one", paths, guard=guard, steps=12), factor=at(factors))
    killed = settings(tmp_path / "two", paths, guard=guard, steps=12)
    case.live(killed, kill_at=7, factor=at(factors))
    resumed = case.live(killed, factor=at(factors))
    plain = settings(tmp_path / "plain", paths, steps=12)
    case.live(plain, factor=at(factors))
    usual, found = case.rows(tmp_path / "plain"), case.rows(tmp_path / "one")
    shares = [found[step]["lr"] / usual[step]["lr"] for step in range(12)]
    assert shares == [1] * 7 + [0.25] * 3 + [1] * 2
    assert case.told(tmp_path / "one", "spike") == [5]
    assert all(torch.equal(value, resumed.state[name]) for name, value in straight.state.items())


def test_half_precision_overflows_by_itself_and_does_not_go_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"guard\.non_finite: expected skip with precision fp16.*rollback_and_skip"):
        case.settings(tmp_path, ["data"], precision="fp16", guard={"non_finite": "rollback_and_skip"})


def move(kind: str, step: int, data_step: int, order: str = "a") -> dict[str, Any]:
    return {"kind": kind, "step": step, "data_step": data_step, "order": order}


def back(step: int, before: int, *leave_out: int, order: str = "a") -> dict[str, Any]:
    return {
        "kind": "back", "step": step, "before": before, "leave_out": [*leave_out], "order": order, "reason": "spike",
        "good": True,
    }  # fmt: skip


def test_what_the_lines_of_a_ledger_say() -> None:
    start = move("start", 0, 0)
    assert (asked_back([start]), backs([start]), left_out([start]), spikes([start])) == (None, (), frozenset(), ())
    two = [start, back(9, 9, 9), back(8, 4)]
    assert asked_back(two) == two[2]  # the furthest
    assert asked_back([*two, move("rollback", 4, 4)]) is None
    assert (backs(two), left_out(two)) == ((9, 8), {9})
    # an order that takes over at data step 10 holds other samples from there on
    changed = [start, back(12, 12, 8, 9, 10, 11), move("rollback", 6, 10, "b")]
    assert left_out(changed) == {8, 9}
    assert left_out([*changed, back(20, 20, 30, order="b"), move("resume", 8, 12, "b")]) == {8, 9, 30}
    spiked = [start, {"kind": "spike", "step": 3}, {"kind": "spike", "step": 7}, move("rollback", 5, 5)]
    assert spikes(spiked) == (3,)


@pytest.mark.parametrize(
    "change", [{"leave_out": 3}, {"leave_out": [1.5]}, {"before": -1}, {"reason": None}, {"good": 1}]
)
def test_a_damaged_line_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = [back(3, 3, 2), {**back(3, 3, 2), **change}, back(3, 3, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(QuernError, match=rf"line 2: back\.{next(iter(change))}: expected"):
        Ledger(path)
    assert math.isfinite(lines[0]["step"])


@pytest.mark.parametrize(
    ("good", "before", "step"),
    [
        (True, 5, 2),
        (True, 1, 0),
        *(pytest.param(*case, marks=LONG) for case in [(False, 5, 4), (False, 3, 2), (True, 9, 6)]),
    ],
)
def test_it_goes_back_no_less_than_the_line_says(
    tmp_path: Path, paths: list[str], good: bool, before: int, step: int
) -> None:
    """Of the checkpoints 2, 4, 6, 8 and 9, 4 has a spike behind it, and the last two too few steps."""
    config = settings(tmp_path / "run", paths)
    case.live(config, factor=at({5: SPIKE}))
    with Ledger(tmp_path / "run" / "ledger.jsonl") as ledger:
        line = {**back(8, before), "good": good, "order": ledger.entries[-1].get("order", "")}
        ledger.append(line.pop("kind"), **line)
    left = case.live(config)
    assert (left.start.kind, left.start.step, left.complete) == ("rollback", step, True)


def test_it_does_not_go_back_behind_data_that_were_left_out_by_hand(tmp_path: Path, paths: list[str]) -> None:
    """Checkpoint 2 is the last good one, and lies before the gap; a run from there would read what was left out."""
    config = settings(tmp_path / "run", paths, guard={"health_window": 3})
    case.live(config, factor=at({5: SPIKE}))
    skips = settings(tmp_path / "run", paths, resume={"step": 4}, data_skip=3, guard={"health_window": 3})
    case.live(skips, factor=at({8: SPIKE}))  # in step 5
    with Ledger(tmp_path / "run" / "ledger.jsonl") as ledger:
        line = {**back(7, 5), "order": ledger.entries[-1].get("order", "")}
        ledger.append(line.pop("kind"), **line)
    left = case.live(config)
    assert (left.start.kind, left.start.step, left.start.data_step) == ("rollback", 4, 7)
