"""Writes ``RUN/status.json`` every few seconds: the driver's state, for other processes to read.

It is informational only: the lock decides who drives the run, the commits what is done. A heartbeat that cannot be
written is skipped.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from quern import storage
from quern.errors import QuernError, ended_by
from quern.remote.lease import began, boot

__all__ = ["STATUS_FILE", "Heartbeat", "process_lives", "this_process"]

log = logging.getLogger(__name__)

STATUS_FILE = "status.json"
#: Seconds between two beats; on an object store each is a request.
INTERVAL_S = 5.0
STORE_INTERVAL_S = 30.0
_LOOK_S = 0.5


class Heartbeat:
    """Writes the status of a run while the block runs, and then how the run ended.

    Args:
        run_dir: the run.
        snapshot: what is said, as plain data; called from another thread.
    """

    def __init__(self, run_dir: str, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._path = storage.join(run_dir, STATUS_FILE)
        self._snapshot = snapshot
        self.interval_s = INTERVAL_S if storage.is_local(run_dir) else STORE_INTERVAL_S
        self._about = {**this_process(), "started": time.time(), "interval_s": self.interval_s}
        self._closed = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def __enter__(self) -> Self:
        self._write("at work")
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._closed.set()
        self._thread.join()
        if error is None:
            self._write("complete")
        elif isinstance(error, KeyboardInterrupt):
            self._write(f"ended by {ended_by[0]}" if ended_by else "interrupted")
        else:
            told = str(error) if isinstance(error, QuernError) else f"{type(error).__name__}: {error}"
            self._write("failed", told[:2000])

    def _run(self) -> None:
        written, phase = time.monotonic(), None
        while not self._closed.wait(_LOOK_S):
            now = self._told()
            if time.monotonic() - written >= self.interval_s or now != phase:
                self._write("at work")
                written, phase = time.monotonic(), now

    def _told(self) -> Any:
        with suppress(Exception):
            return (self._snapshot().get("phase") or {}).get("name")
        return None

    def _write(self, state: str, error: str | None = None) -> None:
        try:
            said = {"state": state, "error": error, "driver": {**self._about, "beat": time.time()}, **self._snapshot()}
            storage.write_json(self._path, said)
        except Exception as failure:  # a look from outside is worth no run
            if not self._failed:
                self._failed = True
                log.warning("%s: cannot be written, the run goes on (%s)", self._path, failure)


def this_process() -> dict[str, Any]:
    """Host, pid, and a mark that distinguishes this process from a later one with its pid."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "where": boot() or None, "ticks": _ticks(os.getpid())}


def process_lives(about: dict[str, Any]) -> bool | None:
    """Whether the process described by :func:`this_process` exists; None if this machine cannot tell."""
    if about.get("host") != socket.gethostname() or about.get("where") != (boot() or None):
        return None
    ticks = _ticks(int(about["pid"]))
    return ticks is not None and ticks == about.get("ticks")


def _ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None if it has ended."""
    ticks = began(pid)
    return int(ticks) if ticks else None
