"""Initialises weights identically for every layout.

Every parameter is drawn in chunks of rows, each from a generator keyed by (seed, parameter name, chunk). A rank draws
the chunks that overlap its slice and keeps its part, so neither the number of ranks nor the way of sharding nor the
order of drawing changes a weight, and no rank ever holds a whole tensor that it does not own.
"""

from __future__ import annotations

import hashlib
import math
import re

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

# private: what FSDP2 calls its part of a tensor that another axis has split already; in 2.11 and 2.13
from torch.distributed.tensor.placement_types import _StridedShard

from quern.model.transformer import Transformer

__all__ = ["ROWS", "STD", "draw", "initialise", "local_slice"]

STD = 0.02
"""Standard deviation of all matrices but the residual outputs (GPT-2)."""
ROWS = 16
"""Rows of a chunk. Part of the definition of the weights: another value gives other weights."""

_NORM = re.compile(r"norm\.weight|blocks\.\d+\.(attention_norm|ffn_norm|attention\.[qk]_norm)\.weight")
_VOCABULARY = re.compile(r"(embed|head|tied)\.weight")
_RESIDUAL = re.compile(r"blocks\.\d+\.(attention\.wo\.weight|ffn\.(shared\.)?w2\.weight|ffn\.experts\.w2)")
_MATRIX = re.compile(
    r"blocks\.\d+\.(attention\.w[qkv]\.weight|ffn\.((shared\.)?w[13]|router|shared_gate)\.weight|ffn\.experts\.w[13])"
)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill all parameters in place: norms 1, padded vocabulary rows 0, matrices normal with mean 0. Buffers become 0.

    The standard deviation is :data:`STD`, and STD / √(2 · layers) for ``wo`` and ``w2``, whose outputs add up in the
    residual stream (GPT-2). Each expert's are drawn as tensors of their own, with its number in their names.
    ``tied.weight``, a second copy of the embedding, gets its values. Works on plain tensors and on DTensors as
    :func:`local_slice` knows them, on any device but meta; each value is drawn on the CPU in float32.

    Raises ValueError for a parameter whose name has no rule, and for placements that :func:`local_slice` refuses.
    """
    shape = model.shape
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if _NORM.fullmatch(name):
            local.fill_(1.0)
            continue
        if _RESIDUAL.fullmatch(name):
            std = STD / math.sqrt(2 * shape.num_layers)
        elif _MATRIX.fullmatch(name) or _VOCABULARY.fullmatch(name):
            std = STD
        else:
            raise ValueError(f"{name}: no rule says how to initialise this parameter")
        local.zero_()  # the padding, if any
        part, size = local_slice(parameter), tuple(parameter.shape)
        if len(size) == 3:
            for expert, own in zip(range(part[0].start, part[0].stop), local, strict=True):
                _fill(own, name.replace("experts", f"experts.{expert}"), size[1:], part[1:], size[1], seed, std)
            continue
        num_rows = shape.vocab_size if _VOCABULARY.fullmatch(name) else size[0]
        _fill(local, "embed.weight" if name == "tied.weight" else name, size, part, num_rows, seed, std)
    for buffer in model.buffers():
        buffer.zero_()


def _fill(
    local: Tensor, key: str, size: tuple[int, ...], part: tuple[slice, ...], num_rows: int, seed: int, std: float
) -> None:
    """Chunk by chunk: a second copy of a large embedding may not fit."""
    rows, *columns = part
    start, stop = rows.start, min(rows.stop, num_rows)
    while start < stop:
        end = min((start // ROWS + 1) * ROWS, stop)
        values = draw(key, size, seed, start, end)[:, *columns]
        local[start - rows.start : end - rows.start].copy_(values * std)
        start = end


def draw(name: str, shape: tuple[int, ...], seed: int, start_row: int, stop_row: int) -> Tensor:
    """Rows ``start_row`` to ``stop_row`` of the standard normal float32 tensor that belongs to (seed, name).

    A pure function; the columns are always all columns. float32 [stop_row - start_row, *shape[1:]] on the CPU.
    """
    if not 0 <= start_row <= stop_row <= shape[0]:
        raise ValueError(f"{name}: expected 0 ≤ start ≤ stop ≤ {shape[0]} rows, got {start_row} and {stop_row}")
    parts = [torch.empty(0, *shape[1:])]
    for first in range(start_row // ROWS * ROWS, stop_row, ROWS):
        key = hashlib.blake2b(f"{seed}\0init\0{name}\0{first // ROWS}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
        # always a whole chunk, at the tensor's end too: what a row holds depends on nothing but its number
        chunk = torch.randn(ROWS, *shape[1:], generator=generator, dtype=torch.float32, device="cpu")
        parts.append(chunk[max(start_row - first, 0) : stop_row - first])
    return torch.cat(parts)


def local_slice(parameter: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, a slice for each dimension; all of it for a plain tensor.

    Follows :func:`torch.chunk`, as DTensor does: parts of ⌈n / ranks⌉, the last ones shorter or empty. A dimension
    sharded over several mesh axes is split by the first axis first; but FSDP2, which comes to a tensor that tensor
    parallelism has split, shards what it finds, and though its axis stands before the other one, it splits last.

    Raises ValueError for other placements.
    """
    bounds = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError("this rank holds no part of the parameter's mesh")
        for axis in _in_order_of_splitting(parameter):
            dim = placements[axis].dim  # type: ignore[attr-defined]
            start, stop = bounds[dim]
            width = -(-(stop - start) // mesh.size(axis))
            first = min(start + coordinate[axis] * width, stop)
            bounds[dim] = first, min(first + width, stop)
    return tuple(slice(start, stop) for start, stop in bounds)


def _in_order_of_splitting(parameter: DTensor) -> list[int]:
    """The mesh axes that split a parameter."""
    placements, mesh = parameter.placements, parameter.device_mesh
    plain = [axis for axis, placement in enumerate(placements) if type(placement) is Shard]
    late = [axis for axis, placement in enumerate(placements) if type(placement) is _StridedShard]
    for axis, placement in enumerate(placements):
        if axis not in (*plain, *late) and type(placement) is not Replicate:
            raise ValueError(f"expected placements Shard and Replicate, or FSDP2's over these, got {placement}")
    for axis in late:
        placement = placements[axis]
        assert isinstance(placement, _StridedShard)
        before = [other for other in plain if other > axis and placements[other].dim == placement.dim]  # type: ignore[attr-defined]
        if len(late) > 1 or placement.split_factor != math.prod(mesh.size(other) for other in before):
            raise ValueError(f"expected one axis that splits what all later ones left, got {placements}")
    return [*plain, *late]
