"""Tensors that lie in a checkpoint's files as any layout may leave them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def cuts(length: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """``length`` in one to four stretches."""
    inner = random.choice(np.arange(1, length), min(int(random.integers(4)), length - 1), replace=False)
    return list(itertools.pairwise([0, *sorted(int(cut) for cut in inner), length]))


def write_pieces(
    folder: Path, tensors: Mapping[str, torch.Tensor], random: np.random.Generator, *, odd: bool = False
) -> Metadata:
    """``tensors`` in pieces of random grids, in three files. ``odd``: the order of dimensions is turned round."""
    chunks: dict[str, Any] = {}
    pieces = []
    for name, tensor in tensors.items():
        chunks[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [])
        for box in itertools.product(*(cuts(length, random) for length in tensor.shape)):
            piece = tensor[tuple(slice(*stretch) for stretch in box)].clone(memory_format=torch.contiguous_format)
            if odd:
                order = tuple(reversed(range(piece.dim())))
                piece = piece.permute(order).contiguous().permute(order)
            chunk = ChunkStorageMetadata(torch.Size(start for start, _ in box), piece.size())
            chunks[name].chunks.append(chunk)
            pieces.append((MetadataIndex(name, chunk.offsets), piece))
    places = {}
    for number in random.permutation(len(pieces)):
        index, piece = pieces[number]
        file = f"__{random.integers(3)}_0.distcp"
        with open(folder / file, "ab") as stream:
            begin = stream.tell()
            torch.save(piece, stream)
            places[index] = _StorageInfo(file, begin, stream.tell() - begin)
    return Metadata(chunks, None, places)
