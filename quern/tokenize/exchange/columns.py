"""Reads foreign files in pieces: regular, of constant size, never mapped (a mapped file that shrinks kills the
reader)."""

from __future__ import annotations

import hashlib
import os
import stat

import numpy as np
from numpy.typing import NDArray

from quern import storage
from quern.errors import InputError

__all__ = ["I64", "SourceFile"]

I64 = NDArray[np.int64]
_PIECE = 8 << 20


class SourceFile:
    """A file that is read; ``size`` in bytes when it was opened.

    Raises:
        InputError: it is no regular file, cannot be read, or changes its size meanwhile.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with storage.reading(path):
            # opening a pipe would block until another process writes to it
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise InputError(f"{path}: expected a file")
        self.size = status.st_size
        self._hash = hashlib.sha256()
        self._hashed = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes."""
        parts = []
        while size:
            with storage.reading(self.path):
                data = os.pread(self._descriptor, min(size, 1 << 30), offset)
            if not data:
                raise InputError(f"{self.path}: ends at byte {offset}, expected {self.size}; it is being written to")
            parts.append(data)
            offset, size = offset + len(data), size - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def column(self, offset: int, count: int, dtype: str) -> np.ndarray:
        """``count`` values from byte ``offset``, in the machine's byte order; a new array."""
        data = self.read(offset, count * np.dtype(dtype).itemsize)
        return np.frombuffer(data, dtype).astype(np.dtype(dtype).newbyteorder("="))

    def read_on(self, offset: int, size: int) -> bytes:
        """Exactly these bytes; they and any skipped since the last call are added to the SHA-256."""
        self._hash_to(offset)
        data = self.read(offset, size)
        self._hash.update(data)
        self._hashed = offset + size
        return data

    def finish(self) -> str:
        """The hex SHA-256 of the whole file, including what :meth:`read_on` has not read."""
        self._hash_to(self.size)
        if os.fstat(self._descriptor).st_size != self.size:
            raise InputError(f"{self.path}: has changed while it was read; try again")
        return self._hash.hexdigest()

    def _hash_to(self, offset: int) -> None:
        while self._hashed < offset:
            data = self.read(self._hashed, min(_PIECE, offset - self._hashed))
            self._hash.update(data)
            self._hashed += len(data)
