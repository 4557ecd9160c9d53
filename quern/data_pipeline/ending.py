"""How a data run ends before its end: asked to by a signal, or for want of room on a disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from quern import storage
from quern.errors import QuernError

__all__ = ["EndedBySignalError", "ends_by_signal", "full_disk_named", "keeps_handlers"]

#: What `kill`, a batch system and a terminal that is closed send. Ctrl-C is Python's KeyboardInterrupt already.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class EndedBySignalError(QuernError):
    """A signal ended the run. Exit code 3, as of training."""

    exit_code = 3


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def ends_by_signal(run_dir: str) -> Iterator[None]:
    """SIGTERM or SIGHUP in the block unwinds it and becomes an :class:`EndedBySignalError`; a second one kills."""
    if not _main_thread():
        yield
        return

    came: list[str] = []

    def heard(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        came.append(signal.Signals(number).name)
        raise KeyboardInterrupt  # unwinds through what takes an Exception for a failure of its own

    wanted = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
    before: dict[int, Any] = {number: signal.signal(number, heard) for number in wanted}
    try:
        yield
    except KeyboardInterrupt:  # Ray raises one of its own where a handler has raised
        if not came:
            raise
        raise EndedBySignalError(f"{run_dir}: ended by {came[0]}; the same command goes on") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def keeps_handlers() -> Iterator[None]:
    """Who handles SIGTERM before the block does so after it; Ray's handler stays where nobody did."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if _main_thread() and callable(before):
        signal.signal(signal.SIGTERM, before)


@contextmanager
def full_disk_named(run_dir: str) -> Iterator[None]:
    """An error of a full disk or a used-up quota, in a worker or here, becomes one line that says which disk and what
    to do.

    Raises:
        QuernError: in place of that error.
    """
    try:
        yield
    except OSError as error:
        cause = getattr(error, "cause", None) or error  # Ray's has the worker's own in it
        if getattr(cause, "errno", None) not in _FULL:
            raise
        path = getattr(cause, "filename", None) or _fullest(run_dir)
        what = "no space is left" if cause.errno == errno.ENOSPC else "the quota of its disk is used up"
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(_standing(str(path))).free / 1e6:,.1f} MB are free there)"
        raise QuernError(
            f"{path}: {what}{free}; free some, then the same command goes on, or give a run_dir elsewhere"
        ) from None


def _fullest(run_dir: str) -> str:
    """Of the folders that a run writes to, the one whose disk has least room: the error of a write names no file."""
    folders = [tempfile.gettempdir(), *([storage.split(run_dir)[1]] if storage.is_local(run_dir) else [])]
    return min(reversed(folders), key=lambda folder: shutil.disk_usage(_standing(folder)).free)


def _standing(path: str) -> str:
    """The path, or the nearest folder above it that is there."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
