"""Runs measurements in a process beside this one, which can hang, crash or be killed without harm.

Driver, network and disks may hang in a way that no exception ends. So this process touches none of them: it sends
tasks to the other, waits for its time-out, kills it and starts another. Both write lines of JSON.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from importlib import import_module
from typing import Any

from quern.closes import Closes
from quern.errors import QuernError, one_line
from quern.safe_path import module
from quern.train.processes.spawn import Child

__all__ = ["Worker"]

_KILL_S = 5.0


class Worker(Closes):
    """A process that does tasks in turn; started when it is first asked."""

    _child: Child | None = None

    def ask(self, task: dict[str, Any], timeout_s: float, found: dict[str, Any]) -> None:
        """Have a task done by the function ``task["what"]`` (``load.link``), and add what it tells to ``found``, also
        where it fails later: mappings by name, lists one behind the other.

        Raises:
            TimeoutError: it has hung for ``timeout_s``.
            QuernError: it has failed, or its process has ended.
        """
        child, doing, end = self._started(), "start", time.monotonic() + timeout_s
        child.send(json.dumps(task))
        while True:
            try:
                line = child.receive(max(0.0, end - time.monotonic()))
            except queue.Empty:
                self.close()
                raise TimeoutError(f"hung for {timeout_s:g} s in: {doing}") from None
            if line is None or not line.endswith("\n"):
                self.close()
                raise QuernError(f"ended with code {child.status()} in: {doing}")
            match json.loads(line):
                case str(doing):
                    pass
                case {"error": error}:
                    raise QuernError(f"{doing}: {error}")
                case None:
                    return
                case part:
                    _add(found, part)

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


def _main() -> None:
    """What the other process does: tells what it does next, a text, and what it finds, a mapping; null at the end."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            tasks.put(line)
        os._exit(0)  # the first process has ended: also out of a call that hangs

    threading.Thread(target=read, name="tasks", daemon=True).start()
    while True:
        task = json.loads(tasks.get())
        try:
            part, function = task["what"].split(".")
            for told in getattr(import_module(f"quern.doctor.{part}"), function)(task):
                print(json.dumps(told), file=out, flush=True)
            end = None
        except Exception as error:  # told to the first process, and the next task may go well
            end = {"error": f"{type(error).__name__}: {one_line(error)}"}
        print(json.dumps(end), file=out, flush=True)


if __name__ == "__main__":
    _main()
