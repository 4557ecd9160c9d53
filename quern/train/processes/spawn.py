"""Starts helper processes that ignore the trainer's signals, since it still needs them for its last save.

:class:`Child` is the trainer's end of one that is asked and answers in lines.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

__all__ = ["Child", "spawn"]

_TRAINERS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start ``command`` in a session of its own, with SIGHUP, SIGINT, SIGTERM and SIGUSR1 blocked from its first
    instruction on; they are the trainer's to handle. It ends when its standard input does, or by SIGKILL. ``options``
    are Popen's.

    Raises:
        OSError: it could not be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINERS)
    try:
        return subprocess.Popen([*command], start_new_session=True, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """A process that reads and writes lines. Two threads keep the caller from waiting for its pipes.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
        self._popen = spawn(command, **pipes, **options)
        self.pid = self._popen.pid
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._to_say: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._listen, self._speak)]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        stream = self._popen.stdout
        assert stream is not None
        with suppress(OSError, ValueError), stream:
            for line in stream:
                self._said.put(line)
        self._popen.wait()
        self._said.put(None)

    def _speak(self) -> None:
        stream = self._popen.stdin
        assert stream is not None
        with suppress(OSError, ValueError), stream:
            while (line := self._to_say.get()) is not None:
                stream.write(line + "\n")
                stream.flush()

    def send(self, line: str, *, last: bool = False) -> None:
        """Ask; what a dead process is asked is lost. ``last``: then end its input."""
        self._to_say.put(line)
        if last:
            self._to_say.put(None)

    @property
    def idle(self) -> bool:
        """Whether :meth:`receive` would wait."""
        return self._said.empty()

    def receive(self, timeout_s: float | None = None) -> str | None:
        """The next line that it wrote; None once, when it has ended.

        Raises:
            queue.Empty: there is none in ``timeout_s``; None = wait.
        """
        return self._said.get(timeout=timeout_s)

    def lines(self) -> list[str]:
        """What it has written since the last call."""
        found = []
        while not self.idle:
            if (line := self._said.get()) is not None:
                found.append(line)
        return found

    def status(self) -> int | None:
        """Popen's return code, once it has ended; None while it runs."""
        return self._popen.poll()

    def ended(self) -> int | None:
        """:meth:`status`, once all that it wrote has been taken in too."""
        return None if self._threads[0].is_alive() else self.status()

    def end(self, timeout_s: float, killed_s: float | None = None) -> None:
        """End its input and wait for it; kill it after ``timeout_s``, and then wait ``killed_s``, None = until it ends:
        a system call may not be interruptible."""
        self._to_say.put(None)
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(killed_s)
        for thread in self._threads:
            thread.join(1.0)
