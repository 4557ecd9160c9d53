"""Reads the tensors of a checkpoint in one process, in slices of bounded size.

DCP reads a stored chunk as a whole, and a chunk may be a whole embedding. Here the record that ``torch.save`` wrote is
located inside its file, and only the wanted run of elements is read. So memory depends neither on the model nor on how
its tensors were cut: the slice, and what of it is being read. The one exception is a chunk whose elements are not
stored in row-major order, which nothing in quern writes: it is held whole.
"""

from __future__ import annotations

import io
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from quern.errors import InputError, QuernError, one_line
from quern.train.checkpoint.format.manifest import METADATA_FILE, check_files, read_manifest
from quern.train.checkpoint.format.metadata import read_metadata

__all__ = ["StoredTensors", "boxes", "cut", "fill", "load_record", "locate", "overlap"]

#: Bytes of a part of a tensor's record that describes it; real ones have hundreds.
_MOST_DESCRIPTION = 1 << 20


def boxes(size: Sequence[int], limit: int) -> Iterator[ChunkStorageMetadata]:
    """Cut a tensor of ``size`` into boxes of at most ``limit`` elements (≥ 1). Each box is a run of the tensor's
    elements in row-major order, and the boxes follow each other in that order."""
    if not size or 0 in size:
        yield ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
        return
    dim = next(dim for dim in range(len(size)) if math.prod(size[dim + 1 :]) <= limit)
    trailing = tuple(size[dim + 1 :])
    step = max(1, limit // math.prod(trailing))
    for lead in product(*(range(length) for length in size[:dim])):
        for start in range(0, size[dim], step):
            offsets = (*lead, start, *(0 for _ in trailing))
            sizes = (*(1 for _ in lead), min(step, size[dim] - start), *trailing)
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class StoredTensors:
    """The tensors of a checkpoint, read box by box on the CPU in their stored type; nothing is kept in memory.

    Checksums are not compared (:func:`quern.train.checkpoint.tools.reader.verify` does).

    Raises:
        InputError: manifest or metadata is missing, damaged or foreign, or a file is missing or of another size.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        for problem in check_files(path, self.manifest, hashes=False):
            raise InputError(str(problem))
        metadata = read_metadata(path, self.manifest.files)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: stored
            for name, stored in sorted(metadata.state_dict_metadata.items())
            if isinstance(stored, TensorStorageMetadata)
        }
        """By stored name, in the order of names: size, type and chunks."""
        self._slices: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data or {}
        self._places: dict[MetadataIndex, int | None] = {}
        self._held: tuple[MetadataIndex, torch.Tensor] | None = None

    def read(self, name: str, box: ChunkStorageMetadata) -> torch.Tensor:
        """The elements of a tensor inside ``box``, which is one of :func:`boxes`.

        Raises:
            InputError: a stored chunk is not the tensor that the metadata describes, or chunks leave a hole.
            QuernError: a file could not be read.
        """
        stored = self.tensors[name]
        found, result, covered = 0, None, None
        for chunk in stored.chunks:
            shared = overlap(box.offsets, box.sizes, chunk.offsets, chunk.sizes)
            if shared is None:
                continue
            part = self._part(name, stored, chunk, cut(*shared, chunk.offsets))
            found += part.numel()
            if part.shape == box.sizes:
                result = part
                continue
            if result is None or covered is None:
                result = torch.empty(box.sizes, dtype=stored.properties.dtype)
                covered = torch.zeros(box.sizes, dtype=torch.bool)
            place = cut(*shared, box.offsets)
            found -= int(covered[place].sum())  # what two chunks have counts once
            result[place], covered[place] = part, True
        if found != math.prod(box.sizes):
            file = os.path.join(self.path, METADATA_FILE)
            raise InputError(f"{file}: {name}: its chunks do not cover it, each element once")
        return torch.empty(box.sizes, dtype=stored.properties.dtype) if result is None else result

    def _part(
        self, name: str, stored: TensorStorageMetadata, chunk: ChunkStorageMetadata, part: tuple[slice, ...]
    ) -> torch.Tensor:
        sizes = [own.stop - own.start for own in part]
        index = MetadataIndex(name, chunk.offsets)
        slot = self._slices[index]
        file = os.path.join(self.path, slot.relative_path)
        dtype = stored.properties.dtype
        try:
            with open(file, "rb", buffering=0) as stream:
                if index not in self._places:
                    self._places[index] = locate(stream, slot, chunk.sizes, dtype)
                place = self._places[index]
                if place is None:
                    if self._held is None or self._held[0] != index:
                        self._held = None  # before the next is read
                        self._held = index, load_record(stream, slot, "cpu")
                    return self._held[1][part].contiguous()
                first = sum(own.start * math.prod(chunk.sizes[dim + 1 :]) for dim, own in enumerate(part))
                buffer = bytearray(math.prod(sizes) * dtype.itemsize)
                stream.seek(place + first * dtype.itemsize)
                fill(stream, buffer)
        except OSError as error:
            raise QuernError(f"{file}: cannot be read ({error.strerror or error})") from None
        except Exception as error:  # a damaged record fails in a dozen ways, none of which means anything to the reader
            raise InputError(
                f"{file}: {name}: not a tensor of size {list(chunk.sizes)} and type {dtype} at byte {slot.offset} "
                f"({type(error).__name__}: {one_line(error)})"
            ) from None
        return torch.frombuffer(buffer, dtype=dtype).view(sizes)


class _View(io.RawIOBase):
    """The bytes of one stored chunk inside a file, as a file of its own."""

    def __init__(self, stream: io.RawIOBase, slot: _StorageInfo) -> None:
        self._stream, self._slot, self._at = stream, slot, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._slot.length}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._slot.length - self._at)]
        self._stream.seek(self._slot.offset + self._at)
        count = self._stream.readinto(view) or 0
        self._at += count
        return count


def locate(stream: io.RawIOBase, slot: _StorageInfo, size: Sequence[int], dtype: torch.dtype) -> int | None:
    """At which byte of the file the elements of a stored tensor begin; None: they are not in row-major order.

    Raises:
        ValueError: it is not a tensor of ``size`` and ``dtype``. torch and zipfile raise errors of their own.
    """
    with zipfile.ZipFile(_View(stream, slot)) as archive:
        for part in archive.infolist():
            is_read = "/data/" not in part.filename or part.filename.endswith("/byteorder")
            if is_read and part.file_size > _MOST_DESCRIPTION:
                raise ValueError(f"{part.filename!r} has {part.file_size:,} bytes, expected a few")
        orders = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/byteorder")]
    described = load_record(stream, slot, "meta")  # reads no element
    if not isinstance(described, torch.Tensor) or described.shape != torch.Size(size) or described.dtype != dtype:
        is_tensor = isinstance(described, torch.Tensor)
        raise ValueError(f"got {list(described.shape)}, {described.dtype}" if is_tensor else type(described).__name__)
    record = getattr(described.untyped_storage(), "_checkpoint_offset", None)
    if record is None or not described.is_contiguous() or orders != [sys.byteorder]:
        return None
    first = int(record) + int(described.storage_offset()) * dtype.itemsize
    if first < 0 or first + math.prod(size) * dtype.itemsize > slot.length:
        raise ValueError("its elements lie after its end")
    return slot.offset + first


def load_record(stream: io.RawIOBase, slot: _StorageInfo, device: str) -> Any:
    """What ``torch.save`` stored at ``slot``, whole; on ``meta`` without its elements. No foreign object is built."""
    return torch.load(cast(IO[bytes], _View(stream, slot)), map_location=device, weights_only=True)


def fill(stream: io.RawIOBase, buffer: bytearray | memoryview) -> None:
    """Read as many bytes as ``buffer`` takes.

    Raises:
        OSError: the file ends early.
    """
    view = memoryview(buffer)
    while view:
        count = stream.readinto(view)
        if not count:
            raise OSError("the file ends early")
        view = view[count:]


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """What two boxes of a tensor share: from which place to before which; None: nothing."""
    lower = list(map(max, offsets, other_offsets))
    upper = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True)]
    return (lower, upper) if all(low < high for low, high in zip(lower, upper, strict=True)) else None


def cut(lower: Sequence[int], upper: Sequence[int], offsets: Sequence[int]) -> tuple[slice, ...]:
    """The box from ``lower`` to ``upper`` as an index into one that begins at ``offsets``."""
    return tuple(slice(low - at, high - at) for low, high, at in zip(lower, upper, offsets, strict=True))
