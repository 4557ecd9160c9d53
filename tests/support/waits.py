"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits as a zombie for its parent to look."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {seconds} s"
        time.sleep(0.002)
