"""How a model is laid out over ranks: the one place where the order is written down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quern.parallel.activation import checkpoint_blocks
from quern.parallel.data import materialise, replicate, shard
from quern.parallel.mesh import Mesh

__all__ = ["Layout", "parallelize"]


@dataclass(frozen=True)
class Layout:
    """What is done to a model besides the sizes of its mesh."""

    compute_dtype: torch.dtype
    reshard_after_forward: bool | int = True
    activation_checkpointing: str = "none"
    compile_backend: str | None = None
    """Of ``torch.compile``, block by block; None = not compiled."""


def parallelize(model: nn.Module, mesh: Mesh, layout: Layout, device: torch.device | None = None) -> nn.Module:
    """Checkpointing → compile → shard → memory → replicate. Wrong orders run, and train wrongly or waste memory.

    ``model`` has ``blocks`` (an ``nn.ModuleDict``) and may be on ``meta``: then its weights are allocated here, each
    rank's share alone, and hold nothing until :func:`quern.model.init.initialise` or a checkpoint fills them.
    Parameter names stay as they are in ``data.unwrapped`` of what is returned. ``device``: None = the current one of
    the mesh's kind.
    """
    # whatever splits tensors belongs here, above the rest: later wraps must see local shapes
    blocks = list(model.blocks.children())  # type: ignore[union-attr]
    checkpoint_blocks(blocks, layout.activation_checkpointing)  # first: what is compiled must contain the recomputation
    if layout.compile_backend is not None:
        for block in blocks:
            block.compile(backend=layout.compile_backend)  # before sharding, whose hooks then stay outside the graphs
    if mesh.fsdp is not None:  # owns the parameters from here on: whatever changes modules comes before
        shard(model, mesh.fsdp, compute_dtype=layout.compute_dtype, reshard_after_forward=layout.reshard_after_forward)
    materialise(model, device or torch.device(mesh.device_type))  # after sharding: no rank ever holds the whole model
    if mesh.ddp is not None:
        return replicate(model, mesh.ddp)  # last: its buckets are views of gradients that must exist
    return model
