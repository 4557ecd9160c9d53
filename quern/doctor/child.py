"""Runs measurements in a process beside this one, which can hang, crash or be killed without harm.

Driver, network and disks may hang in a way that no exception ends. So this process touches none of them: it sends
tasks to the other, waits for its time-out, kills it and starts another.
"""

from __future__ import annotations

import json
import queue
import time
from typing import Any

from quern.closes import Closes
from quern.errors import QuernError
from quern.safe_path import module
from quern.train.processes.spawn import Child

__all__ = ["TaskError", "Worker"]

_KILL_S = 5.0


class TaskError(QuernError):
    """A task ``hung``, or failed, or its process has ended."""

    def __init__(self, message: str, *, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


class Worker(Closes):
    """A process that does tasks in turn (:mod:`quern.doctor.worker`); started when it is first asked."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def ask(self, task: dict[str, Any], timeout_s: float, found: dict[str, Any]) -> None:
        """Have a task done, and add what it tells to ``found``, also what a task told that failed then: mappings by
        name, lists one behind the other.

        Raises:
            TaskError: it has hung for ``timeout_s``, failed, or its process has ended.
        """
        child, doing, end = self._started(), "start", time.monotonic() + timeout_s
        child.send(json.dumps(task))
        while True:
            try:
                line = child.receive(max(0.0, end - time.monotonic()))
            except queue.Empty:
                self.close()
                raise TaskError(f"hung for {timeout_s:g} s in: {doing}", hung=True) from None
            if line is None:
                self.close()
                raise TaskError(f"ended with code {child.status()} in: {doing}")
            match json.loads(line):
                case {"doing": doing}:
                    ...
                case {"found": part}:
                    _add(found, part)
                case {"error": error}:
                    raise TaskError(f"{doing}: {error}")
                case _:
                    return

    def close(self) -> None:
        """End the process; one that cannot be killed, as it waits in a driver, is left to the system."""
        if self._child is not None:
            self._child.end(0, _KILL_S)
        self._child = None

    def _started(self) -> Child:
        self._child = self._child or Child(module("quern.doctor.worker"))
        return self._child


def _add(into: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _add(into.setdefault(name, {}), value)
        elif isinstance(value, list):
            into.setdefault(name, []).extend(value)
        else:
            into[name] = value
