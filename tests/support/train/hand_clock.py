"""A clock that only a test moves, for modules that measure with ``time.perf_counter``."""

from __future__ import annotations

import threading


class HandClock:
    """Takes the place of a module's ``time``. ``read`` is set once the thread that made the clock has read it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read = threading.Event()
        self._reader = threading.current_thread()

    def perf_counter(self) -> float:
        now = self.now
        if threading.current_thread() is self._reader:
            self.read.set()
        return now

    def pass_once_read(self, seconds: float) -> None:
        """For another thread: let time pass, after the clock's thread has begun to measure."""
        assert self.read.wait(120)
        self.now += seconds
