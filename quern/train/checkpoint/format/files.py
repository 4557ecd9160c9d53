"""Writes tensor files in DCP's format, consecutive ``torch.save`` records, hashed while written, and synced.

What a file holds is told in plain numbers (:class:`TensorFile`), so that another process can write it from memory that
it shares with the trainer. Files are bounded: a transfer that broke off is taken up again file by file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TypeVar, cast

import torch

from quern.train.checkpoint.format.folder import HashedFile
from quern.train.checkpoint.format.manifest import FileRecord

__all__ = ["FILE_BYTES", "StoredTensor", "TensorFile", "Written", "deal_files", "filled", "write_files"]

T = TypeVar("T")

FILE_BYTES = 1 << 30
"""A file is closed before the tensor that would make it longer; a longer tensor has a file of its own."""
ALIGNMENT = 64
"""Bytes; of a tensor's place in a snapshot."""


@dataclass(frozen=True)
class StoredTensor:
    """A contiguous piece of a tensor, and its position in a snapshot."""

    dtype: str
    """``float32``."""
    sizes: tuple[int, ...]
    offset: int
    """Bytes from the begin of the snapshot."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def num_bytes(self) -> int:
        """The size of the values alone."""
        return self.torch_dtype.itemsize * math.prod(self.sizes)

    @property
    def end(self) -> int:
        """The first aligned byte after the piece."""
        return -(-(self.offset + self.num_bytes) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class TensorFile:
    """A file to write."""

    name: str
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class Written:
    """A file that is written and synced."""

    record: FileRecord
    places: tuple[tuple[int, int], ...]
    """(Offset, length) of every record, in bytes."""


def deal_files(rank: int, tensors: Iterable[tuple[str, Sequence[int]]], limit: int = FILE_BYTES) -> list[TensorFile]:
    """The files of a rank for tensors of the given (type, sizes), in turn, none beyond ``limit`` bytes of values but
    for a single longer tensor."""
    placed, end = [], 0
    for dtype, sizes in tensors:
        placed.append(StoredTensor(dtype, tuple(sizes), end))
        end = placed[-1].end
    files = filled(placed, limit, lambda tensor: tensor.num_bytes)
    return [TensorFile(f"__{rank}_{number}.distcp", tuple(held)) for number, held in enumerate(files)]


def filled(items: Iterable[T], limit: int, size: Callable[[T], int]) -> list[list[T]]:
    """The items of one file after the other, each as full as it gets within ``limit``; one that is larger is alone."""
    files: list[list[T]] = []
    held = 0
    for item in items:
        if not files or held + size(item) > limit:
            files.append([])
            held = 0
        files[-1].append(item)
        held += size(item)
    return files


def write_files(folder: str, files: Sequence[TensorFile], fetch: Callable[[int], torch.Tensor]) -> dict[str, Written]:
    """Write ``files`` into ``folder``; ``fetch(i)`` gives the i-th of all their tensors, on the CPU, when its turn
    comes.

    Raises:
        OSError: a file could not be written; those before it stay.
    """
    written, number = {}, 0
    for file in files:
        places = []
        with HashedFile(os.path.join(folder, file.name)) as stream:
            for stored in file.tensors:
                tensor = fetch(number)
                assert tuple(tensor.shape) == stored.sizes, (file.name, tensor.shape, stored)
                assert tensor.dtype == stored.torch_dtype, (file.name, tensor.dtype, stored)
                begin = stream.tell()
                torch.save(_alone(tensor), cast(IO[bytes], stream))
                places.append((begin, stream.tell() - begin))
                number += 1
            record = stream.finish()
        written[file.name] = Written(record, tuple(places))
    return written


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a storage of its own size: ``torch.save`` writes the whole storage."""
    tensor = tensor.detach().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()
