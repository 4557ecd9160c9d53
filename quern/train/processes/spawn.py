"""Starts helper processes that ignore the trainer's signals, since it still needs them for its last save."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Any

__all__ = ["spawn"]

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
