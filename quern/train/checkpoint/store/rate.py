"""Limits the rate of checkpoint copies, so that training keeps the network."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from quern.errors import InputError

__all__ = ["RateLimit"]


class RateLimit:
    """A token bucket that any number of threads share. It holds what one second allows, and is full at first.

    Whoever takes more than the bucket holds leaves a debt and waits until it is paid. So ``n`` may be larger than the
    bucket, threads are served in the order they came, and over any time ``t`` at most ``bytes_per_s * (t + 1)`` bytes
    plus the last ``n`` are let through.

    Args:
        bytes_per_s: bytes a second; None for no limit.
        clock: seconds on a clock that never goes back.
        sleep: waits a number of seconds.

    Raises:
        InputError: ``bytes_per_s`` is no finite number above 0.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if bytes_per_s is not None and not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
            raise InputError(f"bytes_per_s: expected a finite number > 0, or none, got {bytes_per_s!r}")
        self.bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._held = bytes_per_s or 0.0
        self._filled_at = clock()

    def take(self, n: int) -> None:
        """Returns once ``n`` bytes may move."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            self._held = min(self.bytes_per_s, self._held + (now - self._filled_at) * self.bytes_per_s)
            self._filled_at = now
            self._held -= n
            wait = -self._held / self.bytes_per_s
        if wait > 0:
            self._sleep(wait)
