"""Runs measurements in a process beside this one, which can hang, crash or be killed without harm.

Driver, network and disks may hang in a way that no exception ends. So this process touches none of them: it sends
tasks to the other, waits for its time-out, kills it and starts another.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import suppress
from typing import Any

from quern.errors import QuernError
from quern.safe_path import module

__all__ = ["Child", "ChildError"]

_KILL_S = 5.0
_MOST_BYTES = 16 << 20


class ChildError(QuernError):
    """A task hung, or its process ended; ``doing`` is the step it was at, ``partial`` what it had told before."""

    def __init__(self, message: str, doing: str, partial: dict[str, Any], *, hung: bool) -> None:
        super().__init__(message)
        self.doing, self.partial, self.hung = doing, partial, hung


class Child:
    """A process that does tasks in turn; started when the first is asked for. It ends with this one, whose end of a
    pipe it reads."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._left = b""

    def ask(self, task: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """What the task tells.

        Raises:
            ChildError: it has hung for ``timeout_s``, failed, or its process has ended.
        """
        process = self._started()
        assert process.stdin is not None
        doing, partial = "start", dict[str, Any]()
        end = time.monotonic() + timeout_s
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
        while True:
            line = self._line(process, end)
            if line is None:
                self.close()
                raise ChildError(f"hung for {timeout_s:g} s in: {doing}", doing, partial, hung=True)
            if not line:
                code = process.wait()
                self.close()
                raise ChildError(f"ended with code {code} in: {doing}", doing, partial, hung=False)
            told = json.loads(line)
            doing = str(told.get("doing", doing))
            partial |= told.get("partial", {})
            if "error" in told:
                raise ChildError(f"{doing}: {told['error']}", doing, partial, hung=False)
            if "done" in told:
                return partial | told["done"]

    def close(self) -> None:
        """End the process; one that cannot be killed, as it waits in a driver, is left to the system."""
        process, self._process, self._left = self._process, None, b""
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                module("quern.doctor.worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment,
                bufsize=0,
            )  # fmt: skip
        return self._process

    def _line(self, process: subprocess.Popen[bytes], end: float) -> bytes | None:
        """The next line; empty when the process has ended, None at the time-out."""
        assert process.stdout is not None
        while b"\n" not in self._left:
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data or len(self._left) > _MOST_BYTES:
                return b""
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        return line
