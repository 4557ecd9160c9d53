"""Per-page crash isolation: finds the page on which a worker died, and enforces a time-out that C code cannot block.

A parser can hang for minutes in C, where neither Python's signal handlers nor its other threads run. So kernel timers
signal faulthandler's handler in C, which writes the stack to a file and lets the signal end the process, even while the
interpreter lock is held. A page's time-out counts CPU time of its process, so that a busy machine quarantines no page;
a wall-clock limit ten times as long catches pages that sleep. A small mapped file holds the ordinal of the current
page, another file the stack: both outlive the process and tell the driver which page failed, and why.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import re
import resource
import signal
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from quern import storage

__all__ = [
    "WALL_FACTOR",
    "InFlightMarker",
    "Last",
    "Watchdog",
    "bounded_memory",
    "give_back_memory",
    "marker_folder",
    "pages_in_work",
]

#: Wall seconds a page may take for each CPU second: twenty processes on a core, or a disk that is slow to swap, pass.
WALL_FACTOR = 10

_LAYOUT = struct.Struct("<qd")
_STACK = ".stack"
_FOLDER = re.compile(r"(?:quern-)?markers-[0-9a-f]{32}")
_ATTEMPTS = 20
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class Last:
    """The page that was being processed: its ordinal in the partition, and its start (Unix seconds)."""

    ordinal: int
    began: float
    stack: str | None = None
    """Where the process stood when a clock ran out on the page, innermost frame first; None if none did."""

    @property
    def place(self) -> str:
        """A short description of the innermost frame of ``stack``."""
        found = _FRAME.search(self.stack or "")
        return f"{os.path.basename(found[1])}:{found[2]} in {found[3]}" if found else "no Python code"


class InFlightMarker:
    """The ordinal of the current page, in a file that outlives the process."""

    def __init__(self, path: str) -> None:
        with storage.needs_room(path):
            _begin(path)
        self._file = open(path, "r+b")  # noqa: SIM115 (lives as long as the marker)
        self._map = mmap.mmap(self._file.fileno(), _LAYOUT.size)

    def set(self, ordinal: int) -> None:
        """Record the ordinal of the page that is now processed; -1: none."""
        _LAYOUT.pack_into(self._map, 0, ordinal, time.time())

    def close(self) -> None:
        """Close the file without removing it."""
        self._map.close()
        self._file.close()

    @staticmethod
    def stack_of(path: str) -> str:
        """The path to which the process that writes the marker ``path`` writes its stack on a time-out."""
        return path + _STACK

    @staticmethod
    def take(path: str) -> Last | None:
        """What the marker last said, once: it must not be said again of a process that died before its first page."""
        last = InFlightMarker.read(path)
        InFlightMarker.remove(path)
        return last

    @staticmethod
    def remove(path: str) -> None:
        """The partition is finished; on another machine there is nothing to remove.

        With the last marker its folder goes: of a run on a store nobody else comes by every machine.
        """
        for name in (path, path + _STACK):
            with suppress(FileNotFoundError):
                os.unlink(name)
        folder = os.path.dirname(os.path.dirname(path))
        if _FOLDER.fullmatch(os.path.basename(folder)):
            with suppress(OSError):  # others are in there
                os.rmdir(os.path.dirname(path))
                os.rmdir(folder)

    @staticmethod
    def read(path: str) -> Last | None:
        """The recorded page; None without a marker, or if no page was being processed."""
        data = _content(path)
        if len(data) != _LAYOUT.size:
            return None
        ordinal, began = _LAYOUT.unpack(data)
        stack = _content(path + _STACK).decode("utf-8", "replace")
        return Last(ordinal, began, stack or None) if ordinal >= 0 else None


def _begin(path: str) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            # of two folders, the outer may go before the inner is made
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(_LAYOUT.pack(-1, 0.0))
            return
        except FileNotFoundError:  # another worker removed the folder with its last marker
            if attempt == _ATTEMPTS - 1:
                raise


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except FileNotFoundError:
        return b""


def pages_in_work(folder: str) -> int:
    """The number of pages done in partitions that have a marker in ``folder``."""
    paths = (
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if not name.endswith(_STACK)
    )
    return sum(last.ordinal for last in map(InFlightMarker.read, paths) if last is not None)


def marker_folder(scratch: str) -> str:
    """Create the folder for one driver's markers: in its scratch folder, or on each machine if that is on a store.

    Others use that machine too: no name in its common folder is one that another user has, or could foresee.
    """
    name = f"markers-{uuid.uuid4().hex}"
    return storage.join(scratch, name) if storage.is_local(scratch) else f"{tempfile.gettempdir()}/quern-{name}"


class Watchdog:
    """Kills the process when one page takes more than ``limit_s`` CPU seconds, all threads together.

    So it does at :data:`WALL_FACTOR` times as many seconds by the wall clock, which runs while a page is judged and
    not while it is read: a slow store is no page's fault. What ran out is in ``stack_path``, empty or missing else.
    """

    _CLOCKS = ((signal.ITIMER_PROF, signal.SIGPROF), (signal.ITIMER_REAL, signal.SIGALRM))

    def __init__(self, limit_s: float, stack_path: str) -> None:
        self.limit_s = limit_s
        self._stack_path = stack_path
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with storage.needs_room(self._stack_path), ExitStack() as undo:
            file = undo.enter_context(open(self._stack_path, "wb"))
            for timer, number in self._CLOCKS:
                timers, handler = signal.setitimer(timer, 0), signal.getsignal(number)
                undo.callback(signal.setitimer, timer, *timers)
                if handler not in (signal.SIG_DFL, None):  # the default ends the process
                    signal.signal(number, signal.SIG_DFL)
                    undo.callback(signal.signal, number, handler)
                faulthandler.register(number, file, all_threads=True, chain=True)
                undo.callback(faulthandler.unregister, number)
            undo.callback(self.rest)
            self._undo = undo.pop_all()
        return self

    def page(self) -> None:
        """Start the clocks of the next page, which is about to be read."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, self.limit_s)

    def judge(self) -> None:
        """Count the page's wall time too, from here on: it has been read."""
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * self.limit_s)

    def rest(self) -> None:
        """Pause the clocks until the next page."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def __exit__(self, *raised: object) -> None:
        self._undo.close()


@contextmanager
def bounded_memory(limit_mib: int | None) -> Iterator[None]:
    """Cap this process's private memory inside the block: beyond it MemoryError is raised, or the process ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_mib is not None:
        limit = limit_mib << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def give_back_memory() -> None:
    """Return freed heap memory to the system, which the C library would otherwise keep (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
