"""A trainer, or the process that writes for it, killed (SIGKILL) at every operation of a save, a replacement, a removal
and a recovery, and at random moments.

After each kill: whatever bears a checkpoint's name is whole, nothing that the trainer was told is saved is lost, and
the next start takes the newest one and finds in it, bit for bit, what belongs to its step.

Operations have names that say what is done to which kind of file, and the how many-th time. A life is killed before the
operation of one name. Of what is done alike to several files of a folder, one kill is enough (:func:`repeated`). What
a killed process has written stays, synced or not: so a sync is a place to be killed at, and nothing else.

Lives are forks of one process that has torch already, and so are the writers: the command that starts one is a small
program that hands its standard streams and the snapshots' memory to a process which forks. ``test_saving.py`` kills
writers that are started as a run starts them.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest

from support.processes import environment
from support.programs import python
from support.train import checkpoint_case as CASE

HERE = Path(__file__)

#: ``SOCKET STRIKE LOG DESCRIPTOR``: have a writer forked there, and end as it does.
LAUNCH = r"""
import array, os, signal, socket, sys
path, strike, log, memory = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(path)
    streams = array.array("i", [0, 1, int(memory)])
    server.sendmsg([f"{strike}\n{log}".encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    for descriptor in streams:
        os.close(descriptor)
    code = int(server.recv(100) or 1)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def kind(path: str) -> str:
    """Of a file or folder: what it is in any run, of any step, under any random name."""
    name = os.path.basename(path)
    folder = re.fullmatch(r"\.?step_\d+(?:\.[0-9a-f]{32}\.(tmp|replaced))?", name)
    if folder:
        return f"({folder[1] or 'step'})"
    name = re.sub(r"\A\.(.+)\.[0-9a-f]{32}\.tmp\Z", r"(new)\1", name)
    return "(tensors)" if name.endswith(".distcp") else name


def repeated(name: str) -> bool:
    """Whether an operation is done alike, by the same lines, to another file of the same folder: ``.metadata`` stands
    for the small files; a folder is removed from where it is whole, where one file is gone, and where none is left."""
    operation, what, count = name.split()
    return what in ("config.yaml", "encoding.tiktoken") or (operation == "unlink" and int(count) > 2)


def publishes(name: str) -> bool:
    """Whether it is in the window from the manifest to the name that is durable, or moves a folder aside."""
    operation, what, _ = name.split()
    return (
        what == "manifest.json" or operation == "rename" or (operation == "fsync" and what in ("(tmp)", "checkpoints"))
    )


def strike_at(strike: str, log: str = "") -> None:
    """Kill this process before the operation on the file system that has the name ``strike``; every name goes into the
    file ``log``. A name is an operation, what it is done to, and the how many-th time."""
    import builtins
    import io

    counts: Counter[str] = Counter()
    names = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if log else None

    def reached(operation: str, what: str) -> None:
        counts[f"{operation} {what}"] += 1
        name = f"{operation} {what} {counts[f'{operation} {what}']}"
        if names is not None:
            os.write(names, f"{name}\n".encode())
        if name == strike:
            os.kill(os.getpid(), signal.SIGKILL)

    def struck(operation: str, what):
        function = getattr(os, operation)

        def call(*arguments, **options):
            reached(operation, what(*arguments))
            return None if operation == "fsync" else function(*arguments, **options)

        setattr(os, operation, call)

    struck("mkdir", lambda path, *mode: kind(path))
    struck("rmdir", kind)
    struck("rename", lambda old, new: f"{kind(old)}>{kind(new)}")
    struck("replace", lambda old, new: f"{kind(old)}>{kind(new)}")
    struck("fsync", lambda descriptor: kind(os.readlink(f"/proc/self/fd/{descriptor}")))
    struck("unlink", lambda path: f"of-removal-{1 + counts['rmdir (tmp)']}")
    opens = builtins.open

    def opened(file, mode="r", *arguments, **options):
        if "w" in mode:
            reached("open", kind(file))
        stream = opens(file, mode, *arguments, **options)
        return Torn(stream) if mode == "wb" and isinstance(stream, io.BufferedWriter) else stream

    class Torn:
        """Some of a file's writes are two, so that a kill between them leaves a torn file."""

        def __init__(self, stream) -> None:
            self.stream, self.writes = stream, 0

        def write(self, data):
            self.writes += 1
            if self.writes not in (1, 100):  # a tensor is many writes: the first, and one amid
                return self.stream.write(data)
            view = memoryview(data).cast("B")
            self.stream.write(view[: len(view) // 2])
            self.stream.flush()
            reached("tear", kind(self.stream.name))
            self.stream.write(view[len(view) // 2 :])
            return len(view)

        def __getattr__(self, name):
            return getattr(self.stream, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.stream.close()

    builtins.open = opened


def live(run: Path, base: int, told: int, mode: str = "sync", command: list[str] | None = None) -> None:
    """A trainer's life: go on from the newest checkpoint, save, prune, save the same step anew (of another branch).

    The content of a checkpoint is keyed by the scalar ``content`` of its manifest. ``told``: descriptor on which every
    key whose save has returned is told. ``command``: that of a writer that will be killed, with ``-`` after; the save
    in work then fails, and nothing else does.
    """
    from quern.errors import QuernError
    from quern.train.checkpoint.save import background
    from quern.train.config import CheckpointConfig
    from support.train.saves import CheckpointManager

    doomed = command is not None and command[-2] != "-"
    if command is not None:
        background._COMMAND = command
    state = CASE.make(run.parent)
    with CheckpointManager(str(run), CheckpointConfig(keep_last=1, mode=mode)) as checkpoints:
        found = checkpoints.latest_valid()
        first = 0 if found is None else found.step
        for place, step in enumerate((first + 1, first + 1)):
            key = base + place + 1
            CASE.fill(state, key)
            try:
                checkpoints.async_save.begin(step, state, CASE.position(step, content=key), checkpoints.keep())
                checkpoints.async_save.wait_staged()
                CASE.fill(state, key + 100_000)  # training goes on
                outcome = checkpoints.async_save.finish()
                if outcome.error is not None:
                    raise outcome.error
            except QuernError as error:
                if not doomed or "the checkpoint writer" not in str(error):
                    raise
                background._COMMAND[-2] = "-"  # the next one lives
                os.write(told, b"failed\n")
            else:
                os.write(told, f"{step} {key}\n".encode())


def serve() -> None:
    """Reads lines ``run base mode who strike log``, and forks a life for each, after one of its own: torch imports much
    of itself on first use, and so does it once. ``who``: ``trainer`` or ``writer`` is killed."""
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere:
        live(Path(scratch) / "run", 0, nowhere.fileno(), "thread")
        writers = str(Path(scratch) / "writers")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(writers)
            listener.listen()
            forks = os.fork()
            if forks == 0:
                sys.stdin.close()
                serve_writers(listener)
        for line in sys.stdin:
            run, base, mode, who, strike, log = line.rstrip("\n").split("\t")
            child = os.fork()
            if child == 0:
                signal.alarm(600)
                try:
                    struck = (strike, log) if who == "writer" else ("-", "-")
                    command = [sys.executable, "-I", "-S", "-c", LAUNCH, writers, *struck]
                    if who == "trainer":
                        strike_at(strike, log)
                    live(Path(run), int(base), 1, mode, command if mode == "process" else None)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    os._exit(3)
                os._exit(0)
            print(f"pid {child}", flush=True)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(f"end {status}", flush=True)
        os.kill(forks, signal.SIGKILL)


def serve_writers(listener: socket.socket) -> None:
    """Forks a writer for each connection (:data:`LAUNCH`), and says there how it ended; as long as its parent lives."""
    import quern.train.checkpoint.save.writer  # noqa: F401  (once for all)

    os.dup2(2, 1)
    parent = os.getppid()
    listener.settimeout(1.0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            try:
                listener.close()
                serve_writer(connection)
            finally:
                os._exit(1)
        connection.close()
    os._exit(0)


def serve_writer(connection: socket.socket) -> NoReturn:
    from quern.train.checkpoint.save.writer import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(connection, 10_000, 3)
    writer = os.fork()
    if writer == 0:
        connection.close()
        for number in (0, 1):
            os.dup2(streams[number], number)
            os.close(streams[number])
        sys.stdin = open(0)  # noqa: SIM115
        strike, log = request.decode().split("\n")
        if strike != "-":
            strike_at(strike, log)
        main(streams[2])
    for descriptor in streams:
        os.close(descriptor)
    connection.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]))
    os._exit(0)


if __name__ == "__main__":
    serve()
    sys.exit()


@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(
        [python(), str(HERE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    yield process
    process.stdin.close()
    process.wait(240)
    process.stdout.close()


class Victims:
    """Lives one after the other in one run directory; remembers what they were told is saved."""

    def __init__(self, server: subprocess.Popen[str], folder: Path, mode: str) -> None:
        self.server, self.run, self.mode = server, folder / "run", mode
        self.failed = 0  # saves whose writer was killed
        self.base = 0
        self.saved: tuple[int, int] | None = None  # (step, key) of the last save that returned

    def life(self, who: str = "trainer", strike: str = "none", log: str = "", kill_after_s: float | None = None) -> int:
        """The exit status of a life; negative when it was killed."""
        self.base += 10
        line = "\t".join([str(self.run), str(self.base), self.mode, who, strike, log])
        self.server.stdin.write(f"{line}\n")
        self.server.stdin.flush()
        pid = int(self.server.stdout.readline().split()[1])
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        while True:
            words = self.server.stdout.readline().split()
            if words[0] == "end":
                return int(words[1])
            if words[0] == "failed":
                self.failed += 1
            else:
                self.saved = (int(words[0]), int(words[1]))

    def operations(self, who: str = "trainer") -> list[str]:
        """The names of all operations of a life that goes on from a checkpoint."""
        log = self.run.parent / "operations"
        assert self.life() == 0
        assert self.life(who, log=str(log)) == 0
        return log.read_text().splitlines()


def check(victims: Victims) -> None:
    from quern.train.checkpoint.format.manifest import list_checkpoints, read_manifest
    from quern.train.checkpoint.tools.reader import verify
    from quern.train.config import CheckpointConfig
    from support.train.saves import CheckpointManager

    for checkpoint in list_checkpoints(str(victims.run)):
        assert verify(checkpoint.path) == []
    if not (victims.run / "checkpoints").exists():
        assert victims.saved is None
        return
    keys = {}
    with CheckpointManager(str(victims.run), CheckpointConfig(keep_last=1)) as checkpoints:
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
        checkpoints.prune()  # so that every life has the same to do
        assert [checkpoint.path for checkpoint in list_checkpoints(str(victims.run))] == [newest.path]


@pytest.fixture(params=["sync", "thread", "process"])
def victims(request, server, tmp_path):
    return Victims(server, tmp_path, request.param)


def kill_at_each(victims: Victims, who: str, names: list[str]) -> None:
    for name in names:
        before = victims.failed
        status = victims.life(who, name)
        assert (status, victims.failed - before) == ((-signal.SIGKILL, 0) if who == "trainer" else (0, 1)), name
        check(victims)
    assert victims.life() == 0  # and a life without a kill goes on from there
    check(victims)


@pytest.mark.long
def test_killed_at_every_operation(victims):
    """The trainer: writes (torn in the middle), syncs, renames, removals."""
    names = [name for name in victims.operations() if not repeated(name)]
    assert len(names) >= (40 if victims.mode != "process" else 6)  # the writer does most of the work
    kill_at_each(victims, "trainer", names)


@pytest.mark.long
@pytest.mark.parametrize("victims", ["process"], indirect=True)
def test_a_writer_killed_at_every_operation(victims):
    """Its trainer lives: the save fails, the next one has another writer, and nothing older is harmed."""
    names = [name for name in victims.operations("writer") if not repeated(name)]
    assert len(names) >= 35
    kill_at_each(victims, "writer", names)


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["sync", pytest.param("process", marks=pytest.mark.long)], indirect=True)
def test_killed_while_it_publishes(victims):
    """Of the process that does it, by whatever thread: from the manifest's first byte to the last of the renames; the
    renames alone where a process of its own does the same."""
    who = "writer" if victims.mode == "process" else "trainer"
    names = [name for name in victims.operations(who) if publishes(name)]
    renames = [name for name in names if name.startswith("rename")]
    assert len(renames) == 5
    names = renames if victims.mode == "process" else names
    kill_at_each(victims, who, names)


@pytest.mark.long
@pytest.mark.parametrize("victims", ["sync"], indirect=True)
@pytest.mark.parametrize(
    "left",
    ["rename (tmp)>(step) 1", pytest.param("rename (tmp)>(step) 2", marks=pytest.mark.exhaustive),
     "rename (replaced)>(tmp) 1", pytest.param("unlink of-removal-2 2", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_killed_at_every_operation_of_a_recovery(victims, left):
    """Of what a kill before ``left`` leaves: a folder to remove, one to put back, one that was replaced, half a one."""
    log = victims.run.parent / "operations"
    assert victims.life() == 0
    assert victims.life(strike=left) == -signal.SIGKILL
    assert victims.life(log=str(log)) == 0
    names = log.read_text().splitlines()
    recovery = [name for name in names[1 : names.index("mkdir (tmp) 1")] if not repeated(name)]
    assert len(recovery) >= 3
    for name in recovery:
        assert victims.life(strike=left) == -signal.SIGKILL
        assert victims.life(strike=name) == -signal.SIGKILL, name
        check(victims)


@pytest.mark.long
def test_killed_at_random_moments(victims):
    moments = random.Random(20)
    assert victims.life() == 0  # started, and warm
    start = time.monotonic()
    assert victims.life() == 0
    whole = time.monotonic() - start
    killed = 0
    for _ in range(40):
        moment = moments.uniform(0, whole)
        status = victims.life(kill_after_s=moment)
        assert status in (0, -signal.SIGKILL), status
        killed += status != 0
        whole = whole if status else moment  # the machine is faster by now than it was
        check(victims)
        if killed == 6:
            break
    assert killed == 6
