"""The interval between saves that the trainer chooses and follows.

Time is a clock that only the test moves; the best interval is found by trying every one in Daly's model.
"""

from __future__ import annotations

import json
import logging
import math
import re
import types
from collections.abc import Iterable
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any

import pytest

from quern.train import trainer
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.save import scheduler
from quern.train.checkpoint.save.async_save import AsyncSave, Progress
from support.train import run_case as case
from support.waits import until

pytestmark = pytest.mark.slow


class Clock:
    """Seconds that pass where the test says so: in steps and in saves. Takes the place of every clock of a run."""

    def __init__(self, *, step: float = 4.0, begin: float = 2.0, copy: float = 1.0, finish: float = 0.0) -> None:
        self.now, self.uncopied = 0.0, False
        self.step_s, self.begin_s, self.copy_s, self.finish_s = step, begin, copy, finish

    def step(self, data_step: int) -> float:
        """For ``case.live``'s ``factor``, which is asked for in the midst of each step."""
        self.now += self.step_s
        return 1.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = self
        begin, copied, finish = AsyncSave.begin, AsyncSave.wait_staged, AsyncSave.finish
        progress = AsyncSave.progress

        class Mark:
            def __init__(self, device: Any) -> None:
                self.at = clock.now

            def wait(self) -> None: ...

            def since(self, earlier: Mark) -> float:
                return self.at - earlier.at

        def begins(self: AsyncSave, *arguments: Any) -> None:
            begin(self, *arguments)
            clock.now, clock.uncopied = clock.now + clock.begin_s, True

        def copies(self: AsyncSave) -> None:
            copied(self)
            clock.now, clock.uncopied = clock.now + clock.copy_s * clock.uncopied, False

        def finishes(self: AsyncSave) -> Any:
            outcome = finish(self)
            clock.now += clock.finish_s if outcome is not None else 0.0
            return outcome

        def goes_on(self: AsyncSave) -> Progress:
            """A save comes one stage further with each step, however fast the machine writes."""
            until(lambda: not self.in_flight or progress(self) != Progress())
            return progress(self)

        monkeypatch.setattr(scheduler, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr(trainer, "Mark", Mark)
        monkeypatch.setattr(AsyncSave, "begin", begins)
        monkeypatch.setattr(AsyncSave, "wait_staged", copies)
        monkeypatch.setattr(AsyncSave, "finish", finishes)
        monkeypatch.setattr(AsyncSave, "progress", goes_on)
        return self


def best(cost: float, step: float, mtbf: float, limit_s: float = math.inf) -> int:
    """The whole number of steps between saves of the least expected time for a second of work, of all up to 100.

    Daly (2006), equation 9: between failures every ``mtbf``, work of length τ and a save of length δ take in proportion
    to e^((τ+δ)/M) - 1; the restart is a factor.
    """
    fits = [steps for steps in range(1, 101) if steps == 1 or steps * step <= limit_s]
    return min(fits, key=lambda steps: math.expm1((steps * step + cost) / mtbf) / steps)


def ahead(intervals: Iterable[int], done: int, steps: int) -> list[int]:
    """After which steps a run saves that was at ``done``, when each of ``intervals`` holds up to the next save."""
    found = []
    for due in accumulate(intervals, initial=done):
        if due >= steps:
            return [*found, steps]
        found.append(due)
    raise AssertionError


def decisions(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = (r.getMessage() for r in caplog.records if r.name == scheduler.__name__ and r.levelno == logging.INFO)
    return [line for line in said if not re.fullmatch(r"checkpoint after step \d+ saved", line)]


def intervals(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [int(re.match(r"save every (\d+) steps? = ", line)[1]) for line in decisions(caplog)]


#: Mean seconds between failures: so few that the best interval is a few steps.
MTBF_S = 70.0
AUTO = {"interval": "auto", "mtbf_hours": MTBF_S / 3600}


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_an_interval_that_is_chosen_is_followed(tmp_path, paths, monkeypatch, caplog, mode):
    """What is known at each save: nothing; how long a step takes; and once a save has ended, what it cost."""
    caplog.set_level(logging.INFO, scheduler.__name__)
    clock = Clock(begin=2.0, copy=1.0, finish=18.0 if mode == "sync" else 0.0).install(monkeypatch)
    cost = 2 + 18 if mode == "sync" else 2 + 1
    known = [best(10, 60, MTBF_S), best(10, 4, MTBF_S), best(cost, 4, MTBF_S)]
    if mode == "sync":
        del known[1]  # the first save has ended before the second is planned
    assert len(set(known)) == len(known)
    config = case.settings(tmp_path / "run", paths, steps=23, checkpoint={**AUTO, "mode": mode})
    assert case.live(config, factor=clock.step).complete
    expected = ahead(chain(known, repeat(known[-1])), 0, 23)[1:]
    assert case.told(tmp_path / "run", "checkpoint") == case.steps_of(tmp_path / "run") == expected
    assert intervals(caplog)[: len(known) + 1] == [*known, known[-1]]
    assert all("mtbf 70 s (configured)" in line for line in decisions(caplog))
    assert "stall 10 s (assumed)" in decisions(caplog)[0]
    assert f"stall {cost:g} s, " in decisions(caplog)[-1]


def test_what_saves_cost_outlives_a_run(tmp_path, paths, monkeypatch, caplog):
    """The second life's own saves cost a hundred times as much: its interval is that of the first all the same, until
    one of them has ended."""
    caplog.set_level(logging.INFO, scheduler.__name__)
    clock = Clock().install(monkeypatch)
    interval = best(3, 4, MTBF_S)
    config = case.settings(tmp_path / "run", paths, steps=40, checkpoint={**AUTO, "mode": "thread"})
    at = ahead(chain([best(10, 60, MTBF_S), best(10, 4, MTBF_S)], repeat(interval)), 0, 40)[4]
    assert at % interval != 0  # where the next save is due tells from what it is counted
    case.live(config, kill_at=at + interval - 1, factor=clock.step)
    assert case.steps_of(tmp_path / "run")[-1] == at
    manifest = json.loads(Path(list_checkpoints(config.run_dir)[-1].path, "manifest.json").read_text())
    scalars = {name: value for name, value in manifest["scalars"].items() if name.startswith("cadence.")}
    ended = len([step for step in case.steps_of(tmp_path / "run") if step < at])
    assert {name: value for name, value in scalars.items() if ".cost." in name} == {
        f"cadence.cost.{place}": 3.0 for place in range(ended)
    }
    assert {value for name, value in scalars.items() if ".step." in name} == {4.0, 5.0}  # 5 where a copy is waited for
    assert len([name for name in scalars if ".delay." in name]) == ended
    assert scalars["cadence.steps"] == interval

    caplog.clear()
    clock.begin_s = 300.0
    case.live(config, kill_at=at + interval + 1, factor=clock.step)
    assert case.told(tmp_path / "run", "checkpoint", "resume")[-2:] == [at, at + interval]
    assert intervals(caplog)[0] == interval
    assert "stall 3 s, " in decisions(caplog)[0]
    assert "assumed" not in decisions(caplog)[0]


def test_the_longest_interval_and_failures_are_heeded(tmp_path, paths, monkeypatch, caplog):
    """13 s are three steps of 4 s. Nobody says how often the run fails: the ledger knows of one failure, then."""
    caplog.set_level(logging.INFO, scheduler.__name__)
    clock = Clock().install(monkeypatch)
    config = case.settings(tmp_path / "run", paths, checkpoint={"interval": "auto", "max_interval_s": 13.0})
    case.live(config, kill_at=7, factor=clock.step)
    assert case.steps_of(tmp_path / "run") == [1, 4, 7]
    assert intervals(caplog) == [1, 3, 3, 3]
    assert all("bounded by max_interval_s 13 s" in line for line in decisions(caplog))
    assert all("(assumed; 0 failures in " in line for line in decisions(caplog))
    caplog.clear()
    assert case.live(config, factor=clock.step).complete
    assert case.steps_of(tmp_path / "run") == [1, 4, 7, 9]
    assert all("(observed; 1 failure in " in line for line in decisions(caplog))


def test_costs_that_cannot_be_read_are_measured_anew(tmp_path, paths, monkeypatch, caplog):
    """A checkpoint of a version that has measured something else is as good as any other."""
    caplog.set_level(logging.INFO, scheduler.__name__)
    clock = Clock().install(monkeypatch)
    config = case.settings(tmp_path / "run", paths, steps=20, checkpoint={**AUTO, "mode": "sync"})
    with monkeypatch.context() as other:
        other.setattr(
            scheduler.CheckpointScheduler, "scalars", lambda self: {"cadence.cost.0": 3.0, "cadence.speed": 7}
        )
        case.live(config, kill_at=3, factor=clock.step)
    assert case.steps_of(tmp_path / "run") == [1]
    caplog.clear()
    assert case.live(config, factor=clock.step).complete
    (warning,) = [
        r.getMessage() for r in caplog.records if r.name == scheduler.__name__ and r.levelno == logging.WARNING
    ]
    assert warning.endswith("cadence.speed: is not a field of the save interval's state")
    assert "stall 10 s (assumed)" in decisions(caplog)[0]
