"""The trainer and its saves as a whole: the interval it chooses, saves that fail, runs that differ only in who writes.

Time is a clock that only the test moves; the best interval is found by trying every one in Daly's model. What is in a
checkpoint is judged by that of a run in which the loop stands still while it is written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any

import pytest

from quern.config import dump_yaml
from quern.errors import InputError, QuernError
from quern.train import trainer
from quern.train.__main__ import main
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.save import async_save, background, scheduler, snapshot, work
from quern.train.checkpoint.save.async_save import AsyncSave, Progress
from quern.train.checkpoint.save.snapshot import Snapshot
from quern.train.checkpoint.save.work import Work
from quern.train.checkpoint.tools.reader import verify
from support.programs import forked, python
from support.train import run_case as case

pytestmark = pytest.mark.slow

WAIT_S = 120.0
#: Where a process of its own makes no difference that others have not shown: it imports torch.
PROCESS_LONG = pytest.param("process", marks=pytest.mark.long)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return case.write_corpus(tmp_path_factory.mktemp("data"))


def steps_of(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(str(run))]


def folders(run: Path) -> list[str]:
    """Also those of saves in work, whose names begin with a dot."""
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def told(run: Path, *kinds: str) -> list[int]:
    return [entry["step"] for entry in case.ledger(run) if entry["kind"] in kinds]


# ---- the interval it chooses


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
            limit = time.monotonic() + WAIT_S
            while self.in_flight and progress(self) == Progress():
                assert time.monotonic() < limit
                time.sleep(0.001)
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
    told = (r.getMessage() for r in caplog.records if r.name == scheduler.__name__ and r.levelno == logging.INFO)
    return [line for line in told if not re.fullmatch(r"checkpoint after step \d+ saved", line)]


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
    assert told(tmp_path / "run", "checkpoint") == steps_of(tmp_path / "run") == expected
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
    assert steps_of(tmp_path / "run")[-1] == at
    manifest = json.loads(Path(list_checkpoints(config.run_dir)[-1].path, "manifest.json").read_text())
    scalars = {name: value for name, value in manifest["scalars"].items() if name.startswith("cadence.")}
    ended = len([step for step in steps_of(tmp_path / "run") if step < at])
    assert {name: value for name, value in scalars.items() if ".cost." in name} == {
        f"cadence.cost.{place}": 3.0 for place in range(ended)
    }
    assert {value for name, value in scalars.items() if ".step." in name} == {4.0, 5.0}  # 5 where a copy is waited for
    assert len([name for name in scalars if ".delay." in name]) == ended
    assert scalars["cadence.steps"] == interval

    caplog.clear()
    clock.begin_s = 300.0
    case.live(config, kill_at=at + interval + 1, factor=clock.step)
    assert told(tmp_path / "run", "checkpoint", "resume")[-2:] == [at, at + interval]
    assert intervals(caplog)[0] == interval
    assert "stall 3 s, " in decisions(caplog)[0]
    assert "assumed" not in decisions(caplog)[0]


def test_the_longest_interval_and_failures_are_heeded(tmp_path, paths, monkeypatch, caplog):
    """13 s are three steps of 4 s. Nobody says how often the run fails: the ledger knows of one failure, then."""
    caplog.set_level(logging.INFO, scheduler.__name__)
    clock = Clock().install(monkeypatch)
    config = case.settings(tmp_path / "run", paths, checkpoint={"interval": "auto", "max_interval_s": 13.0})
    case.live(config, kill_at=7, factor=clock.step)
    assert steps_of(tmp_path / "run") == [1, 4, 7]
    assert intervals(caplog) == [1, 3, 3, 3]
    assert all("bounded by max_interval_s 13 s" in line for line in decisions(caplog))
    assert all("(assumed; 0 failures in " in line for line in decisions(caplog))
    caplog.clear()
    assert case.live(config, factor=clock.step).complete
    assert steps_of(tmp_path / "run") == [1, 4, 7, 9]
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
    assert steps_of(tmp_path / "run") == [1]
    caplog.clear()
    assert case.live(config, factor=clock.step).complete
    (warning,) = [
        r.getMessage() for r in caplog.records if r.name == scheduler.__name__ and r.levelno == logging.WARNING
    ]
    assert warning.endswith("cadence.speed: is no field of a cadence's state")
    assert "stall 10 s (assumed)" in decisions(caplog)[0]


# ---- saves that fail

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing(monkeypatch: pytest.MonkeyPatch, where: str, steps: set[int]) -> None:
    """No space is left for the saves after ``steps``, at one place of a save."""

    def fail(owner: Any, name: str, step_of: Callable[..., str]) -> None:
        whole = getattr(owner, name)

        def maybe(*arguments: Any, **named: Any) -> Any:
            found = re.search(r"step_(\d{8})", step_of(*arguments))
            assert found is not None
            if int(found[1]) in steps:
                raise FULL
            return whole(*arguments, **named)

        monkeypatch.setattr(owner, name, maybe)

    if where == "writing":
        fail(work, "write_files", lambda folder, files, fetch: folder)
    elif where == "publishing":
        fail(Work, "_publish", lambda self, asked: asked.final)
    elif where == "beginning":
        fail(async_save, "make_staging_folder", lambda final: final)
    elif where == "copying":
        begin, start, now = AsyncSave.begin, Snapshot.start, [0]

        def begins(self: AsyncSave, step: int, *arguments: Any) -> None:
            now[0] = step
            begin(self, step, *arguments)

        monkeypatch.setattr(AsyncSave, "begin", begins)
        fail(snapshot._Copies, "__init__", lambda self, pairs: f"step_{now[0] * bool(pairs):08d}")
        assert start is Snapshot.start
    else:  # the writer process may write no more than so many bytes
        begin = AsyncSave.begin
        monkeypatch.setattr(background, "_COMMAND", [python(), *background._COMMAND[1:]])

        def limits(self: AsyncSave, step: int, *arguments: Any) -> None:
            writer = forked(self._background._child._popen)  # type: ignore[union-attr,arg-type]
            hard = resource.prlimit(writer, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (5000 if step in steps else hard, hard))
            begin(self, step, *arguments)

        monkeypatch.setattr(AsyncSave, "begin", limits)


def files_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of the files that hold or place tensors."""
    names = sorted(name for name in os.listdir(checkpoint) if name.endswith(".distcp") or name == ".metadata")
    assert len(names) >= 2
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}


def checkpoints(run: Path) -> dict[int, dict[str, str]]:
    return {found.step: files_of(Path(found.path)) for found in list_checkpoints(str(run))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, paths):
    """The run whose loop stands still while a checkpoint is written, and none of them fails."""
    run = tmp_path_factory.mktemp("whole")
    return run, case.live(case.settings(run, paths, checkpoint={"interval": 2}), factor=nan_at_5)


def nan_at_5(data_step: int) -> float:
    return float("nan") if data_step == 5 else 1.0


FAILURES = [
    ("sync", "writing"), ("process", "a limit"),
    ("thread", "writing"), ("thread", "publishing"), ("thread", "beginning"), ("thread", "copying"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "where"), FAILURES)
def test_a_save_that_fails_costs_itself_alone(tmp_path, paths, whole, monkeypatch, caplog, mode, where):
    """Those after 4 and 8 steps fail, and not in a row: with two allowed in a row the count began anew at 6."""
    failing(monkeypatch, where, {4, 8})
    run = tmp_path / "run"
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": mode, "max_failures": 2})
    left = case.live(config, factor=nan_at_5)
    assert left.complete
    assert case.differences(left.state, whole[1].state) == []
    lines = [e for e in case.ledger(run) if e["kind"] == "checkpoint_failed"]
    assert [entry["step"] for entry in lines] == [4, 8]
    why = "File too large" if mode == "process" else "No space left on device"
    if where != "copying":  # into memory
        why = rf"{run}/checkpoints: {why}" + ("" if mode == "process" else r" \(.* MiB are free on /.*\); make room .*")
    assert all(re.fullmatch(why, entry["why"]) for entry in lines)
    warnings = [r.getMessage() for r in caplog.records if r.name == scheduler.__name__]
    assert warnings == [f"the checkpoint after step {e['step']} was not saved: {e['why']}" for e in lines]
    assert told(run, "checkpoint") == [2, 4, 6, 8, 9]
    kinds = [(entry["kind"], entry["step"]) for entry in case.ledger(run) if "step" in entry]
    for step in (4, 8):  # said once it is known, and before the next save begins
        after = 6 if step == 4 else 9
        places = [kinds.index(k) for k in (("checkpoint", step), ("checkpoint_failed", step), ("checkpoint", after))]
        assert places == sorted(places)
    assert folders(run) == [f"step_{step:08d}" for step in (2, 6, 9)]
    intact = checkpoints(whole[0])
    assert checkpoints(run) == {step: intact[step] for step in (2, 6, 9)}
    assert all(verify(found.path) == [] for found in list_checkpoints(str(run)))


def command(config: Any, folder: Path) -> list[str]:
    file = folder / "config.yaml"
    file.write_text(dump_yaml(config))
    return [str(file)]


def test_too_many_failures_in_a_row_end_the_run(tmp_path, paths, whole, monkeypatch, capsys):
    run = tmp_path / "run"
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": "thread", "max_failures": 2})
    with monkeypatch.context() as full:
        failing(full, "writing", {4, 6})
        assert main(command(config, tmp_path)) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("WARNING ")]
    (line,) = said
    full = rf"error: {run}/checkpoints: No space left on device \(.* MiB are free on /.*\); make room and .*"
    newest = f"the newest checkpoint is {run}/checkpoints/step_00000002"
    assert re.fullmatch(rf"{full}; 2 saves in a row failed \(checkpoint\.max_failures 2\), and {newest}", line)
    assert told(run, "checkpoint_failed") == [4, 6]
    assert told(run, "end", "stopped") == []
    assert folders(run) == ["step_00000002"]
    life = case.live(config, factor=nan_at_5)
    assert (life.start.step, life.complete) == (2, True)
    assert case.differences(life.state, whole[1].state) == []
    assert checkpoints(run) == checkpoints(whole[0])


@pytest.mark.parametrize("mode", ["thread", PROCESS_LONG])
def test_a_last_save_that_fails_ends_the_run_with_an_error(tmp_path, paths, monkeypatch, mode):
    """However many may fail, and also where a signal makes it the last."""
    for number, stop_at in enumerate((None, 3)):
        run = tmp_path / f"run{number}"
        last = case.STEPS if stop_at is None else stop_at + 3
        config = case.settings(run, paths, checkpoint={"interval": 2, "mode": mode, "max_failures": 99})
        with monkeypatch.context() as full:
            failing(full, "a limit" if mode == "process" else "writing", {last})
            with pytest.raises(QuernError, match=r"No space left on device|File too large") as caught:
                case.live(config, stop_at=stop_at)
        assert not isinstance(caught.value, InputError)
        newest = f"the newest checkpoint is {run}/checkpoints/step_{(last - 1) // 2 * 2:08d}"
        assert str(caught.value).endswith(f"; the checkpoint after step {last} was not saved, and {newest}")
        assert told(run, "checkpoint_failed") == [last]
        assert told(run, "end", "stopped") == []
        assert steps_of(run) == list(range(2, last, 2))


def finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save takes longer than it is to the next: how it ended is known when that one begins."""
    monkeypatch.setattr(AsyncSave, "progress", lambda self: Progress())


@pytest.mark.parametrize("stop_at", [None, 3])
def test_the_last_save_is_tried_though_the_one_before_has_failed(tmp_path, paths, monkeypatch, stop_at):
    """With one failure allowed too few: the run has nothing to lose any more, and its end is in the last one."""
    finished_by_the_next(monkeypatch)
    last, before = (case.STEPS, case.STEPS - 1) if stop_at is None else (6, 4)
    failing(monkeypatch, "writing", {before})
    run = tmp_path / "run"
    left = case.live(
        case.settings(run, paths, checkpoint={"interval": 2, "mode": "thread", "max_failures": 1}), stop_at=stop_at
    )
    assert (left.complete, left.stopped_by) == ((True, None) if stop_at is None else (False, "SIGTERM"))
    assert told(run, "checkpoint_failed") == [before]
    assert told(run, "end", "stopped") == [last]
    assert steps_of(run) == [*range(2, before, 2), last]
    assert verify(list_checkpoints(str(run))[-1].path) == []


@pytest.mark.parametrize(("failed", "told_of"), [({6}, [6]), ({8, 9}, [8, 9])])
def test_a_failure_in_flight_ends_the_run_where_the_next_is_not_the_last_or_fails_too(
    tmp_path, paths, monkeypatch, failed, told_of
):
    finished_by_the_next(monkeypatch)
    failing(monkeypatch, "writing", failed)
    run = tmp_path / "run"
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": "thread", "max_failures": 1})
    with pytest.raises(QuernError, match="No space left on device"):
        case.live(config)
    assert told(run, "checkpoint_failed") == told_of
    assert told(run, "end", "stopped") == []
    assert steps_of(run) == list(range(2, min(failed), 2))


@pytest.mark.long
def test_a_full_disk_ends_a_process_with_one_line(tmp_path, paths, whole):
    """The system itself refuses: no file of the process, or of its writer, may grow as long as that of the tensors."""
    run = tmp_path / "run"
    config = case.settings(run, paths, checkpoint={"interval": 1, "mode": "process", "max_failures": 2})
    done = run_within(max(os.path.getsize(file) for file in whole[0].rglob("*.distcp")) - 1, command(config, tmp_path))
    assert done.returncode == 1, done.stderr
    *warnings, error = (line for line in done.stderr.splitlines() if not line.startswith("INFO "))
    assert [re.search(r"the checkpoint after step (\d) was not saved: .*File too large$", w)[1] for w in warnings] == [
        "1", "2",
    ]  # fmt: skip
    assert re.fullmatch(
        r"error: .*/run/checkpoints: File too large; 2 saves .*, and there is no checkpoint to go on from", error
    )
    assert folders(run) == []


@pytest.mark.long
def test_memory_that_cannot_be_had_ends_a_process_before_its_first_step(tmp_path, paths):
    """The snapshot's memory is a file that the writer has too."""
    run = tmp_path / "run"
    config = case.settings(run, paths, checkpoint={"interval": 1, "mode": "process", "max_failures": 99})
    done = run_within(50_000, command(config, tmp_path))
    said = [line for line in done.stderr.splitlines() if not line.startswith("INFO ")]
    assert (done.returncode, said) == (1, ["error: File too large"])
    assert told(run, "checkpoint", "end") == []
    assert folders(run) == []


def run_within(limit: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The run as a process of which no file may be longer than ``limit`` bytes."""
    return subprocess.run(
        [sys.executable, "-m", "quern.train", *arguments],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


# ---- who writes, and when, changes nothing


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name != "time"} for entry in case.ledger(run)]


def facts(run: Path) -> list[dict[str, Any]]:
    """What manifests say of their checkpoints, but for what depends on the config, the time and the run."""
    different = ("config_digest", "checksum", "run", "files")
    paths = [Path(found.path, "manifest.json") for found in list_checkpoints(str(run))]
    manifests = [json.loads(path.read_text()) for path in paths]
    return [{n: v for n, v in manifest.items() if n not in different} for manifest in manifests]


@pytest.mark.parametrize("overlap", [True, False])
def test_who_writes_changes_no_bit(tmp_path, paths, whole, monkeypatch, overlap):
    """A process is held against the same run where some of its saves fail, above.

    Every other thread begins to copy late, so that what the loop does not wait for would be of a step too far.
    """
    hand_on = snapshot._hand_on

    def late(*arguments: Any) -> None:
        time.sleep(0.05)
        hand_on(*arguments)

    monkeypatch.setattr(snapshot, "_hand_on", late)
    run = tmp_path / "run"
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": "thread", "overlap": overlap})
    left = case.live(config, factor=nan_at_5)
    assert case.differences(left.state, whole[1].state) == []
    assert case.rows(run) == case.rows(whole[0])
    assert timeless(run) == timeless(whole[0])
    assert checkpoints(run) == checkpoints(whole[0])
    assert set(checkpoints(run)) == {2, 4, 6, 8, 9}
    assert facts(run) == facts(whole[0])


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_signal_at_a_save_loses_nothing(tmp_path, paths, stop_at):
    """Heard in step s, it is known at the end of s + 1 where a save is due then, and of s + 2 elsewhere."""
    run = tmp_path / "run"
    config = case.settings(run, paths, checkpoint={"interval": 4, "mode": "thread"})
    left = case.live(config, stop_at=stop_at)
    assert (left.complete, left.stopped_by) == (False, "SIGTERM")
    assert told(run, "stopped") == [4]
    assert told(run, "checkpoint") == steps_of(run) == [4]
