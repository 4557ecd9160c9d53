"""Transfers a local file in pieces of bounded size, and checks it while it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from quern.remote.concurrency import PART_BYTES
from quern.remote.retry import StoreError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.store.errors import SourceError
from quern.train.checkpoint.store.rate import RateLimit

__all__ = ["FilePieces"]

_MAX_PARTS = 10_000


class FilePieces:
    """A local file in pieces of bounded size. After the last one the iteration fails if the bytes are not those of
    ``record``, so a consumer that commits after the end commits nothing wrong."""

    def __init__(
        self, path: str, record: FileRecord, rate: RateLimit | None, progress: Callable[[int], object]
    ) -> None:
        self.path, self.record, self.rate, self.progress = path, record, rate, progress

    def __iter__(self) -> Iterator[bytes]:
        length = max(PART_BYTES, -(-self.record.size // _MAX_PARTS))
        state, size = hashlib.sha256(), 0
        try:
            with open(self.path, "rb") as file:
                while data := file.read(length):
                    size += len(data)
                    if size > self.record.size:
                        break
                    state.update(data)
                    self.progress(len(data))
                    if self.rate is not None:
                        self.rate.take(len(data))
                    yield data
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise SourceError(f"{self.path}: cannot be read ({error.strerror}); not uploaded") from None
        except OSError as error:  # a shared file system's, which may pass
            message = f"{self.path}: cannot be read ({error.strerror or error}); not uploaded"
            raise StoreError(message, transient=True) from None
        if size != self.record.size:
            more = "more" if size > self.record.size else f"{size}"
            raise SourceError(f"{self.path}: expected {self.record.size} bytes, as saved, has {more}; not uploaded")
        if state.hexdigest() != self.record.sha256:
            raise SourceError(
                f"{self.path}: expected SHA-256 {self.record.sha256}, as saved, has {state.hexdigest()}; not uploaded"
            )
