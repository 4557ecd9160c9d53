"""Rewrites a checkpoint bit for bit into other files, in one process.

What is written is DCP's own format: each piece of a tensor a chunk by ``torch.save``, and DCP's ``.metadata``. Memory
depends neither on the model nor on how its tensors were cut: one piece of at most :data:`PIECE_BYTES`, and what of it
is being read (:mod:`quern.train.checkpoint.format.slices`).
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from quern import storage
from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.dcp import Read, save_pieces
from quern.train.checkpoint.format.file_locations import check_together
from quern.train.checkpoint.format.files import filled
from quern.train.checkpoint.format.folder import new_folder
from quern.train.checkpoint.format.manifest import METADATA_FILE, Manifest, is_tensor_file
from quern.train.checkpoint.format.metadata import read_metadata
from quern.train.checkpoint.format.publish import complete_folder, written_by
from quern.train.checkpoint.format.slices import StoredTensors, boxes
from quern.train.checkpoint.store.collect import check_target
from quern.train.checkpoint.tools.reader import verify
from quern.train.processes.agree import describe

__all__ = ["MIN_FILE_BYTES", "PIECE_BYTES", "Rewritten", "open_source", "reshard", "write_anew"]

#: Largest piece of a tensor that is held and stored as one chunk.
PIECE_BYTES = 256 << 20
#: Smallest bound on a file's size that can be asked for.
MIN_FILE_BYTES = 64 << 10
#: More than ``torch.save`` writes beside the elements of a tensor.
_RECORD_BYTES = 2048


@dataclass(frozen=True)
class Rewritten:
    """A checkpoint that was written anew."""

    source: str
    folder: str
    step: int
    optimizer: bool
    tensors: int
    files: Mapping[str, int]
    """Size of each file of tensors in bytes, by name."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**vars(self), "files": dict(self.files)}


def reshard(
    source: str, out: str, *, files: int | None = None, file_size: int | None = None, weights_only: bool = False
) -> Rewritten:
    """Write the checkpoint at ``source`` anew to the folder ``out``, whole or not at all, once its checksums are right.

    Its tensors go into ``files`` files of about equal size (none larger than 1.25 times the average, and some kB), or
    into files of at most ``file_size`` bytes; without either, into one. Everything else stays: step, position, scalars,
    ``extra`` tensors, moments, config, ranks file. ``weights_only`` leaves out what only a trainer needs: moments,
    ``extra`` tensors and scalars.

    Raises:
        InputError: ``source`` is no checkpoint or its files of tensors are elsewhere, ``out`` is taken, or the tensors
            cannot be dealt out so.
        QuernError: ``source`` is damaged, or a file could not be read or written.
    """
    stored, out = open_source(source, out)
    if weights_only:
        stored.tensors = {name: tensor for name, tensor in stored.tensors.items() if name.startswith("model.")}
    manifest, tensors = stored.manifest, stored.tensors
    return write_anew(stored, out, tensors, stored.read, files, file_size, manifest, weights_only=weights_only)


def open_source(source: str, out: str) -> tuple[StoredTensors, str]:
    """The checkpoint at ``source``, and the absolute path of the folder ``out`` that is to be written.

    Raises:
        InputError: as :func:`reshard`.
    """
    check_together(source)
    stored = StoredTensors(source)
    return stored, check_target(out, stored.manifest.step, source)


def write_anew(
    source: StoredTensors, out: str, tensors: Mapping[str, TensorStorageMetadata], read: Read, files: int | None,
    file_size: int | None, manifest: Manifest, *, weights_only: bool, documents: Mapping[str, bytes] | None = None,
) -> Rewritten:  # fmt: skip
    """Write ``tensors``, whose elements ``read`` gives, and a ``manifest`` to the folder ``out``, whole or not at all,
    once the checksums of ``source`` are right, whose small files go with them and ``documents`` besides.

    Raises:
        InputError, QuernError: as :func:`reshard`.
    """
    plan = _plan(tensors, files, file_size)
    problems = verify(source.path)
    if problems:
        raise QuernError(f"{problems[0]}; the checkpoint is damaged, nothing was written")
    small = (name for name in source.manifest.files if name != METADATA_FILE and not is_tensor_file(name))
    copied = {name: storage.read_bytes(os.path.join(source.path, name)) for name in small}
    try:
        with new_folder(out) as staged:
            pieces = [[(piece.name, piece.box) for piece in file] for file in plan]
            records = save_pieces(staged, pieces, tensors, read)
            sizes = {name: record.size for name, record in records.items() if name != METADATA_FILE}
            assert file_size is None or max(sizes.values()) <= file_size, sizes
            for name, tensor in read_metadata(staged, records).state_dict_metadata.items():
                assert isinstance(tensor, TensorStorageMetadata)
                assert tensor.size == tensors[name].size
            manifest = replace(manifest, files=records, written_by=written_by())
            if weights_only:
                types = {str(tensor.properties.dtype).removeprefix("torch.") for tensor in tensors.values()}
                manifest = replace(manifest, optimizer=False, scalars={}, precision="+".join(sorted(types)))
            complete_folder(staged, manifest, copied | dict(documents or {}))
    except (OSError, RuntimeError) as error:
        raise QuernError(f"{out}: not written: {describe(error)}") from error
    return Rewritten(source.path, out, manifest.step, manifest.optimizer, len(tensors), sizes)


@dataclass(frozen=True)
class _Piece:
    name: str
    box: ChunkStorageMetadata
    size: int
    """In bytes, of its elements."""


def _plan(tensors: Mapping[str, TensorStorageMetadata], files: int | None, file_size: int | None) -> list[list[_Piece]]:
    """Which pieces go into which file, in the order of names and elements."""
    total = sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors.values())
    if file_size is not None:
        if files is not None:
            raise InputError("files and file size: expected one of them")
        if file_size < MIN_FILE_BYTES:
            raise InputError(f"file size: expected at least {MIN_FILE_BYTES} bytes, got {file_size}")
        pieces = _pieces(tensors, min(PIECE_BYTES, file_size // 4 - _RECORD_BYTES))
        return filled(pieces, file_size, lambda piece: piece.size + _RECORD_BYTES) or [[]]
    count = 1 if files is None else files
    if count < 1:
        raise InputError(f"files: expected at least 1, got {count}")
    pieces = _pieces(tensors, PIECE_BYTES if count == 1 else min(PIECE_BYTES, total // (4 * count)))
    if len(pieces) < count:
        raise InputError(f"files: expected at most {len(pieces)}, as there are numbers to deal out, got {count}")
    return _dealt(pieces, count)


def _pieces(tensors: Mapping[str, TensorStorageMetadata], limit: int) -> list[_Piece]:
    """``limit``: bytes a piece at most, but for one that is a single element."""
    found = []
    for name, tensor in sorted(tensors.items()):
        itemsize = tensor.properties.dtype.itemsize
        for box in boxes(tensor.size, max(1, limit // itemsize)):
            found.append(_Piece(name, box, math.prod(box.sizes) * itemsize))
    return found


def _dealt(pieces: list[_Piece], count: int) -> list[list[_Piece]]:
    """The largest piece first, each to the file that has least (Graham's LPT rule)."""
    files = [(0, number) for number in range(count)]
    mine: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(pieces)), key=lambda place: -pieces[place].size):
        held, number = files[0]
        mine[number].append(place)
        heapq.heapreplace(files, (held + pieces[place].size + _RECORD_BYTES, number))
    return [[pieces[place] for place in sorted(places)] for places in mine]
