"""One page never costs a partition: who was on the table when the process ended, and an end that cannot be ignored.

A parser can hang for minutes in C, where neither signals nor other Python threads run. So the clock is faulthandler's:
a C thread that needs no interpreter lock and ends the process at the limit. The ordinal of the page in work stands in
a small mapped file, which outlives the process and tells the driver which page it was.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from quern import storage

__all__ = ["Last", "Marker", "Watchdog", "bounded_memory", "marker_folder", "pages_in_work"]

_LAYOUT = struct.Struct("<qd")


@dataclass(frozen=True)
class Last:
    """The page that was in work: its ordinal in the partition, and when it began (Unix seconds)."""

    ordinal: int
    began: float


class Marker:
    """The ordinal of the page in work, in a file that outlives the process."""

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(_LAYOUT.pack(-1, 0.0))
        self._file = open(path, "r+b")  # noqa: SIM115 (lives as long as the marker)
        self._map = mmap.mmap(self._file.fileno(), _LAYOUT.size)

    def set(self, ordinal: int) -> None:
        """The page with this ordinal is now in work; -1: none is."""
        _LAYOUT.pack_into(self._map, 0, ordinal, time.time())

    def close(self) -> None:
        """Let go of the file; it stays."""
        self._map.close()
        self._file.close()

    @staticmethod
    def take(path: str) -> Last | None:
        """What the marker last said, once: it must not be said again of a process that died before its first page."""
        last = Marker.read(path)
        with suppress(FileNotFoundError):
            os.unlink(path)
        return last

    @staticmethod
    def remove(path: str) -> None:
        """The partition is finished; on another machine there is nothing to remove."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    @staticmethod
    def read(path: str) -> Last | None:
        """What the marker last said; None when there is none, or no page was in work."""
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        if len(data) != _LAYOUT.size:
            return None
        last = Last(*_LAYOUT.unpack(data))
        return last if last.ordinal >= 0 else None


def pages_in_work(folder: str) -> int:
    """Pages that the partitions with a marker in ``folder`` are through with."""
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(last.ordinal for last in map(Marker.read, paths) if last is not None)


def marker_folder(scratch: str) -> str:
    """Where markers of a run stand: in its scratch folder, or on this machine when that is an object store."""
    return scratch if storage.is_local(scratch) else os.path.join(tempfile.gettempdir(), "quern-markers")


class Watchdog:
    """Ends the process when one page takes longer than ``limit_s``.

    Arming starts a C thread, so a running clock is kept for several pages: a page is ended between 3/4 and all of
    the limit.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._armed = float("-inf")
        self._file = None if hasattr(sys.stderr, "fileno") else open(os.devnull, "w")  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def page(self) -> None:
        """A new page begins."""
        now = time.monotonic()
        if now - self._armed > self.limit_s / 4:
            faulthandler.dump_traceback_later(self.limit_s, exit=True, file=self._file or sys.__stderr__ or 2)
            self._armed = now

    def rest(self) -> None:
        """No page is in work: the clock stands still until the next one."""
        faulthandler.cancel_dump_traceback_later()
        self._armed = float("-inf")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()


@contextmanager
def bounded_memory(limit_mib: int | None) -> Iterator[None]:
    """Cap this process's private memory inside the block: who asks for more gets MemoryError, or ends the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if limit_mib is not None:
        limit = limit_mib << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
