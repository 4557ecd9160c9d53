"""A rank that hangs is named soon, and ends the run; time that only passes names nobody."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quern.config import dump_yaml
from quern.errors import HUNG
from quern.train.processes.ranks import Ranks, choose_device
from quern.train.supervision import watchdog
from quern.train.supervision.watchdog import PHASES, Limits, culprits
from support.programs import python
from support.train import run_case as case

#: ``quern train --nproc 4``, of which rank {rank} does {fault} in step 3 where ``Trainer.{place}`` is called.
PROGRAM = """
import os, signal, sys, time
from quern.train import __main__ as program
from quern.train.trainer import Trainer
from quern.train.processes import launch

plain = Trainer.{place}

def faulty(self, step, *rest):
    if self.ranks.rank == {rank} and (step if isinstance(step, int) else step.data_step) == 3:
        {fault}
    return plain(self, step, *rest)

Trainer.{place} = faulty
launch.end_with_launcher()
program.leave(program.main(sys.argv[1:]))
"""
LAUNCHER = """
import sys
from quern.cli.train import ranks
from quern.train.init_from import load_run_config

nproc, python, program, config = sys.argv[1:]
ranks.module = lambda *_: [python, program, config]
sys.exit(ranks.supervise(load_run_config(config, ()), config, [], int(nproc), 0))
"""
HANGS, STOPS = "time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP)"


def run_with(tmp_path: Path, nproc: int, place: str, rank: int, fault: str) -> subprocess.CompletedProcess[str]:
    paths = case.write_corpus(tmp_path / "data")
    config = case.settings(
        tmp_path / "run", paths, global_batch=4, micro_batch=1, steps=9, watchdog={"least_s": 8, "factor": 4},
        parallel={"dp_replicate": 2, "dp_shard": nproc // 2},
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    (tmp_path / "program.py").write_text(PROGRAM.format(place=place, rank=rank, fault=fault))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    files = str(tmp_path / "program.py"), str(tmp_path / "config.yaml")
    command = [python(), "-c", LAUNCHER, str(nproc), sys.executable, *files]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "place", "rank", "fault", "told"),
    [
        pytest.param(
            2, "forward_backward", 1, HANGS, r"rank 1: hangs: rank 1 does not get further than data of step 3 on",
            id="before the forward pass", marks=pytest.mark.long,
        ),
        pytest.param(
            4, "clip", 1, STOPS, r"rank 1: hangs: rank 1 does not answer, and the others wait in \w+ of step [34]",
            id="stopped", marks=pytest.mark.long,
        ),
        pytest.param(
            4, "clip", 0, STOPS, r"rank 0: hangs: it holds the store, which does not answer \(.*; stacks of all",
            id="stopped with the store", marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_the_rank_that_hangs_is_named(tmp_path: Path, nproc: int, place: str, rank: int, fault: str, told: str) -> None:
    done = run_with(tmp_path, nproc, place, rank, fault)
    assert done.returncode == HUNG, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert re.match(f"error: {told}", errors[0]), errors
    stacks = (tmp_path / "run" / "tracebacks" / f"rank_{0 if nproc == 2 else 3}.stacks.txt").read_text()
    assert re.match(r"rank \d: in \w+ of step \d", stacks)
    assert "trainer.py" in stacks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    found = Clock()
    monkeypatch.setattr(watchdog, "time", found)
    return found


def test_steps_that_take_half_or_twice_as_long_raise_no_alarm() -> None:
    """2,000 of them, phase by phase, against limits without a least."""
    rng, limits = random.Random(3), Limits(10.0, 0.0, 1.0)
    usual = {phase: 10 ** rng.uniform(-4, 1) for phase in watchdog.PHASES[:6]}
    for step in range(2000):
        for phase, seconds in usual.items():
            took = seconds * 2 ** rng.uniform(-1, 1)
            assert step == 0 or took < limits.of(phase)
            limits.learn(phase, took)
    assert all(limits.of(phase) < 40 * seconds for phase, seconds in usual.items())


def test_limits_are_learned_from_each_phase_by_itself() -> None:
    limits = Limits(4.0, 2.0, 1800.0, 480.0)
    assert limits.of("validation") == 1800
    limits.learn("validation", 30.0)
    limits.learn("data", 0.01)
    limits.learn("metrics", 200.0)
    assert (limits.of("validation"), limits.of("data"), limits.of("forward")) == (120, 2, 1800)
    assert limits.of("metrics") == 480  # before a collective gives up
    limits.learn("metrics", 300.0)
    assert limits.of("metrics") == 600  # but not what has been done in that time
    for _ in range(3000):
        limits.learn("validation", 1.0)
    assert 4 <= limits.of("validation") < 10  # one that took long is forgotten
    assert limits.of("end") == limits.of("save") == float("inf")


def place(step: int, phase: str) -> dict[str, Any]:
    return {"step": step, "phase": phase, "seconds": 12.3, "host": "n1"}


@pytest.mark.parametrize(
    ("places", "guilty", "told"),
    [
        ({0: place(7, "reduce"), 1: place(7, "data"), 2: place(7, "reduce")}, [1], "data of step 7 on n1, for 12 s"),
        ({0: place(7, "forward"), 1: place(7, "backward"), 2: place(7, "forward")}, [0, 1, 2], "all ranks are in"),
        ({0: place(7, "metrics"), 1: place(7, "metrics"), 2: place(6, "save")}, [2], "save of step 6"),
        ({0: place(7, "reduce"), 2: place(7, "reduce")}, [1], "rank 1 does not answer.* wait in reduce of step 7"),
        ({0: place(7, "reduce")}, [1, 2], "ranks 1, 2 do not answer"),
        ({rank: place(7, "reduce") for rank in range(3)}, [0, 1, 2], "all ranks are in reduce of step 7"),
    ],
)
def test_who_is_waited_for(places: dict[int, Any], guilty: list[int], told: str) -> None:
    found, words = culprits(places, 3)
    assert found == guilty
    assert re.search(told, words)


class Store:
    """Ranks that have answered by now; rank 2 does when it has been asked for five times."""

    def __init__(self) -> None:
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += keys == ["quern/hang/2"]
        return keys == ["quern/hang/0"] or (keys == ["quern/hang/2"] and self.asked > 5)

    def get(self, key: str) -> bytes:
        return json.dumps(place(7, "reduce")).encode()


@pytest.mark.parametrize(("world", "answered"), [(3, [0, 2]), (4, [0, 2])])
def test_a_rank_that_is_late_to_answer_is_not_taken_for_the_one_that_hangs(
    world: int, answered: list[int], tmp_path: Path, clock: Any
) -> None:
    own = watchdog.Watchdog(case.settings(tmp_path, ["data"]), Ranks(0, world, choose_device("cpu")), 0)
    own._store = Store()
    assert sorted(own._answers()) == answered


def test_nothing_is_learned_from_the_first_step(tmp_path: Path, clock: Any) -> None:
    config = case.settings(tmp_path, ["data"], watchdog={"least_s": 1, "factor": 2})
    own = watchdog.Watchdog(config, Ranks(0, 2, choose_device("cpu")), 5)
    for step, seconds in ((5, 500.0), (6, 3.0), (7, 1.0)):
        for phase in ("data", "forward"):
            own.enter(phase, step)
            clock.now += seconds
    assert own._limits.of("data") == pytest.approx(6, rel=0.01)
    assert own._limits.of("forward") == pytest.approx(6, rel=0.01)  # that of step 7 has not ended


def test_every_phase_that_a_rank_enters_is_one_that_culprits_are_found_by() -> None:
    files = Path(watchdog.__file__).parents[1].rglob("*.py")
    entered = {name for file in files for name in re.findall(r"\benter\(\"(\w+)\"", file.read_text())}
    assert entered == {*PHASES}
    for phase in PHASES:
        places = {rank: {"step": 3, "phase": phase, "seconds": 9.0, "host": "a"} for rank in range(2)}
        assert culprits(places, 2)[0] == [0, 1]
