"""A trainer, or the process that writes for it, killed (SIGKILL) at every operation of a save, a replacement and a
removal, and at random moments.

After each kill: whatever bears a checkpoint's name is whole, nothing that the trainer was told is saved is lost, and
the next start takes the newest one and finds in it, bit for bit, what belongs to its step.
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

HERE = Path(__file__)
CASE = types.SimpleNamespace(**runpy.run_path(str(HERE.with_name("checkpoint_case.py"))))


def strike_at(place: int) -> None:
    """Kill this process before its ``place``-th operation on the file system."""
    import builtins
    import io

    count = 0

    def struck(function):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == place:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
        setattr(os, name, struck(getattr(os, name)))
    opens = builtins.open

    def opened(file, mode="r", *arguments, **options):
        stream = (
            struck(opens)(file, mode, *arguments, **options)
            if "w" in mode
            else opens(file, mode, *arguments, **options)
        )
        if mode == "wb" and isinstance(stream, io.BufferedWriter):
            return Torn(stream, struck)
        return stream

    class Torn:
        """Some of a file's writes are two, so that a kill between them leaves a torn file."""

        def __init__(self, stream, struck) -> None:
            self.stream = stream
            self.half, self.writes = struck(self._half), 0

        def _half(self, data) -> None:
            view = memoryview(data).cast("B")
            self.stream.write(view[: len(view) // 2])
            self.stream.flush()
            self.rest = view[len(view) // 2 :]

        def write(self, data):
            self.writes += 1
            if self.writes not in (1, 100):  # a tensor is many writes: the first, and one amid
                return self.stream.write(data)
            self.half(data)
            self.stream.write(self.rest)
            return len(memoryview(data).cast("B"))

        def __getattr__(self, name):
            return getattr(self.stream, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.stream.close()

    builtins.open = opened


def live(run: Path, base: int, told: int, mode: str = "sync", writer: int = 0) -> None:
    """A trainer's life: go on from the newest checkpoint, save, prune, save the same step anew (of another branch).

    The content of a checkpoint is keyed by the scalar ``content`` of its manifest. ``told``: descriptor on which every
    key whose save has returned is told. ``writer``: before which of its operations the writer process is killed; the
    save in work then fails, and nothing else does.
    """
    from quern.errors import QuernError
    from quern.train.checkpoint import background
    from quern.train.checkpoint.manager import CheckpointManager
    from quern.train.config import CheckpointConfig

    if writer:
        background._COMMAND = [sys.executable, str(HERE), "--writer", str(writer)]
    state = CASE.make(run.parent)
    with CheckpointManager(str(run), CheckpointConfig(keep_last=1, mode=mode)) as checkpoints:
        found = checkpoints.latest_valid()
        first = 0 if found is None else found.step
        for place, step in enumerate((first + 1, first + 1)):
            key = base + place + 1
            CASE.fill(state, key)
            try:
                checkpoints.begin(step, state, CASE.position(step, content=key), checkpoints.keep())
                checkpoints.copied()
                CASE.fill(state, key + 100_000)  # training goes on
                outcome = checkpoints.finish()
                if outcome.error is not None:
                    raise outcome.error
            except QuernError as error:
                assert writer, error
                assert "the checkpoint writer" in str(error), error
                background._COMMAND = [sys.executable, "-m", "quern.train.checkpoint.writer"]
                os.write(told, b"failed\n")
            else:
                os.write(told, f"{step} {key}\n".encode())


def serve() -> None:
    """Reads lines ``run base place mode writer``, and forks a life for each, after one of its own: torch imports much of itself on
    first use, and so does it once."""
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere:
        live(Path(scratch) / "run", 0, nowhere.fileno(), "thread")
    for line in sys.stdin:
        run, base, place, mode, writer = line.split()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                if int(place):
                    strike_at(int(place))
                live(Path(run), int(base), 1, mode, int(writer))
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        print(f"pid {child}", flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"end {status}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--writer"]:
        from quern.train.checkpoint.writer import main

        strike_at(int(sys.argv[2]))
        main(int(sys.argv[3]))
    serve()
    sys.exit()


class Victims:
    """Lives one after the other in one run directory; remembers what they were told is saved."""

    def __init__(self, folder: Path, mode: str = "sync") -> None:
        self.run, self.mode = folder / "run", mode
        self.failed = 0  # saves whose writer was killed
        self.base = 0
        self.saved: tuple[int, int] | None = None  # (step, key) of the last save that returned
        self.process = subprocess.Popen(
            [sys.executable, str(HERE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def life(self, place: int = 0, kill_after_s: float | None = None, writer: int = 0) -> int:
        """The exit status of a life; negative when it was killed."""
        self.base += 10
        self.process.stdin.write(f"{self.run} {self.base} {place} {self.mode} {writer}\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline().split()[1])
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        while True:
            words = self.process.stdout.readline().split()
            if words[0] == "end":
                return int(words[1])
            if words[0] == "failed":
                self.failed += 1
            else:
                self.saved = (int(words[0]), int(words[1]))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def check(victims: Victims) -> None:
    from quern.train.checkpoint.manager import CheckpointManager
    from quern.train.checkpoint.manifest import list_checkpoints, read_manifest
    from quern.train.checkpoint.reader import verify
    from quern.train.config import CheckpointConfig

    for checkpoint in list_checkpoints(str(victims.run)):
        assert verify(checkpoint.path) == []
    if not (victims.run / "checkpoints").exists():
        assert victims.saved is None
        return
    keys = {}
    with CheckpointManager(str(victims.run), CheckpointConfig()) as checkpoints:
        newest = checkpoints.latest_valid()
        assert checkpoints.rejected == []
        for checkpoint in list_checkpoints(str(victims.run)):
            manifest = read_manifest(checkpoint.path)
            state = CASE.make(victims.run.parent)
            checkpoints.load(checkpoint.path, state)
            keys[checkpoint.step] = manifest.scalars["content"]
            assert CASE.differences(state, manifest.scalars["content"]) == []
        if victims.saved is None:
            assert newest is None or keys
            return
        step, key = victims.saved
        assert newest is not None
        # What was told stands, unless a later save of the same step replaced it whole, or pruning after a later save
        # removed it: then a newer key is there.
        assert keys.get(step) == key or max(keys.values()) > key
        names = set(os.listdir(victims.run / "checkpoints"))
        assert names == {".lock"} | {checkpoint.name for checkpoint in list_checkpoints(str(victims.run))}


@pytest.fixture(params=["sync", "thread", pytest.param("process", marks=pytest.mark.long)])
def victims(request, tmp_path):
    victims = Victims(tmp_path, request.param)
    yield victims
    victims.close()


@pytest.mark.slow
def test_killed_at_every_operation(victims):
    """Operations of a life: writes (torn in the middle), syncs, renames, removals; each is not reached once."""
    assert victims.life() == 0
    place = kills = 0
    while True:
        place += 1
        status = victims.life(place)
        assert status in (0, -signal.SIGKILL), status
        check(victims)
        if status == 0:
            break
        kills += 1
    assert kills >= (40 if victims.mode != "process" else 5)  # the writer does most of the work
    assert victims.life() == 0  # and a life without a kill goes on from there
    check(victims)


@pytest.mark.long
@pytest.mark.parametrize("victims", ["process"], indirect=True)
def test_a_writer_killed_at_every_operation(victims):
    """Its trainer lives: the save fails, the next one has another writer, and nothing older is harmed."""
    assert victims.life() == 0
    place = 0
    while True:
        place += 1
        before = victims.failed
        assert victims.life(writer=place) == 0
        check(victims)
        if victims.failed == before:
            break
    assert place >= 30


@pytest.mark.slow
def test_killed_at_random_moments(victims):
    moments = random.Random(20)
    assert victims.life() == 0  # started, and warm
    start = time.monotonic()
    assert victims.life() == 0
    whole = time.monotonic() - start
    killed = 0
    for _ in range(12):
        status = victims.life(kill_after_s=moments.uniform(0, whole))
        assert status in (0, -signal.SIGKILL), status
        killed += status != 0
        check(victims)
    assert killed >= 4
