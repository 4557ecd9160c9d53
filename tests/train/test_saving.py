"""Saves beside training: what is in a checkpoint, when it exists, and what is left of one that fails.

The oracle of content is ``checkpoint_case``'s numbers by name, from NumPy alone.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import subprocess
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from quern.train.checkpoint.format.files import FILE_BYTES, deal_files
from quern.train.checkpoint.format.folder import FolderLock
from quern.train.checkpoint.format.state import TrainState
from quern.train.checkpoint.retention.prune import Keep
from quern.train.checkpoint.save import background
from quern.train.checkpoint.save import manager as manager_module
from quern.train.checkpoint.save.async_save import AsyncSave, Outcome, Progress
from quern.train.checkpoint.save.background import Process, Thread
from quern.train.checkpoint.save.work import Work
from quern.train.checkpoint.tiers.tiers import Tiers
from quern.train.checkpoint.tools.reader import verify
from quern.train.config import CheckpointConfig
from quern.train.processes import agree
from quern.train.processes.agree import Agreement
from support.programs import forked, kill, python
from support.train import checkpoint_case as CASE
from support.train.run_case import steps_of
from support.train.saves import CheckpointManager
from support.waits import has_ended, until

pytestmark = pytest.mark.slow

WAIT_S = 120.0


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def manager(run: Path, mode: str, **config) -> CheckpointManager:
    return CheckpointManager(str(run), CheckpointConfig(mode=mode, **config))


def begin(checkpoints: CheckpointManager, step: int, state: TrainState, *keep: Keep) -> None:
    """Until the state may change."""
    checkpoints.async_save.begin(step, state, CASE.position(step), *keep)
    checkpoints.async_save.wait_staged()


def saved(checkpoints: CheckpointManager) -> Outcome:
    outcome = checkpoints.async_save.finish()
    assert outcome is not None
    assert outcome.error is None
    return outcome


def content(run: Path, step: int, folder: Path) -> types.SimpleNamespace:
    """A state loaded from a checkpoint, whose files have been verified."""
    state = CASE.filled(folder, 0)
    path = run / "checkpoints" / f"step_{step:08d}"
    assert verify(str(path)) == []
    with manager(run, "sync") as checkpoints:
        checkpoints.load(str(path), state)
    return state


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_what_changes_after_the_copy_is_not_in_the_checkpoint(tmp_path, run, mode):
    """And closing loses the save in flight, and nothing else. Of a process this is told with its signals, below."""
    state = CASE.make(tmp_path)
    with manager(run, mode) as checkpoints:
        for step in (1, 2):  # the second goes into memory that holds the first
            CASE.fill(state, step)
            begin(checkpoints, step, state)
            CASE.fill(state, 100 + step)
            outcome = saved(checkpoints)
            assert outcome.checkpoint.step == step
            assert checkpoints.async_save.finish() is None
        begin(checkpoints, 3, state)
    assert steps_of(run) == [1, 2]
    with manager(run, "sync"):
        assert sorted(os.listdir(run / "checkpoints")) == [".lock", "step_00000001", "step_00000002"]
    for step in (1, 2):
        assert CASE.differences(content(run, step, tmp_path), step) == []


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.long)])
@pytest.mark.parametrize("who", ["snapshot", "trainer"])
def test_a_copy_that_another_thread_makes_is_waited_for(tmp_path, run, mode, who, monkeypatch):
    """Two threads copy; one is held amid its first tensor while the other copies all else. Nothing is written yet."""
    begun, go, done = threading.Event(), threading.Event(), threading.Event()
    copy = torch.Tensor.copy_

    def held(self, *arguments, **options):
        if threading.current_thread().name == who and not begun.is_set():
            begun.set()
            assert go.wait(WAIT_S)
        else:
            assert begun.wait(WAIT_S)
        return copy(self, *arguments, **options)

    def wait(checkpoints) -> None:
        checkpoints.async_save.wait_staged()
        done.set()

    state = CASE.filled(tmp_path, 1)
    with manager(run, mode) as checkpoints:
        checkpoints.async_save.prepare(state)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", held)
            checkpoints.async_save.begin(1, state, CASE.position(1))
            trainer = threading.Thread(target=wait, args=(checkpoints,), name="trainer")
            trainer.start()
            assert begun.wait(WAIT_S)
            early, progress = done.wait(0.3), checkpoints.async_save.progress()
            go.set()
            trainer.join(WAIT_S)
            assert not early
            assert progress == Progress()
        CASE.fill(state, 101)
        saved(checkpoints)
    assert CASE.differences(content(run, 1, tmp_path), 1) == []


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.long)])
@pytest.mark.parametrize("who", ["snapshot", "MainThread"])
def test_a_copy_that_fails_fails_its_save_and_nothing_is_written(tmp_path, run, mode, who, monkeypatch):
    """In the thread that copies, or in the trainer's, which helps; the next save is a sound one."""
    met = threading.Barrier(2)
    copy = torch.Tensor.copy_
    failed = []

    def failing(self, *arguments, **options):
        name = threading.current_thread().name
        if name not in failed:
            failed.append(name)
            met.wait(WAIT_S)  # both are amid a copy
            if name == who:
                raise RuntimeError("no such page")
        return copy(self, *arguments, **options)

    state = CASE.filled(tmp_path, 1)
    with manager(run, mode) as checkpoints:
        checkpoints.save(1, state, CASE.position(1))
        CASE.fill(state, 2)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", failing)
            begin(checkpoints, 2, state)
        assert checkpoints.async_save.progress() == Progress(ended=1)
        assert checkpoints.async_save.advance(Progress()) is None
        outcome = checkpoints.async_save.advance(Progress(ended=1))
        assert outcome is not None
        assert "no such page" in str(outcome.error)
        assert not checkpoints.async_save.in_flight
        assert sorted(os.listdir(run / "checkpoints")) == [".lock", "step_00000001"]
        CASE.fill(state, 3)
        checkpoints.save(3, state, CASE.position(3))
    assert CASE.differences(content(run, 3, tmp_path), 3) == []


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_save_removes_what_it_makes_too_old(tmp_path, run, mode):
    """Counted with itself; a newer one, of a branch that was left, waits."""
    state = CASE.make(tmp_path)
    with manager(run, mode, keep_last=1) as checkpoints:
        for step, stand in ((1, [1]), (2, [1, 2]), (9, [1, 9]), (3, [1, 3, 9]), (4, [1, 4, 9])):
            CASE.fill(state, step)
            begin(checkpoints, step, state, checkpoints.keep([1]))
            saved(checkpoints)
            assert steps_of(run) == stand


def test_a_save_goes_on_when_the_sum_says_so_and_not_before(tmp_path, run):
    state = CASE.filled(tmp_path, 3)
    with manager(run, "thread") as checkpoints:
        assert checkpoints.async_save.progress() == Progress()
        begin(checkpoints, 3, state)
        assert checkpoints.async_save.advance(Progress()) is None
        until(lambda: checkpoints.async_save.progress() == Progress(ended=1))
        assert steps_of(run) == []  # written, and nobody has gathered the checksums
        assert checkpoints.async_save.advance(Progress()) is None
        assert steps_of(run) == []
        assert checkpoints.async_save.advance(Progress(ended=1)) is None
        assert checkpoints.async_save.advance(Progress(ended=1)) is None  # said a step ago, of the same
        until(lambda: checkpoints.async_save.progress() == Progress(published=1))
        assert steps_of(run) == [3]
        outcome = checkpoints.async_save.advance(Progress(published=1))
        assert outcome is not None
        assert outcome.error is None
        assert checkpoints.async_save.progress() == Progress()
        assert checkpoints.async_save.advance(Progress(ended=1, published=1)) is None
    assert CASE.differences(content(run, 3, tmp_path), 3) == []


@pytest.fixture(autouse=True)
def forked_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_COMMAND", [python(), *background._COMMAND[1:]])


def process_of(checkpoints: CheckpointManager) -> subprocess.Popen[bytes]:
    background = checkpoints.async_save._background
    assert isinstance(background, Process)
    return background._child._popen


def writer_of(checkpoints: CheckpointManager) -> int:
    return forked(process_of(checkpoints))


FAILS = {"writing": "ended with code -9", "publishing": "ended with code -9",
         "not started again": "Resource temporarily unavailable", "full disk": "File too large"}  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [
        "publishing",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("before", "written", *FAILS) if name != "publishing"),
    ],
)
def test_a_writer_that_fails_or_is_killed_costs_its_save_alone(tmp_path, run, what, monkeypatch):
    """Killed before or after it has a save in work, it costs nothing: another is started, if one can be."""
    state = CASE.filled(tmp_path, 1)

    def fails(*arguments, **options):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with manager(run, "process", keep_last=5) as checkpoints, monkeypatch.context() as patch:
        checkpoints.save(1, state, CASE.position(1))
        process, writer = process_of(checkpoints), writer_of(checkpoints)
        limits = resource.prlimit(writer, resource.RLIMIT_FSIZE)
        if what in ("before", "not started again"):
            kill(process)
        if what == "not started again":
            patch.setattr(subprocess, "Popen", fails)
        if what == "full disk":
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (5000, limits[1]))
        if what == "writing":
            os.kill(writer, signal.SIGSTOP)  # it gets the request and does not act
        begin(checkpoints, 2, state)
        if what in ("written", "publishing", "not started again"):
            until(lambda: checkpoints.async_save.progress() == Progress(ended=1))
        if what == "publishing":
            os.kill(writer, signal.SIGSTOP)
            assert checkpoints.async_save.advance(Progress(ended=1)) is None
        if what in ("written", "writing", "publishing"):
            kill(process)
        outcome = checkpoints.async_save.finish()
        patch.undo()
        assert outcome is not None
        if what in FAILS:
            assert FAILS[what] in str(outcome.error)
            assert sorted(os.listdir(run / "checkpoints")) == [".lock", "step_00000001"]
        else:
            assert outcome.error is None
            assert steps_of(run) == [1, 2]
        if what in ("writing", "publishing"):
            assert f"process {process.pid})" in str(outcome.error)
        if what == "full disk":
            resource.prlimit(writer, resource.RLIMIT_FSIZE, limits)
        CASE.fill(state, 3)
        assert checkpoints.save(3, state, CASE.position(3)).step == 3
        assert (writer_of(checkpoints) == writer) == (what == "full disk")
    assert CASE.differences(content(run, 1, tmp_path), 1) == []
    assert CASE.differences(content(run, 3, tmp_path), 3) == []


def test_the_writer_ends_with_its_trainer(run):
    reader, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        checkpoints = manager(run, "process")
        os.write(told, str(writer_of(checkpoints)).encode())
        time.sleep(600)
    os.close(told)
    writer = int(os.read(reader, 100))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: has_ended(writer))


def test_a_signal_does_not_end_a_writer_and_the_end_of_its_input_does(tmp_path, run, monkeypatch):
    """What a scheduler sends to all processes of a job; the trainer saves once more then."""
    monkeypatch.setattr(background, "_GRACE_S", 120.0)  # however slow the machine is
    state = CASE.make(tmp_path)
    with manager(run, "process", keep_last=5) as checkpoints:
        process = process_of(checkpoints)
        for step, number in ((1, signal.SIGTERM), (2, signal.SIGINT), (3, signal.SIGTERM)):
            CASE.fill(state, step)
            begin(checkpoints, step, state)
            if step == 2:
                process.send_signal(signal.SIGTERM)  # it writes
            CASE.fill(state, 100 + step)  # of which nothing is in the checkpoint
            outcome = saved(checkpoints)
            assert outcome.checkpoint.step == step
            assert checkpoints.async_save.finish() is None
            process.send_signal(number)
        assert process_of(checkpoints) is process
        checkpoints.async_save.begin(4, state, CASE.position(4))  # lost: it is closed before anybody publishes it
        checkpoints.async_save.wait_staged()
    assert process.returncode == 0
    assert steps_of(run) == [1, 2, 3]
    with manager(run, "sync"):
        names = [".lock", "step_00000001", "step_00000002", "step_00000003"]
        assert sorted(os.listdir(run / "checkpoints")) == names
    for step in (1, 2, 3):
        assert CASE.differences(content(run, step, tmp_path), step) == []


@pytest.mark.parametrize("where", ["write", "_publish"])
def test_ranks_give_signs_of_life_while_one_is_at_work(tmp_path, run, monkeypatch, where):
    """Else the process group would give up on all. The work goes on when they have done so for some time."""
    finishing, signs = threading.Event(), threading.Semaphore(0)
    gather, action = Agreement.gather, getattr(Work, where)

    def heard(self, value):
        if finishing.is_set():
            signs.release()
        return gather(self, value)

    def slow(self, *arguments):
        assert finishing.wait(WAIT_S)
        assert all(signs.acquire(timeout=WAIT_S) for _ in range(20)), "nobody gives a sign"
        return action(self, *arguments)

    monkeypatch.setattr(agree, "_SIGN_OF_LIFE_S", 0.01)
    monkeypatch.setattr(Agreement, "gather", heard)
    monkeypatch.setattr(Work, where, slow)
    state = CASE.filled(tmp_path, 1)
    with manager(run, "thread") as checkpoints:
        begin(checkpoints, 1, state)
        finishing.set()
        saved(checkpoints)
    assert CASE.differences(content(run, 1, tmp_path), 1) == []


def test_an_outcome_says_whether_it_is_uploaded(tmp_path):
    state = CASE.make(tmp_path)
    for name, config, stored in (
        ("none", {}, [False, False, False]),
        ("every", {"store": f"file://{tmp_path}/store", "store_every": 2}, [False, True, False]),
    ):
        with manager(tmp_path / name, "sync", **config) as checkpoints:
            found = []
            for step in (1, 2, 3):
                CASE.fill(state, step)
                begin(checkpoints, step, state)
                outcome = saved(checkpoints)
                found.append(outcome.stored)
        assert found == stored


def test_each_part_is_closed_whatever_the_others_do_and_the_lock_last(run, monkeypatch):
    closed = []

    def fails(name, close):
        def closes(self):
            close(self)
            closed.append(name)
            raise RuntimeError(name)

        return closes

    checkpoints = manager(run, "thread")
    with monkeypatch.context() as patch:
        for owner in (AsyncSave, Tiers, FolderLock):
            patch.setattr(owner, "close", fails(owner.__name__, owner.close))
        with pytest.raises(RuntimeError):
            checkpoints.close()
        assert closed == ["AsyncSave", "Tiers", "FolderLock"]
        checkpoints.close()
        assert len(closed) == 3
    manager(run, "thread").close()  # the lock is free


def test_a_manager_that_cannot_be_opened_closes_what_it_has(run, monkeypatch):
    closed = []
    close = Thread.close

    def fails(*arguments):
        raise RuntimeError("no saves")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "close", lambda self: closed.append("background") or close(self))
        patch.setattr(manager_module, "AsyncSave", fails)
        with pytest.raises(RuntimeError, match="no saves"):
            manager(run, "thread")
    assert closed == ["background"]
    manager(run, "thread").close()


def test_planning_happens_once_and_again_when_sizes_change(tmp_path, run, monkeypatch):
    state = CASE.filled(tmp_path, 1)
    planned = []
    deal = Agreement.scatter
    monkeypatch.setattr(Agreement, "scatter", lambda self, action: planned.append(1) or deal(self, action))
    with manager(run, "thread") as checkpoints:
        for step in (1, 2, 3):
            CASE.fill(state, step)
            checkpoints.save(step, state, CASE.position(step))
        assert len(planned) == 1
        other = types.SimpleNamespace(**{**vars(state), "extra": {"guard.losses": torch.arange(5.0)}})
        checkpoints.save(4, type(state)(**vars(other)), CASE.position(4))
        assert len(planned) == 2
        CASE.fill(state, 5)
        checkpoints.save(5, state, CASE.position(5))
    for step in (1, 2, 3, 5):
        assert CASE.differences(content(run, step, tmp_path), step) == []


def test_files_are_bounded():
    kinds = [("float32", (2, 3)), ("bfloat16", (5,)), ("float64", ()), ("float32", (100,)), ("float32", (1,))]
    files = deal_files(7, kinds, limit=34)
    assert [[tensor.sizes for tensor in file.tensors] for file in files] == [[(2, 3), (5,)], [()], [(100,)], [(1,)]]
    assert [file.name for file in files] == [f"__7_{number}.distcp" for number in range(4)]
    stored = [tensor for file in files for tensor in file.tensors]
    assert [tensor.num_bytes for tensor in stored] == [24, 10, 8, 400, 4]
    for before, after in itertools.pairwise(stored):
        assert before.offset + before.num_bytes <= after.offset
        assert after.offset % 64 == 0
    assert len(deal_files(0, kinds, FILE_BYTES)) == 1
    assert deal_files(0, []) == []
