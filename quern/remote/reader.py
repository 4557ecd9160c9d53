"""An object as a file: sequential reads with prefetching, or random reads by small ranges."""

from __future__ import annotations

import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, cast

from quern.remote.objects import Objects
from quern.remote.retry import ChangedError
from quern.remote.sink import Info, Sink
from quern.remote.waits import waiting

__all__ = ["open_object"]

_FIRST_BYTES = 64 << 10
_MOST_BYTES = 8 << 20
_THREADS = 8

_pool: tuple[int, ThreadPoolExecutor] | None = None


def open_object(store: Objects, url: str, fingerprint: str | None = None) -> IO[bytes]:
    """``url`` as a seekable file; all its bytes are of one version of the object.

    Args:
        fingerprint: what the object's ``Info`` must have.

    Raises:
        FileNotFoundError: there is no such object.
        ChangedError: it has another fingerprint.
        StoreError: it cannot be read.
    """
    return cast(IO[bytes], io.BufferedReader(_Object(store, url, fingerprint), _FIRST_BYTES))


class _Object(io.RawIOBase):
    def __init__(self, store: Objects, url: str, fingerprint: str | None) -> None:
        super().__init__()
        self._store, self._url = store, url
        self._at = 0
        self._span = _FIRST_BYTES
        self._ahead: tuple[int, Future[bytearray]] | None = None
        first = Sink(url, 0, _FIRST_BYTES)
        with waiting():
            try:
                store.fetch(first)
            except ChangedError:  # an empty object has no first byte
                found = store.stat(url)
                if found is None or found.size:
                    raise
                first.info = found
        assert first.info is not None
        self._info: Info = first.info
        if fingerprint is not None and fingerprint != self._info.fingerprint:
            raise ChangedError(f"{url}: expected the object {fingerprint}, found {self._info.fingerprint}")
        self._start, self._data = 0, memoryview(first.data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._info.size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._info.size - self._at)
        if wanted <= 0:
            return 0
        if not self._start <= self._at < self._start + len(self._data):
            self._load(wanted)
        piece = self._data[self._at - self._start :][:wanted]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _load(self, wanted: int) -> None:
        """Have the bytes at hand that begin at the cursor."""
        forward = self._at == self._start + len(self._data)
        self._span = min(2 * self._span, _MOST_BYTES) if forward else _FIRST_BYTES
        ahead, self._ahead = self._ahead, None
        start, self._data = self._at, memoryview(b"")
        with waiting():
            if ahead is not None and ahead[0] == start:
                data = ahead[1].result()
            else:
                if ahead is not None:
                    ahead[1].cancel()
                data = self._fetch(start, max(wanted, self._span))
        self._start, self._data = start, memoryview(data)
        behind = start + len(data)
        if forward and self._span > 2 * _FIRST_BYTES and behind < self._info.size:
            self._ahead = behind, _threads().submit(self._fetch, behind, min(2 * self._span, _MOST_BYTES))

    def _fetch(self, start: int, count: int) -> bytearray:
        end = min(start + count, self._info.size)
        return self._store.fetch(Sink(self._url, start, end, self._info))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None
        self._data = memoryview(b"")
        super().close()


def _threads() -> ThreadPoolExecutor:
    """Of this process; they start as they are needed."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        _pool = os.getpid(), ThreadPoolExecutor(_THREADS, thread_name_prefix="read-ahead")
    return _pool[1]
