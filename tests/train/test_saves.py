"""The trainer and its saves as a whole: saves that fail, runs that differ only in who writes.

What is in a checkpoint is judged by that of a run in which the loop stands still while it is written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quern.config import dump_yaml
from quern.errors import InputError, QuernError
from quern.train.__main__ import main
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.save import async_save, background, scheduler, snapshot, work
from quern.train.checkpoint.save.async_save import AsyncSave, Progress
from quern.train.checkpoint.save.work import Work
from quern.train.checkpoint.tools.reader import verify
from support.programs import forked, python
from support.train import run_case as case

pytestmark = pytest.mark.slow

WAIT_S = 120.0
#: Where a process of its own makes no difference that others have not shown: it imports torch.
PROCESS_LONG = pytest.param("process", marks=pytest.mark.long)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def outcome(run: Path) -> tuple[list[int], list[int], list[int]]:
    """The steps of saves that failed, of the run's end, and of the checkpoints that there are."""
    return case.told(run, "checkpoint_failed"), case.told(run, "end", "stopped"), case.steps_of(run)


# ---- saves that fail


def failing(monkeypatch: pytest.MonkeyPatch, where: str, steps: set[int]) -> None:
    """No space is left for the saves after ``steps``, at one place of a save."""

    def fail(owner: Any, name: str, step_of: Callable[..., str]) -> None:
        whole = getattr(owner, name)

        def maybe(*arguments: Any, **named: Any) -> Any:
            found = re.search(r"step_(\d{8})", step_of(*arguments))
            assert found is not None
            if int(found[1]) in steps:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return whole(*arguments, **named)

        monkeypatch.setattr(owner, name, maybe)

    if where == "writing":
        fail(work, "write_files", lambda folder, files, fetch: folder)
    elif where == "publishing":
        fail(Work, "_publish", lambda self, asked: asked.final)
    elif where == "beginning":
        fail(async_save, "make_staging_folder", lambda final: final)
    elif where == "copying":
        begin, now = AsyncSave.begin, [0]

        def begins(self: AsyncSave, step: int, *arguments: Any) -> None:
            now[0] = step
            begin(self, step, *arguments)

        monkeypatch.setattr(AsyncSave, "begin", begins)
        fail(snapshot._Copies, "__init__", lambda self, pairs: f"step_{now[0] * bool(pairs):08d}")
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
    return run, case.live(case.settings(run, paths, checkpoint={"interval": 2}), factor=case.nan_at_5)


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        ("sync", "writing"), ("process", "a limit"), ("thread", "writing"), ("thread", "publishing"),
        ("thread", "beginning"), ("thread", "copying"),
    ],
)  # fmt: skip
def test_a_save_that_fails_costs_itself_alone(run, paths, whole, monkeypatch, caplog, mode, where):
    """Those after 4 and 8 steps fail, and not in a row: with two allowed in a row the count began anew at 6."""
    failing(monkeypatch, where, {4, 8})
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": mode, "max_failures": 2})
    left = case.live(config, factor=case.nan_at_5)
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
    assert case.told(run, "checkpoint") == [2, 4, 6, 8, 9]
    kinds = [(entry["kind"], entry["step"]) for entry in case.ledger(run) if "step" in entry]
    for step in (4, 8):  # said once it is known, and before the next save begins
        after = 6 if step == 4 else 9
        places = [kinds.index(k) for k in (("checkpoint", step), ("checkpoint_failed", step), ("checkpoint", after))]
        assert places == sorted(places)
    assert case.folders(run) == [f"step_{step:08d}" for step in (2, 6, 9)]
    intact = checkpoints(whole[0])
    assert checkpoints(run) == {step: intact[step] for step in (2, 6, 9)}
    assert all(verify(found.path) == [] for found in list_checkpoints(str(run)))


def command(config: Any, folder: Path) -> list[str]:
    file = folder / "config.yaml"
    file.write_text(dump_yaml(config))
    return [str(file)]


def test_too_many_failures_in_a_row_end_the_run(tmp_path, run, paths, whole, monkeypatch, capsys):
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": "thread", "max_failures": 2})
    with monkeypatch.context() as full:
        failing(full, "writing", {4, 6})
        assert main(command(config, tmp_path)) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("WARNING "))
    full = rf"error: {run}/checkpoints: No space left on device \(.* MiB are free on /.*\); make room and .*"
    newest = f"the newest checkpoint is {run}/checkpoints/step_00000002"
    assert re.fullmatch(rf"{full}; 2 saves in a row failed \(checkpoint\.max_failures 2\), and {newest}", line)
    assert outcome(run) == ([4, 6], [], [2])
    assert case.folders(run) == ["step_00000002"]
    life = case.live(config, factor=case.nan_at_5)
    assert (life.start.step, life.complete) == (2, True)
    assert case.differences(life.state, whole[1].state) == []
    assert checkpoints(run) == checkpoints(whole[0])


@pytest.mark.parametrize("stop_at", [None, 3])
@pytest.mark.parametrize("mode", ["thread", PROCESS_LONG])
def test_a_last_save_that_fails_ends_the_run_with_an_error(run, paths, monkeypatch, mode, stop_at):
    """However many may fail, and also where a signal makes it the last."""
    last = case.STEPS if stop_at is None else stop_at + 3
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": mode, "max_failures": 99})
    failing(monkeypatch, "a limit" if mode == "process" else "writing", {last})
    with pytest.raises(QuernError, match=r"No space left on device|File too large") as caught:
        case.live(config, stop_at=stop_at)
    assert not isinstance(caught.value, InputError)
    newest = f"the newest checkpoint is {run}/checkpoints/step_{(last - 1) // 2 * 2:08d}"
    assert str(caught.value).endswith(f"; the checkpoint after step {last} was not saved, and {newest}")
    assert outcome(run) == ([last], [], list(range(2, last, 2)))


def finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save takes longer than it is to the next: how it ended is known when that one begins."""
    monkeypatch.setattr(AsyncSave, "progress", lambda self: Progress())


@pytest.mark.parametrize("stop_at", [None, 3])
def test_the_last_save_is_tried_though_the_one_before_has_failed(run, paths, monkeypatch, stop_at):
    """With one failure allowed too few: the run has nothing to lose any more, and its end is in the last one."""
    finished_by_the_next(monkeypatch)
    last, before = (case.STEPS, case.STEPS - 1) if stop_at is None else (6, 4)
    failing(monkeypatch, "writing", {before})
    left = case.live(
        case.settings(run, paths, checkpoint={"interval": 2, "mode": "thread", "max_failures": 1}), stop_at=stop_at
    )
    assert (left.complete, left.stopped_by) == ((True, None) if stop_at is None else (False, "SIGTERM"))
    assert outcome(run) == ([before], [last], [*range(2, before, 2), last])
    assert verify(list_checkpoints(str(run))[-1].path) == []


@pytest.mark.parametrize("failed", [{6}, {8, 9}])
def test_a_failure_in_flight_ends_the_run_where_the_next_is_not_the_last_or_fails_too(run, paths, monkeypatch, failed):
    finished_by_the_next(monkeypatch)
    failing(monkeypatch, "writing", failed)
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": "thread", "max_failures": 1})
    with pytest.raises(QuernError, match="No space left on device"):
        case.live(config)
    assert outcome(run) == (sorted(failed), [], list(range(2, min(failed), 2)))


@pytest.mark.long
def test_a_full_disk_ends_a_process_with_one_line(tmp_path, run, paths, whole):
    """The system itself refuses: no file of the process, or of its writer, may grow as long as that of the tensors."""
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
    assert case.folders(run) == []


@pytest.mark.long
def test_memory_that_cannot_be_had_ends_a_process_before_its_first_step(tmp_path, run, paths):
    """The snapshot's memory is a file that the writer has too."""
    config = case.settings(run, paths, checkpoint={"interval": 1, "mode": "process", "max_failures": 99})
    done = run_within(50_000, command(config, tmp_path))
    said = [line for line in done.stderr.splitlines() if not line.startswith("INFO ")]
    assert (done.returncode, said) == (1, ["error: File too large"])
    assert case.told(run, "checkpoint", "end") == []
    assert case.folders(run) == []


def run_within(limit: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The run as a process of which no file may be longer than ``limit`` bytes."""
    return subprocess.run(
        [sys.executable, "-m", "quern.train", *arguments],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


# ---- who writes, and when, changes nothing


def facts(run: Path) -> list[dict[str, Any]]:
    """What manifests say of their checkpoints, but for what depends on the config, the time and the run."""
    different = ("config_digest", "checksum", "run", "files")
    paths = [Path(found.path, "manifest.json") for found in list_checkpoints(str(run))]
    manifests = [json.loads(path.read_text()) for path in paths]
    return [{n: v for n, v in manifest.items() if n not in different} for manifest in manifests]


@pytest.mark.parametrize("overlap", [True, False])
def test_who_writes_changes_no_bit(run, paths, whole, monkeypatch, overlap):
    """A process is held against the same run where some of its saves fail, above.

    Every other thread begins to copy late, so that what the loop does not wait for would be of a step too far.
    """
    hand_on = snapshot._hand_on

    def late(*arguments: Any) -> None:
        time.sleep(0.05)
        hand_on(*arguments)

    monkeypatch.setattr(snapshot, "_hand_on", late)
    config = case.settings(run, paths, checkpoint={"interval": 2, "mode": "thread", "overlap": overlap})
    left = case.live(config, factor=case.nan_at_5)
    assert case.differences(left.state, whole[1].state) == []
    assert case.rows(run) == case.rows(whole[0])
    assert case.timeless(run) == case.timeless(whole[0])
    assert checkpoints(run) == checkpoints(whole[0])
    assert set(checkpoints(run)) == {2, 4, 6, 8, 9}
    assert facts(run) == facts(whole[0])


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_signal_at_a_save_loses_nothing(run, paths, stop_at):
    """Heard in step s, it is known at the end of s + 1 where a save is due then, and of s + 2 elsewhere."""
    config = case.settings(run, paths, checkpoint={"interval": 4, "mode": "thread"})
    left = case.live(config, stop_at=stop_at)
    assert (left.complete, left.stopped_by) == (False, "SIGTERM")
    assert case.told(run, "stopped") == [4]
    assert case.told(run, "checkpoint") == case.steps_of(run) == [4]
