"""Writes a failed rank's traceback to ``RUN/tracebacks/rank_<N>.txt``, and one line to the terminal.

Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import traceback
from collections.abc import Sequence

from quern.errors import named_line
from quern.filesystem import open_own
from quern.train.checkpoint.format.manifest import list_checkpoints

__all__ = ["clear", "file_of", "keep", "verdict"]

_FOLDER = "tracebacks"
_STOPPED = 3  # of quern.train: saved, and ended by a signal
#: First line of a file: when the rank failed, in seconds since the epoch, and the error.
_HEAD = re.compile(r"(\d+\.\d+) (.*)")


def file_of(run_dir: str, rank: int) -> str:
    """The path of a rank's traceback."""
    return os.path.join(run_dir, _FOLDER, f"rank_{rank}.txt")


def clear(run_dir: str) -> None:
    """Remove tracebacks of an earlier start, before the ranks begin."""
    shutil.rmtree(os.path.join(run_dir, _FOLDER), ignore_errors=True)


def keep(run_dir: str, rank: int, error: BaseException) -> str | None:
    """Write the traceback to its file; return the path, None if it cannot be written."""
    file = file_of(run_dir, rank)
    lines = traceback.format_exception(error)
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "w", encoding="utf-8", errors="backslashreplace", opener=open_own) as stream:
            stream.write(f"{time.time():.6f} {named_line(error)}\n{''.join(lines)}")
    except OSError:
        return None
    return file


def verdict(run_dir: str, codes: Sequence[int | None]) -> str | None:
    """One line for the exit codes of the ranks, as Popen gives them (None: still there): who failed first, and what to
    do. None where no rank failed, or a rank has said why itself, with ``error: …``.

    A death by signal comes first: the others fail of the connection that it left. Then the traceback that was written
    first.
    """
    newest = [checkpoint.step for checkpoint in list_checkpoints(run_dir)][-1:]
    after = f"newest checkpoint step {newest[0]}; the same command goes on" if newest else "there is no checkpoint yet"
    killed = [(code, rank) for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        code, rank = min(killed)
        try:
            name = f" ({signal.Signals(-code).name})"
        except ValueError:
            name = ""
        return f"rank {rank} was killed by signal {-code}{name}; {after}"
    found = []
    for rank in range(len(codes)):
        try:
            with open(file_of(run_dir, rank), encoding="utf-8", errors="replace") as stream:
                head = _HEAD.fullmatch(stream.readline().rstrip("\n"))
        except OSError:
            continue
        if head is not None:
            found.append((float(head[1]), rank, head[2]))
    if not found or len(found) < sum(code not in (0, _STOPPED, None) for code in codes):
        return None  # somebody failed with an error of ours, which it has printed
    _, rank, what = min(found)
    return f"rank {rank}: {what}; its traceback: {file_of(run_dir, rank)}; {after}"
