"""``torch.distributed.checkpoint``, with durable and hashed files, checked metadata, and errors people can read.

DCP's own on-disk format is kept, so torch's tools read these checkpoints too; what it trusts or leaves out is replaced
here: every file's SHA-256 is taken from the bytes as they are written, files are synced after their last flush (DCP
syncs ``.metadata`` before it), and no pickle is trusted (:mod:`.metadata`; tensors are read by DCP with
``torch.load(weights_only=True)``).
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from quern.errors import QuernError
from quern.train.agree import describe
from quern.train.checkpoint.manifest import FileRecord
from quern.train.checkpoint.unpadded import UnpaddedLoadPlanner, UnpaddedSavePlanner

__all__ = ["load_tensors", "save_tensors"]


def save_tensors(
    folder: str,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, int],
    *,
    group: dist.ProcessGroup | None,
    alone: bool,
    fetch: Callable[[str], torch.Tensor] | None = None,
) -> dict[str, FileRecord]:
    """Write ``tensors`` below ``folder``, each rank its share; collective unless ``alone``.

    Returns this rank's files, synced, with checksums (rank 0's include ``.metadata``).

    Raises:
        QuernError: on every rank, when a rank could not write.
    """
    files = _HashedFiles()
    writer = _Writer(folder, files)
    with _plain_errors(f"{folder}: not saved"), _quiet():
        torch_checkpoint.save(
            dict(tensors),
            storage_writer=writer,
            planner=UnpaddedSavePlanner(rows, fetch),
            process_group=group,
            no_dist=alone,
        )
    return files.written


def load_tensors(
    folder: str,
    metadata: Metadata,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, int],
    *,
    group: dist.ProcessGroup | None,
    alone: bool,
) -> None:
    """Read into ``tensors`` in place, each rank its part; collective unless ``alone``.

    Names, sizes and types must have been checked against ``metadata``.

    Raises:
        QuernError: on every rank, when a rank could not read.
    """
    with _plain_errors(f"{folder}: not loaded"), _quiet():
        torch_checkpoint.load(
            dict(tensors),
            storage_reader=_Reader(folder, metadata),
            planner=UnpaddedLoadPlanner(rows),
            process_group=group,
            no_dist=alone,
        )


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without torch's remarks that a single process is taken for one, and that ranks have other tensors than others,
    as a pipeline's have: they are read each by itself."""
    with warnings.catch_warnings():
        for message in ("torch.distributed is disabled", "Detected mismatched keys"):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield


@contextmanager
def _plain_errors(what: str) -> Generator[None, None, None]:
    """DCP's exception, which is a BaseException that nothing catches, as ours."""
    try:
        yield
    except CheckpointException as error:
        _raise_first(error, what)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        raise QuernError(f"{what}: {describe(error)}") from error


def _raise_first(error: CheckpointException, what: str) -> NoReturn:
    rank, (first, _) = min(error.failures.items())
    if not isinstance(first, Exception):
        raise first from error  # Ctrl-C and exits stay what they are
    if isinstance(first, QuernError):
        raise type(first)(str(first)) from error
    raise QuernError(f"{what}: rank {rank}: {describe(first)}") from error


class _HashedFile(io.RawIOBase):
    """A file being written; :meth:`close` makes it durable and reports its checksum."""

    def __init__(self, path: str, done: Callable[[FileRecord], None]) -> None:
        self._file: BinaryIO = open(path, "wb", buffering=1 << 20)  # noqa: SIM115  (closed by close)
        self._hash = hashlib.sha256()
        self._done = done

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._done(FileRecord(self._hash.hexdigest(), self._file.tell()))
        finally:
            self._file.close()
            super().close()


class _HashedFiles(FileSystem):
    """DCP's view of the file system; remembers what was written."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise ValueError(f"expected mode 'wb', got {mode!r}")

        def done(record: FileRecord) -> None:
            self.written[os.path.basename(path)] = record

        stream = _HashedFile(os.fspath(path), done)
        try:
            yield stream
        except BaseException:
            stream._file.close()  # what is half written gets no checksum
            raise
        stream.close()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[os.path.basename(new_path)] = self.written.pop(os.path.basename(path))


class _Writer(FileSystemWriter):
    def __init__(self, folder: str, files: _HashedFiles) -> None:
        super().__init__(folder, sync_files=False, overwrite=False)  # the stream syncs itself
        self.fs = files

    def storage_meta(self) -> StorageMeta | None:
        return None  # it would hold the path of the folder before it is published


class _Reader(FileSystemReader):
    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata
