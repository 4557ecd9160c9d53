"""Removes the vocabulary's padding from tensors on saving, and restores it on loading.

``embed.weight`` and ``head.weight``, and their moments, have ``padded_vocab_size`` rows in memory, on one rank or cut
into DTensor shards, and ``vocab_size`` rows in a checkpoint. The save planner clips every chunk at the last real row
and drops chunks that hold padding alone; the load planner reads into any padded size, and finds nothing to read for
the padding. So a checkpoint loads under any ``vocab_multiple`` and any layout.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

__all__ = ["PADDED", "UnpaddedLoadPlanner", "UnpaddedSavePlanner"]

#: Parameters whose rows are padded.
PADDED = ("embed.weight", "head.weight")


def _clip(item: WriteItem, rows: int | None) -> WriteItem | None:
    """``item`` without the rows from ``rows`` on; None when nothing is left."""
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn}: expected a tensor; nothing else is written to a checkpoint")
    offsets, sizes, size = data.chunk.offsets, data.chunk.sizes, data.size
    if rows is not None:
        kept = min(sizes[0], rows - offsets[0])
        if kept <= 0:
            return None
        sizes, size = torch.Size((kept, *sizes[1:])), torch.Size((rows, *size[1:]))
    if len(sizes) and 0 in sizes and 0 not in size:
        return None  # a rank beyond the end of a small tensor holds an empty shard
    return replace(item, tensor_data=replace(data, chunk=ChunkStorageMetadata(offsets, sizes), size=size))


class UnpaddedSavePlanner(DefaultSavePlanner):
    """Plans the write of a flat mapping name → tensor. ``rows``: number of real rows, by name, of padded tensors."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rows = rows

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        clipped = (_clip(item, self._rows.get(item.index.fqn)) for item in plan.items)
        self.plan = replace(plan, items=[item for item in clipped if item is not None])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert write_item.tensor_data is not None
        data = super().resolve_data(write_item)
        if write_item.index.fqn in self._rows:
            assert isinstance(data, torch.Tensor)
            return data[: write_item.tensor_data.chunk.sizes[0]]
        return data


class UnpaddedLoadPlanner(DefaultLoadPlanner):
    """Plans the read into a flat mapping name → tensor, padded or not; sizes are checked by the caller beforehand."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rows = rows

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        tensors: dict[str, Any] = dict(metadata.state_dict_metadata)
        for name, rows in self._rows.items():
            stored, held = tensors.get(name), state_dict.get(name)
            if isinstance(stored, TensorStorageMetadata) and held is not None and stored.size[0] == rows:
                tensors[name] = replace(stored, size=held.size())
        super().set_up_planner(state_dict, replace(metadata, state_dict_metadata=tensors), is_coordinator)
