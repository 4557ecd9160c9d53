"""Reads DCP's files with checked metadata, and writes them from one process, with readable errors.

DCP's own on-disk format is kept, so torch's tools read these checkpoints too, and DCP's planner says which rank reads
what. What it trusts or leaves out is replaced: every file's SHA-256 is taken from the bytes as they are written, files
are synced after their last flush, and no pickle is trusted (:mod:`.metadata`).

Reading is bounded. DCP's reader loads a stored piece of a tensor as a whole, and a piece may be a whole embedding; here
only the wanted part of it passes through a buffer of :data:`BUFFER_BYTES`, straight from the file (:mod:`.slices`), and
each rank follows its own plan: none is gathered. The one exception is a piece whose elements are not stored in
row-major order, which nothing in quern writes: it is held whole.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import RawIOBase
from itertools import groupby, product

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from quern.errors import QuernError
from quern.train.checkpoint.format.files import StoredTensor, TensorFile, write_files
from quern.train.checkpoint.format.folder import write_file
from quern.train.checkpoint.format.manifest import METADATA_FILE, FileRecord
from quern.train.checkpoint.format.slices import boxes, cut, fill, load_record, locate, overlap
from quern.train.checkpoint.format.unpadded import UnpaddedLoadPlanner
from quern.train.processes.agree import Agreement, describe

__all__ = ["BUFFER_BYTES", "Piece", "Read", "load_tensors", "needed_files", "save_pieces"]

Piece = tuple[str, ChunkStorageMetadata]
"""The name of a tensor, and a box of its elements."""
Read = Callable[[str, ChunkStorageMetadata], torch.Tensor]
"""Gives the elements of a piece, in memory of their own, row-major."""

#: What a load holds beside the tensors that it fills: this much of a file.
BUFFER_BYTES = 8 << 20
#: Unwanted bytes between wanted ones that are read rather than skipped: a disk reads them in the time of a seek.
GAP_BYTES = 256 << 10


def save_pieces(
    folder: str,
    files: Sequence[Sequence[Piece]],
    tensors: Mapping[str, TensorStorageMetadata],
    read: Read,
) -> dict[str, FileRecord]:
    """Write the pieces that ``files`` deals out below ``folder``, by one process; ``read`` gives the elements of each
    when its turn comes. The pieces of a name make the whole tensor, whose size and type ``tensors`` has.

    Returns the files, synced, with their checksums, ``.metadata`` among them.
    """
    pieces = [piece for file in files for piece in file]
    dtypes = {name: tensor.properties.dtype for name, tensor in tensors.items()}
    held = [tuple(StoredTensor(_name(dtypes[n]), (*box.sizes,), 0) for n, box in file) for file in files]
    named = [TensorFile(f"__0_{number}.distcp", own) for number, own in enumerate(held)]
    written = write_files(folder, named, lambda number: read(*pieces[number]))
    spots = [(name, *place) for name, file in written.items() for place in file.places]
    whole = {n: TensorStorageMetadata(TensorProperties(dtypes[n]), own.size, []) for n, own in tensors.items()}
    for name, box in pieces:
        whole[name].chunks.append(box)
    indices = (MetadataIndex(name, box.offsets) for name, box in pieces)
    places = {index: _StorageInfo(*spot) for index, spot in zip(indices, spots, strict=True)}
    metadata = pickle.dumps(Metadata(dict(whole), storage_data=places))
    records = {name: file.record for name, file in written.items()}
    return {**records, METADATA_FILE: write_file(os.path.join(folder, METADATA_FILE), metadata)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_tensors(
    folder: str,
    metadata: Metadata,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, int],
    agreement: Agreement,
) -> None:
    """Read into ``tensors`` in place, each rank of ``agreement`` its part; collective.

    Names, sizes and types must have been checked against ``metadata``. Beside the tensors a rank holds
    :data:`BUFFER_BYTES` and its plan.

    Raises:
        QuernError: on every rank, when a rank could not read.
    """

    def read() -> None:
        try:
            planner, items = _plan(metadata, tensors, rows)
            _Reader(folder, metadata).read(items, planner)
        except (OSError, RuntimeError, ValueError) as error:
            raise QuernError(f"{folder}: not loaded: {describe(error)}") from error

    agreement.all_or_raise(read)


def needed_files(metadata: Metadata, tensors: Mapping[str, torch.Tensor], rows: Mapping[str, int]) -> frozenset[str]:
    """Names of the files from which :func:`load_tensors` reads on this rank; not collective, and no file is opened.

    Names and sizes must have been checked against ``metadata``.
    """
    _, items = _plan(metadata, tensors, rows)
    places = metadata.storage_data or {}
    return frozenset(places[item.storage_index].relative_path for item in items)


def _plan(
    metadata: Metadata, tensors: Mapping[str, torch.Tensor], rows: Mapping[str, int]
) -> tuple[UnpaddedLoadPlanner, list[ReadItem]]:
    """What this rank reads, part by part."""
    planner = UnpaddedLoadPlanner(rows)
    planner.set_up_planner(dict(tensors), metadata)
    return planner, planner.create_local_plan().items


class _Reader:
    """Reads parts of stored pieces into tensors: file by file, in the order in which they lie, through one buffer."""

    def __init__(self, folder: str, metadata: Metadata) -> None:
        self._folder, self._metadata = folder, metadata
        self._buffer = bytearray(BUFFER_BYTES)

    def read(self, items: Sequence[ReadItem], planner: UnpaddedLoadPlanner) -> None:
        """Fill the tensors of ``planner``.

        Raises:
            QuernError: naming the file.
        """
        in_turn = sorted(items, key=lambda item: (self._slot(item).relative_path, self._slot(item).offset))
        for name, parts in groupby(in_turn, key=lambda item: self._slot(item).relative_path):
            file = os.path.join(self._folder, name)
            try:
                with open(file, "rb", buffering=0) as stream:
                    for item in parts:
                        self._part(file, stream, item, planner.resolve_tensor(item).detach())
            except OSError as error:
                raise QuernError(f"{file}: not loaded: cannot be read ({error.strerror or error})") from error

    def _slot(self, item: ReadItem) -> _StorageInfo:
        places: Mapping[MetadataIndex, _StorageInfo] = self._metadata.storage_data or {}
        return places[item.storage_index]

    def _part(self, file: str, stream: RawIOBase, item: ReadItem, target: torch.Tensor) -> None:
        """Read a part of a piece into ``target``, which has its sizes."""
        name, slot, offsets, sizes = item.storage_index.fqn, self._slot(item), item.storage_offsets, item.lengths
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        assert item.storage_index.index is not None
        whole, dtype = stored.chunks[item.storage_index.index].sizes, stored.properties.dtype
        try:
            first = locate(stream, slot, whole, dtype)
            if first is None:
                upper = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
                target.copy_(load_record(stream, slot, "cpu")[cut(offsets, upper, [0] * len(whole))])
                return
        except OSError:
            raise
        except Exception as error:  # a damaged record fails in a dozen ways, none of which means anything to the reader
            raise QuernError(
                f"{file}: {name}: not loaded: not a tensor of size {list(whole)} and type {dtype} "
                f"at byte {slot.offset} ({describe(error)})"
            ) from error
        around, around_sizes = _with_gaps(whole, offsets, sizes, dtype.itemsize)
        for box in boxes(around_sizes, BUFFER_BYTES // dtype.itemsize):
            start = [before + offset for before, offset in zip(around, box.offsets, strict=True)]
            if (shared := overlap(start, box.sizes, offsets, sizes)) is not None:
                held = self._read(stream, first, _runs(whole, start, box.sizes), dtype).view(box.sizes)
                target[cut(*shared, offsets)].copy_(held[cut(*shared, start)])

    def _read(self, stream: RawIOBase, first: int, runs: Iterable[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
        """The elements of ``runs`` in turn, of a piece that begins at byte ``first``; valid until the next call."""
        view, end = memoryview(self._buffer), 0
        for start, count in runs:
            stream.seek(first + start * dtype.itemsize)
            begin, end = end, end + count * dtype.itemsize
            fill(stream, view[begin:end])
        return torch.frombuffer(view, dtype=dtype, count=end // dtype.itemsize)


def _with_gaps(
    whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int
) -> tuple[list[int], list[int]]:
    """Offsets and sizes of a box around another, inside a tensor of size ``whole``: with those gaps between the runs of
    the other's elements that are shorter than :data:`GAP_BYTES`."""
    offsets, sizes = list(offsets), list(sizes)
    inner = itemsize
    for dim in range(len(whole) - 1, 0, -1):
        gap = (whole[dim] - sizes[dim]) * inner
        if gap >= GAP_BYTES or math.prod(sizes[:dim]) == 1:
            break
        offsets[dim], sizes[dim] = 0, whole[dim]
        inner *= whole[dim]
    return offsets, sizes


def _runs(whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(First, number) of the elements of a box in a tensor of size ``whole`` that lie without a gap, in row-major
    order."""
    dim = len(whole)
    while dim and (dim == len(whole) or sizes[dim] == whole[dim]):
        dim -= 1
    strides = [math.prod(whole[place + 1 :]) for place in range(len(whole))]
    for lead in product(
        *(range(offset, offset + size) for offset, size in zip(offsets[:dim], sizes[:dim], strict=True))
    ):
        place = (*lead, *offsets[dim:])
        yield sum(at * stride for at, stride in zip(place, strides, strict=True)), math.prod(sizes[dim:])
