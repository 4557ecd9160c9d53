"""Starts a process for each tracker and says what becomes of it; the training loop does nothing for them."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from quern import storage
from quern.closes import Closes
from quern.errors import InputError
from quern.safe_path import module
from quern.train.config import MetricsConfig
from quern.train.processes.spawn import Child
from quern.train.trackers.branches import FOLDER

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


@dataclass
class _Tracker:
    name: str
    child: Child
    done: int = 0
    """Bytes of metrics.jsonl."""
    since: float = field(default_factory=time.monotonic)
    """When it last had sent all there was, or more than before."""
    told: bool = False


class Trackers(Closes):
    """The processes of a run's trackers; on rank 0 only. ``attempt``: how often the run was started before.

    What fails or hangs is said once, as a warning, and ends no run.
    """

    def __init__(self, run_dir: str, config: MetricsConfig, attempt: int) -> None:
        self._metrics, self._timeout_s = os.path.join(run_dir, "metrics.jsonl"), config.trackers_timeout_s
        self._trackers = [own for name in config.sent_to if (own := self._start(run_dir, name, attempt)) is not None]
        self._ends = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        if self._trackers:
            self._watcher.start()

    def _start(self, run_dir: str, name: str, attempt: int) -> _Tracker | None:
        folder = os.path.join(run_dir, FOLDER)
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f"{name}.log"), "ab", opener=storage.open_own) as out:
                command = module("quern.train.trackers.worker", run_dir, name, str(attempt), str(self._timeout_s))
                return _Tracker(name, Child(command, stderr=out))
        except OSError as error:
            log.warning("%s: cannot be started (%s); the run goes on without it", name, error.strerror or error)
            return None

    def _watch(self) -> None:
        while not self._ends.wait(_LOOK_S):
            for own in self._trackers:
                self._look(own)

    def _look(self, own: _Tracker) -> None:
        self._take(own)
        code, now = own.child.ended(), time.monotonic()
        if code is not None:
            self._say(own, f"its process has ended ({code})")
        elif own.done >= self._size():
            own.since = now
        elif now - own.since > self._timeout_s:
            self._say(own, f"has taken nothing for {now - own.since:.0f} s")

    def _take(self, own: _Tracker) -> None:
        for line in own.child.lines():
            answer = _parsed(line)
            if type(answer.get("bytes")) is int:
                if answer["bytes"] > own.done:
                    own.since, own.told = time.monotonic(), False
                own.done = answer["bytes"]
            elif "failed" in answer:
                self._say(own, str(answer["failed"]))

    def _say(self, own: _Tracker, what: str) -> None:
        if own.told:
            return
        own.told = True
        plain = "".join(char if char.isprintable() else " " for char in what)[:300]
        log.warning("%s: %s; the run goes on, and what is not sent stays in metrics.jsonl", own.name, plain)

    def _size(self) -> int:
        try:
            return os.path.getsize(self._metrics)
        except OSError:
            return 0

    def finish(self, how: str) -> None:
        """Let each send what is left, in the time that ``metrics.trackers_timeout_s`` gives, and say what it did not.

        ``how``: ``finished``, or ``stopped`` by a signal, for which there is less time; ``failed`` waits for nothing,
        as a rank that failed has none: the processes end by themselves."""
        self._ends.set()
        if not self._trackers or how == "failed":
            for own in self._trackers:
                own.child.send(how)
                threading.Thread(target=own.child.end, args=(self._timeout_s,), daemon=True).start()
            self._trackers = []
            return
        self._watcher.join()
        until = time.monotonic() + (self._timeout_s if how == "finished" else min(self._timeout_s, _HURRY_S))
        for own in self._trackers:
            own.child.send(how)
        ends = [threading.Thread(target=self._end, args=(own, until), daemon=True) for own in self._trackers]
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join(max(0.0, until - time.monotonic()) + 3.0)
        self._trackers = []

    def _end(self, own: _Tracker, until: float) -> None:
        own.child.end(max(0.0, until - time.monotonic()), 1.0)
        self._take(own)
        left = self._lines_from(own.done)
        if left:
            lines = "1 line of metrics was" if left == 1 else f"{left:,} lines of metrics were"
            log.warning("%s: %s not sent; the next start of the run sends what is left", own.name, lines)
        elif own.child.status():
            log.warning("%s: has everything, but its run was not ended", own.name)

    def _lines_from(self, place: int) -> int:
        try:
            with open(self._metrics, "rb") as file:
                file.seek(place)
                return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        except OSError:
            return 0

    def close(self) -> None:
        """As after a failure, unless :meth:`finish` came before."""
        self.finish("failed")


def _parsed(line: str) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
