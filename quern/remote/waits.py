"""Hooks around blocking I/O: a caller that times work can pause its clock during waits for a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["around_waits", "waiting"]

_hooks = threading.local()


@contextmanager
def around_waits(before: Callable[[], object], after: Callable[[], object]) -> Iterator[None]:
    """Inside the block ``before`` and ``after`` are called around each wait of this thread for a store."""
    outer = getattr(_hooks, "pair", None)
    _hooks.pair = (before, after)
    try:
        yield
    finally:
        _hooks.pair = outer


@contextmanager
def waiting() -> Iterator[None]:
    """Mark the block as a wait of this thread for a store."""
    pair, _hooks.pair = getattr(_hooks, "pair", None), None  # once, however deep waits are nested
    if pair is None:
        yield
        return
    pair[0]()
    try:
        yield
    finally:
        _hooks.pair = pair
        pair[1]()
