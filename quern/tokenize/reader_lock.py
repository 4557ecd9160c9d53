"""Shared locks on the manifest of a generation of shards, held by each reader and released with it.

A process that removes a superseded generation needs the exclusive lock, else it leaves the files. Nothing is written,
so that a corpus may be read-only. On a file system without locks nothing is locked.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

__all__ = ["release", "share", "take_alone"]


def share(manifest: str) -> int | None:
    """Hold the generation that ``manifest`` lists, beside other readers, until :func:`release`; None: it is not there,
    or the file system has no locks."""
    try:
        lock = os.open(manifest, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # an exclusive holder only removes a few files
    except OSError:
        os.close(lock)
        return None
    return lock


def take_alone(manifest: str) -> tuple[bool, int | None]:
    """Try to lock the generation exclusively; while held, no reader can open it."""
    try:
        lock = _open_for_change(manifest)
    except OSError:
        return True, None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False, None
    except OSError:  # no locks here
        os.close(lock)
        return True, None
    return True, lock


def release(lock: int | None) -> None:
    """Release the lock. The lock of a forked process's parent stays: the file is closed, not unlocked."""
    if lock is not None:
        with suppress(OSError):
            os.close(lock)


def _open_for_change(path: str) -> int:
    """As some network file systems want it for a lock that is held alone."""
    try:
        return os.open(path, os.O_RDWR)
    except OSError:  # it may not be written
        return os.open(path, os.O_RDONLY)
