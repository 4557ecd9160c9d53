"""Starts ranks as fresh processes on this machine, in 0.1 s, for self-tests and tests.

They are forked from a server that has imported torch once (``multiprocessing``'s forkserver), because importing torch
anew in every rank is all that a start by torchrun costs. They meet through a file, not a port, so that several sets of
ranks beside each other never collide. Whatever happens, no process is left over.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib.util
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from quern.closes import Closes

__all__ = ["LocalRanks", "RankError"]

PRELOAD = (
    "numpy", "torch", "torch._dynamo", "torch.distributed", "torch.distributed.algorithms",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor", "torch.nn.parallel", "torch.utils.checkpoint",
)  # fmt: skip
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
GRACE_S = 3.0
"""How long the other ranks may go on after one has failed, so that their tracebacks are in the report too."""


class RankError(Exception):
    """At least one rank failed, died or timed out; the message has the last output of each.

    ``failed``: what went wrong, by rank, the first to fail first. ``results``: what the other ranks returned.
    """

    def __init__(self, failed: dict[int, str], results: dict[int, Any], world: int) -> None:
        first = next(iter(failed))
        report = "\n".join(f"----- rank {rank} of {world}:\n{text.rstrip()}" for rank, text in failed.items())
        super().__init__(f"rank {first} failed first; failed: {sorted(failed)} of {world} ranks\n{report}")
        self.failed, self.results = failed, results


@dataclass(frozen=True)
class _Job:
    """What a rank is told at its start."""

    rank: int
    world: int
    backend: str | None
    timeout_s: float
    folder: Path
    environment: Mapping[str, str]
    files: Mapping[str, str]

    @property
    def output(self) -> Path:
        return self.folder / f"output-{self.rank}.txt"

    @property
    def stack(self) -> Path:
        return self.folder / f"stack-{self.rank}.txt"


class LocalRanks(Closes):
    """``world`` processes that compute one call after the other. Use as a context manager: leaving it ends them all.

    ``backend``: of their process group; None = they have none and do not know of each other. ``timeout_s``: of one
    call; collectives time out after three quarters of it. ``files``: modules that are on no import path, by name; each
    rank loads those that it has not imported. ``preload``: what the server imports besides torch and the parts of this
    package that are in use, when this process starts it.

    Ranks see this process's environment as it is now, with torchrun's variables.
    """

    def __init__(
        self,
        world: int,
        *,
        backend: str | None = "gloo",
        timeout_s: float = 60.0,
        files: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self.world, self.timeout_s = world, timeout_s
        self.output = [""] * world
        """What each rank printed in the last call."""
        self._printed = [0] * world
        self._processes: list[Any] = []
        self._channels: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        _start_server(preload)
        try:
            self._jobs = [
                _Job(rank, world, backend, timeout_s, Path(self._folder.name), dict(os.environ), dict(files or {}))
                for rank in range(world)
            ]
            for job in self._jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(job, theirs))
                self._channels.append(ours)
                process.start()
                theirs.close()
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank; what they return, by rank.

        The function stands at the top level of a module, ``args`` and results are picklable, results without DTensors.

        Raises:
            RankError: a rank failed, died, or had not finished after ``timeout_s``; these ranks are of no more use.
            TypeError: the function cannot be found by its name.
        """
        if "<" in function.__qualname__ or getattr(function, "__closure__", None):
            raise TypeError(f"{function.__qualname__}: expected a function at the top level of its file")
        told = pickle.dumps((function, args))
        for channel in self._channels:
            with contextlib.suppress(OSError):  # one that has died says so when it is listened to
                channel.send_bytes(told)
        results, failed = self._collect()
        for job in self._jobs:
            text = _read(job.output)
            self.output[job.rank], self._printed[job.rank] = text[self._printed[job.rank] :], len(text)
            if job.rank in failed and self.output[job.rank]:
                failed[job.rank] += f"\n----- rank {job.rank} printed:\n{self.output[job.rank]}"
        if failed:
            raise RankError(failed, results, self.world)
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End every rank: those that wait for a call leave together, others are killed."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send_bytes(b"")
            channel.close()
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        self._channels, self._processes = [], []
        self._folder.cleanup()

    def _collect(self) -> tuple[dict[int, Any], dict[int, str]]:
        """What every rank returned, and how the others ended, in the order in which they failed."""
        results: dict[int, Any] = {}
        said: dict[int, tuple[float, str]] = {}
        """When and how a rank failed."""
        waiting: dict[Any, int] = {channel: rank for rank, channel in enumerate(self._channels)}
        deadline = time.monotonic() + self.timeout_s + 1  # a second for the ranks to write where they stand
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for channel in ready:
                rank = waiting.pop(channel)
                try:
                    succeeded, payload, at = pickle.loads(channel.recv_bytes())  # type: ignore[union-attr]
                    if succeeded:
                        results[rank] = pickle.loads(payload)
                    else:
                        said[rank] = at, payload
                except (EOFError, ConnectionError):
                    process = self._processes[rank]
                    process.join(GRACE_S)
                    how = f"died without a word; exit code {process.exitcode} (negative: the signal)"
                    said[rank] = -math.inf, how  # when is not known; others fail because one has died
            if said:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = {rank: said[rank][1] for rank in sorted(said, key=lambda rank: said[rank][0])}
        for rank in waiting.values():
            self._processes[rank].kill()  # it may hang where it does not notice that the others leave
            stands = _read(self._jobs[rank].stack)
            late = f"did not finish within {self.timeout_s:g} s\n{stands}"
            failed[rank] = late if stands else "killed after another failed"
        return results, failed


def _start_server(preload: Sequence[str]) -> None:
    """The forkserver, once a process; with what of this package the process has imported without a fault."""
    package = __name__.partition(".")[0] + "."
    own = sorted(name for name in sys.modules if name.startswith(package))
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *preload, *own])
    before = {name: os.environ.get(name) for name in SERVER_ENVIRONMENT}
    os.environ.update(SERVER_ENVIRONMENT)  # read when torch and gloo are imported, which is in the server
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# ---- in the rank ----


def _serve(job: _Job, channel: Connection) -> None:
    """One rank's life: join the group, then call and report until told to leave."""
    with job.output.open("wb", buffering=0) as file:
        for descriptor in (1, 2):  # the libraries' output too: an abort in C++ says why only there
            os.dup2(file.fileno(), descriptor)
    faulthandler.enable(all_threads=True)  # a fault in C++ leaves the Python stacks there
    joined = False
    while told := _received(channel):
        signal.alarm(math.ceil(job.timeout_s + 4 * GRACE_S))  # whatever becomes of the parent, this process ends
        with _stack_at(job):
            try:
                if not joined:
                    _join(job)
                    joined = True
                function, args = pickle.loads(told)
                succeeded, payload, at = True, pickle.dumps(function(*args)), 0.0
            except BaseException:
                at = time.monotonic()  # the machine's clock: times of several ranks can be compared
                succeeded, payload = False, traceback.format_exc()  # type: ignore[assignment]
        sys.stdout.flush()
        sys.stderr.flush()
        signal.alarm(0)
        with contextlib.suppress(OSError):
            channel.send_bytes(pickle.dumps((succeeded, payload, at)))
        if not succeeded:
            return  # the sockets close: peers in a collective fail at once, with their own tracebacks
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _received(channel: Connection) -> bytes:
    """Nothing where the parent says that it is over, and where there is no parent any more."""
    try:
        return channel.recv_bytes()
    except (EOFError, OSError):
        return b""


def _join(job: _Job) -> None:
    import torch
    import torch.distributed as dist

    os.environ.clear()  # the server's environment is that of its start
    os.environ.update(job.environment)
    os.environ.update(SERVER_ENVIRONMENT)
    torch.set_num_threads(1)
    for name, file in job.files.items():
        _load(name, file)
    rank, world = str(job.rank), str(job.world)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    if job.backend is None:
        for name in place:
            os.environ.pop(name, None)
        return
    os.environ.update(place)
    dist.init_process_group(
        job.backend, store=dist.FileStore(str(job.folder / "store"), job.world), rank=job.rank, world_size=job.world,
        timeout=datetime.timedelta(seconds=0.75 * job.timeout_s),
    )  # fmt: skip


def _load(name: str, file: str) -> None:
    """The module under its own name, so that pickles agree; the packages above it stand empty."""
    if name in sys.modules:
        return
    for end, letter in enumerate(name):
        if letter == ".":
            sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


@contextlib.contextmanager
def _stack_at(job: _Job) -> Iterator[None]:
    """Where this process stands is written down when its time is over: by a thread that has the interpreter to itself,
    since faulthandler's own reads the frames of running threads as they change, which can end the process (CPython
    issue 140815). That one comes after, for a process that never lets the interpreter go, whose frames stand still.
    """
    with job.stack.open("w") as file:

        def write() -> None:
            with contextlib.suppress(ValueError):  # the call is over: the file is closed
                faulthandler.cancel_dump_traceback_later()
                faulthandler.dump_traceback(file)

        clock = threading.Timer(job.timeout_s, write)
        clock.daemon = True
        faulthandler.dump_traceback_later(job.timeout_s + 0.5, file=file)
        clock.start()
        yield
        clock.cancel()
        clock.join()
        faulthandler.cancel_dump_traceback_later()
