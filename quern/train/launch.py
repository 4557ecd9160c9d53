"""Ranks on this machine as a launcher starts them: processes with torchrun's environment, watched until all have left.

Imports no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

__all__ = ["GRACE_S", "Worker", "environments", "free_port", "leaving", "send", "started", "wait"]

GRACE_S = 20.0
"""After one process has failed, the others have this long to notice before they are killed."""

Worker = subprocess.Popen[bytes]


def free_port() -> int:
    """Of this machine, at this moment."""
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def environments(nproc: int) -> list[dict[str, str]]:
    """This process's environment with a rank's place among ``nproc`` on this machine, for each of them."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // nproc))
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(nproc),
              "LOCAL_WORLD_SIZE": str(nproc), "OMP_NUM_THREADS": threads}  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)]


@contextmanager
def started(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    on_signal: Callable[[Sequence[Worker], int], None],
    options: Sequence[Mapping[str, Any]] = (),
) -> Iterator[list[Worker]]:
    """``command`` once for every environment, each in a session of its own: Ctrl-C at the terminal reaches a worker
    once, through us. Whatever happens in the block, no process is left over after it.

    ``on_signal``: what is done with a SIGTERM or SIGINT to this process; a SIGUSR1 goes on to the workers.
    ``options``: Popen's, by rank.
    """
    workers: list[Worker] = []

    def heard(number: int, frame: FrameType | None) -> None:
        on_signal(workers, number)

    before: dict[int, Any] = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda number, frame: send(workers, number))
    try:
        for number, environment in enumerate(environments):
            how = options[number] if options else {}
            workers.append(subprocess.Popen([*command], env=dict(environment), start_new_session=True, **how))
        yield workers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for worker in workers:
            if worker.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)  # with what it has started: compilers, for example
            worker.wait()


@contextmanager
def leaving() -> Iterator[None]:
    """A SIGTERM in the block unwinds it, so that what it has made for a while goes with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heard(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait(workers: Sequence[Worker], has_failed: Callable[[bool], bool] = bool) -> int | None:
    """Until all have left, or :data:`GRACE_S` after one has failed. Returns the first exit code that is not 0, else 0;
    None where none here has failed and some still run.

    ``has_failed``: given whether one here has failed, whether one has anywhere; for ranks on several machines.
    """
    failed: int | None = None
    since: float | None = None
    while any(worker.poll() is None for worker in workers):
        failed = failed or next((code for worker in workers if (code := worker.poll())), None)
        if since is None and has_failed(failed is not None):
            since = time.monotonic()
        if since is not None and time.monotonic() - since > GRACE_S:
            return failed
        time.sleep(0.1)
    return failed or next((worker.returncode for worker in workers if worker.returncode), 0)


def send(workers: Sequence[Worker], number: int) -> None:
    """A signal to all that are still there."""
    for worker in workers:
        if worker.poll() is None:
            with suppress(ProcessLookupError):
                worker.send_signal(number)
