"""Starts a process for each tracker and says what becomes of it; the training loop does nothing for them."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

from quern import storage
from quern.closes import Closes
from quern.errors import InputError
from quern.safe_path import module
from quern.train.config import MetricsConfig
from quern.train.history.metrics_file import METRICS_FILE
from quern.train.processes.spawn import Child
from quern.train.trackers.branches import FOLDER
from quern.words import counted

__all__ = ["Trackers", "check_installed"]

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_HURRY_S = 5.0
"""The longest wait where a signal ends the run."""


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker whose library is not here.

    Raises:
        InputError: with the command that installs it.
    """
    for name in names:
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no library
            raise InputError(
                f"metrics.trackers: {name} is not installed; expected it after pip install 'quern[{name}]'"
            )


class _Tracker(threading.Thread):
    """Reads what a process answers until it ends, and says once if it fails, ends of itself, or sends nothing for so
    long. ``ends``: it has been told to."""

    def __init__(self, name: str, child: Child, metrics: str, timeout_s: float) -> None:
        super().__init__(daemon=True)
        self.tracker, self.child, self.ends = name, child, False
        self._metrics, self._timeout_s, self._done, self._told = metrics, timeout_s, 0, False
        self.start()

    def run(self) -> None:
        since = time.monotonic()
        line: str | None = ""
        while line is not None:
            with suppress(ValueError):  # half a line of a process that was killed
                answer = json.loads(line or "{}")
                if "failed" in answer:
                    self._say(answer["failed"])
                if answer.get("bytes", 0) > self._done:
                    self._done, since, self._told = answer["bytes"], time.monotonic(), False
            if self.ends or not os.path.exists(self._metrics) or os.path.getsize(self._metrics) <= self._done:
                since = time.monotonic()
            elif (waits := time.monotonic() - since) > self._timeout_s:
                self._say(f"has taken nothing for {waits:.0f} s")
            try:
                line = self.child.receive(_LOOK_S)
            except queue.Empty:
                line = ""
        if not self.ends:
            self._say(f"its process has ended ({self.child.status()})")

    def _say(self, what: str) -> None:
        if not self._told:
            self._told = True
            plain = "".join(char if char.isprintable() else " " for char in what)[:300]
            log.warning("%s: %s; the run goes on, and what is not sent stays in metrics.jsonl", self.tracker, plain)

    def end(self, timeout_s: float) -> None:
        """Wait for its end, and say what is not sent."""
        self.child.end(timeout_s, 1.0)
        self.join(2.0)
        with open(self._metrics, "rb") as file:
            file.seek(self._done)
            left = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        if left:
            lines = f"{counted(left, 'line')} of metrics {'was' if left == 1 else 'were'}"
            log.warning("%s: %s not sent; the next start of the run sends what is left", self.tracker, lines)
        elif self.child.status():
            log.warning("%s: has everything, but its run was not ended", self.tracker)


class Trackers(Closes):
    """The processes of a run's trackers; on rank 0 only. What fails or hangs is said once, as a warning, and ends no
    run."""

    def __init__(self, run_dir: str, config: MetricsConfig) -> None:
        self._timeout_s = config.trackers_timeout_s
        found = [self._start(run_dir, name) for name in config.sent_to]
        self._trackers = [own for own in found if own is not None]

    def _start(self, run_dir: str, name: str) -> _Tracker | None:
        folder, metrics = os.path.join(run_dir, FOLDER), os.path.join(run_dir, METRICS_FILE)
        command = module("quern.train.trackers.worker", run_dir, name, str(self._timeout_s))
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f"{name}.log"), "ab", opener=storage.open_own) as out:
                return _Tracker(name, Child(command, stderr=out), metrics, self._timeout_s)
        except OSError as error:
            log.warning("%s: cannot be started (%s); the run goes on without it", name, error.strerror or error)
            return None

    def finish(self, how: str) -> None:
        """Let each send what is left, in the time that ``metrics.trackers_timeout_s`` gives, and say what it did not.

        ``how``: ``finished``, or ``stopped`` by a signal, for which there is less time; ``failed`` waits for nothing,
        as a rank that failed has none: the processes end by themselves."""
        ending, self._trackers = self._trackers, []
        for own in ending:
            own.ends = True
            own.child.send(how, last=True)
        if how == "failed":
            return
        until = time.monotonic() + (self._timeout_s if how == "finished" else min(self._timeout_s, _HURRY_S))
        for own in ending:
            with suppress(OSError):  # of a file system that has gone
                own.end(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """As after a failure, unless :meth:`finish` came before."""
        self.finish("failed")
