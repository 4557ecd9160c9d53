"""Writes what a failed rank was at to ``RUN/tracebacks``, and one line to the terminal: of an error the traceback
(``rank_<N>.txt``), of a rank that hangs or crashes the stacks of its threads (``rank_<N>.stacks.txt``).

Imports no torch.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from quern.errors import HUNG, STOPPED, named_line
from quern.filesystem import open_own
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.debug.dumps import in_vain, tracebacks_folder

__all__ = ["Failure", "clear", "file_of", "first_failure", "keep", "stacks_of", "writing_stacks"]

#: First line of a file: when the rank failed, in seconds since the epoch, and the error.
_HEAD = re.compile(r"(\d+\.\d+) (.*)")


def file_of(run_dir: str, rank: int) -> str:
    """The path of a rank's traceback."""
    return os.path.join(tracebacks_folder(run_dir), f"rank_{rank}.txt")


def stacks_of(run_dir: str, rank: int) -> str:
    """The path of the stacks of a rank's threads."""
    return os.path.join(tracebacks_folder(run_dir), f"rank_{rank}.stacks.txt")


def opened(file: str) -> TextIO:
    """One of these files, to be written anew; its folder is made.

    Raises:
        OSError: it cannot be written.
    """
    os.makedirs(os.path.dirname(file), exist_ok=True)
    return open(file, "w", encoding="utf-8", errors="backslashreplace", opener=open_own)


@contextmanager
def writing_stacks(run_dir: str, rank: int) -> Iterator[None]:
    """Have a crash in the block (a fault of memory, SIGABRT) write the stacks of all threads before the process dies.
    The launcher asks a rank that hangs for them so."""
    file = stacks_of(run_dir, rank)
    try:
        stream = opened(file)
    except OSError:
        yield
        return
    with stream:
        faulthandler.enable(stream)
        try:
            yield
        finally:
            faulthandler.disable()
            with suppress(OSError):
                if not os.path.getsize(file):  # else the watchdog has written there
                    os.unlink(file)


def clear(run_dir: str) -> None:
    """Remove tracebacks of an earlier start, before the ranks begin."""
    shutil.rmtree(tracebacks_folder(run_dir), ignore_errors=True)


def keep(run_dir: str, rank: int, error: BaseException) -> str | None:
    """Write the traceback to its file; return the path, None if it cannot be written."""
    file = file_of(run_dir, rank)
    lines = traceback.format_exception(error)
    try:
        told = re.sub(r"\[/\S+:\d+\] ", "", named_line(error))  # gloo names the place in its source
        with opened(file) as stream:
            stream.write(f"{time.time():.6f} {told}\n{''.join(lines)}")
    except OSError:
        return None
    return file


@dataclass(frozen=True)
class Failure:
    """The rank that failed first."""

    rank: int
    said: str
    """Who failed of what, and what to do, in a line."""
    own: bool = True
    """Whether it failed by itself, and not of another rank's failure or of what all ranks fail of."""


def first_failure(run_dir: str, codes: Sequence[int | None], since: float = 0.0) -> Failure | None:
    """Who failed first, by the exit codes of the ranks as Popen gives them (None: still there) and by their tracebacks.
    None where no rank failed, or a rank has said why itself, with ``error: …``. ``since``: when the ranks were started,
    in seconds since the epoch; older tracebacks are of earlier starts.

    What the watchdog names comes first. Then a death by signal: the others fail of the connection that it left. Then a
    rank that is still there, while the others have waited in vain. Then the traceback that was written first.
    """
    newest = [checkpoint.step for checkpoint in list_checkpoints(run_dir)][-1:]
    after = f"newest checkpoint step {newest[0]}; the same command goes on" if newest else "there is no checkpoint yet"
    found = []
    for rank in range(len(codes)):
        try:
            with open(file_of(run_dir, rank), encoding="utf-8", errors="replace") as stream:
                head = _HEAD.fullmatch(stream.readline().rstrip("\n"))
        except OSError:
            continue
        if head is not None and float(head[1]) >= since:
            found.append((float(head[1]), rank, head[2]))
    hangs = [own for own in found if own[2].startswith("hangs: ")]  # others may have failed of it before that was told
    if hangs and HUNG in codes:
        _, rank, what = min(hangs)
        one = not what.startswith(("hangs: ranks", "hangs: all ranks"))
        return Failure(rank, f"rank {rank}: {what}; stacks of all: {tracebacks_folder(run_dir)}; {after}", one)
    killed = [(code, rank) for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        code, rank = min(killed)
        try:
            name = f" ({signal.Signals(-code).name})"
        except ValueError:
            name = ""
        own = [code for code, _ in killed].count(code) == 1  # what kills several is no rank's own
        if code == -signal.SIGABRT:  # NCCL aborts of others' errors, and of those that hang
            told = sum(own is not None and own > 0 for own in codes) <= len(found) and None not in codes
            own = own and told and all(in_vain(error) for _, _, error in found)
        return Failure(rank, f"rank {rank} was killed by signal {-code}{name}; {after}", own)
    if not found or len(found) < sum(code not in (0, STOPPED, HUNG, None) for code in codes):
        return None  # somebody failed with an error of ours, which it has printed
    _, rank, what = min(found)
    known = {number for _, number, _ in found}
    # one that has followed an alarm finds its teller gone where that has waited in vain at the same time
    hung = [number for number, code in enumerate(codes) if code is None or (code == HUNG and number not in known)]
    if hung and all(in_vain(error) for _, _, error in found):
        stacks = [stacks_of(run_dir, number) for number in hung]
        named = f"rank {hung[0]} does" if len(hung) == 1 else f"ranks {', '.join(map(str, hung))} do"
        where = "".join(f"; stacks: {file}" for file in stacks if os.path.isfile(file) and os.path.getsize(file))
        return Failure(
            hung[0], f"{named} not answer, and rank {rank} waited in vain ({what}){where}; {after}", len(hung) == 1
        )
    own = not in_vain(what) and [error for _, _, error in found].count(what) == 1
    return Failure(rank, f"rank {rank}: {what}; its traceback: {file_of(run_dir, rank)}; {after}", own)
