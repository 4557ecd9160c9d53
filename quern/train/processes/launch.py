"""Starts ranks on this machine with torchrun's environment, and watches them until all have exited.

Imports no torch."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

__all__ = [
    "GPU", "GRACE_S", "LOOPBACK", "PIPE", "Worker", "end", "end_with_launcher", "ending_signals", "environments",
    "free_port", "handed_on", "kill", "launched", "leave_lost_terminal", "leaving", "listening", "send", "started",
    "wait",
]  # fmt: skip

GRACE_S = 10.0
"""After one process has failed, the others have this long to notice before they are killed."""

LOOPBACK = "127.0.0.1"
"""Where ranks on one machine meet."""

Worker = subprocess.Popen[bytes]

PIPE = "QUERN_LAUNCHER_PIPE"
"""In a worker's environment: the descriptor of a pipe whose other end only its launcher holds."""

GPU = "QUERN_GPU"
"""In a worker's environment: which of the GPUs that it sees is its own, where ``LOCAL_RANK`` does not say so."""


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a run to end: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


def leave_lost_terminal() -> None:
    """Redirect output to /dev/null if the terminal or pipe is closed, since each write would fail."""
    streams = select.poll()
    for descriptor in (1, 2):
        streams.register(descriptor, 0)
    for descriptor, event in streams.poll(0):
        if event & (select.POLLERR | select.POLLHUP):
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)


def launched() -> bool:
    """Whether this process is a worker that :func:`started` has started."""
    return PIPE in os.environ


def handed_on() -> list[int]:
    """Popen's ``pass_fds`` for a program that calls :func:`end_with_launcher` in place of this process."""
    return [int(os.environ[PIPE])] if PIPE in os.environ else []


def end_with_launcher() -> None:
    """Kill this process and its process group (SIGKILL) when its launcher, ours or torchrun, ends.

    Without a launcher nothing happens. What a rank has started in sessions of their own, writers and servers of
    checkpoints, ends with the rank's end of their input.
    """
    pipe, parent = os.environ.get(PIPE), os.getppid()
    if pipe is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    def watch() -> None:
        if pipe is None:
            while os.getppid() == parent:
                time.sleep(1.0)
        else:
            os.read(int(pipe), 1)  # never written to: returns when the launcher's end is closed
        os.kill(0 if os.getpgrp() == os.getpid() else os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with launcher", daemon=True).start()


def free_port() -> int:
    """A port of this machine that is free at this moment."""
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def environments(nproc: int, places: Sequence[int] = (), spares: Sequence[int] | None = None) -> list[dict[str, str]]:
    """This process's environment with a rank's place among ``nproc`` on this machine, for each of them. ``places``:
    by rank those of ``nproc`` that are in use, where some are not, and with them their GPUs. ``spares``: places whose
    GPUs are seen too; then follow the environments of processes that wait there, which are no ranks."""
    left = [*(places or range(nproc))]
    seen = sorted({*left, *(spares or ())})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(nproc))))
    gpus = [gpu for place, gpu in enumerate(visible.split(",")) if place in seen]
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if len(seen) < nproc or spares is not None else {}
    world = len(left)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // world))
    shared = {**os.environ, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world),
              "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": threads, **chosen}  # fmt: skip
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    if spares is None:
        return ranks
    all_of_them = zip([*ranks, *(shared for _ in spares)], [*left, *spares], strict=True)
    return [{**own, GPU: str(seen.index(place))} for own, place in all_of_them]


@contextmanager
def started(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    on_signal: Callable[[Sequence[Worker], int], None],
    options: Sequence[Mapping[str, Any]] = (),
    waiting: Callable[[int, Mapping[str, str]], Worker | None] = lambda rank, environment: None,
) -> Iterator[list[Worker]]:
    """``command`` once for every environment, each in a session of its own: Ctrl-C at the terminal reaches a worker
    once, through us. Whatever happens in the block, no process is left over after it; if this process is killed, those
    end that have called :func:`end_with_launcher`.

    ``on_signal``: what is done with one of :func:`ending_signals` to this process; a SIGUSR1 goes on to the workers.
    ``options``: Popen's, by rank. ``waiting``: gives a process that is there already, and has the environment.
    """
    workers: list[Worker] = []
    pipe, ours = os.pipe()
    try:
        with listening(lambda number: on_signal(workers, number), lambda: send(workers, signal.SIGUSR1)):
            for number, environment in enumerate(environments):
                how = dict(options[number]) if options else {}
                how |= {"env": {**environment, PIPE: str(pipe)}, "start_new_session": True, "pass_fds": [pipe]}
                workers.append(waiting(number, environment) or subprocess.Popen([*command], **how))
            yield workers
    finally:
        kill(workers)
        os.close(pipe)
        os.close(ours)


@contextmanager
def listening(on_end: Callable[[int], None], on_request: Callable[[], object] | None) -> Iterator[None]:
    """Within the block, one of :func:`ending_signals` calls ``on_end`` with its number, SIGUSR1 ``on_request``, which
    None leaves as it is. In another thread than the main one nothing is heard."""

    def heard(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_lost_terminal()
        on_end(number)

    handlers: dict[int, Callable[[int, FrameType | None], object]] = dict.fromkeys(ending_signals(), heard)
    if on_request is not None:
        handlers[signal.SIGUSR1] = lambda number, frame: on_request()
    with _handled(handlers):
        yield


@contextmanager
def leaving() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the block, so that its temporary files are removed."""

    def heard(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with _handled({number: heard for number in ending_signals() if number != signal.SIGINT}):
        yield


@contextmanager
def _handled(handlers: Mapping[int, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    """Handle signals within the block, if it is the main thread's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait(workers: Sequence[Worker], has_failed: Callable[[bool], bool] = bool) -> int | None:
    """Wait until all have exited, or :data:`GRACE_S` after one has failed. Returns the first exit code that is not 0,
    else 0; None where none here has failed and some still run. Of those seen at once a death by signal, negative, comes
    first: it is what the others failed of.

    ``has_failed``: given whether one here has failed, whether one has anywhere; for ranks on several machines.
    """
    failed: int | None = None
    since: float | None = None
    while any(worker.poll() is None for worker in workers):
        failed = failed or min((code for worker in workers if (code := worker.poll())), default=None)
        if since is None and has_failed(failed is not None):
            since = time.monotonic()
        if since is not None and time.monotonic() - since > GRACE_S:
            return failed
        time.sleep(0.1)
    return failed or min((worker.returncode for worker in workers if worker.returncode), default=0)


def how_ended(code: int) -> str:
    """``ended with code 1``, or by which signal."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def end(workers: Sequence[Worker], number: int, within_s: float) -> None:
    """Send a signal to all that still run, and wait until they have ended, so long at most."""
    send(workers, number)
    until = time.monotonic() + within_s
    while any(worker.poll() is None for worker in workers) and time.monotonic() < until:
        time.sleep(0.05)


def kill(workers: Sequence[Worker]) -> None:
    """Kill those that still run, with what they have started: compilers, for example."""
    for worker in workers:
        if worker.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def send(workers: Sequence[Worker], number: int) -> None:
    """Send a signal to all that still run."""
    for worker in workers:
        if worker.poll() is None:
            with suppress(ProcessLookupError):
                worker.send_signal(number)
