"""Layouts put on by hand: what a rank holds of a tensor is cut out of the whole one with ``torch.chunk``.

First over ``tp``, then over ``dp_shard``: so FSDP2 does with tensors that are split already, and its placements say so.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from quern.parallel.planning.mesh import Mesh, MeshPlan


class Model(nn.Module):
    """Parameters by global name, and the shape that layouts look at."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shape: Any = None) -> None:
        super().__init__()
        self.shape = shape or types.SimpleNamespace(tied_embeddings=False)
        for name, parameter in parameters.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, parameter)


def cut(tensor: torch.Tensor, dim: int | None, plan: MeshPlan, at: Mapping[str, int]) -> torch.Tensor:
    """The part of ``tensor`` at a place; ``dim``: the dimension that ``tp`` splits, None where it does not."""
    if dim is not None:
        tensor = tensor.chunk(plan.tp, dim)[at["tp"]]
    if plan.by_fsdp:
        parts = tensor.chunk(plan.dp_shard)
        tensor = parts[at["dp_shard"]] if at["dp_shard"] < len(parts) else tensor[:0]
    return tensor.clone()


def laid_out(tensor: torch.Tensor, dim: int | None, mesh: Mesh) -> torch.Tensor:
    """That part on this rank, as a DTensor where it is one."""
    plan = mesh.plan
    dim = dim if plan.tp > 1 else None
    axes, placements = [], list[Placement]()
    if plan.by_fsdp:
        if plan.dp_replicate > 1:
            axes.append("dp_replicate")
            placements.append(Replicate())
        axes.append("dp_shard")
        placements.append(_StridedShard(0, split_factor=plan.tp) if dim == 0 else Shard(0))
    if dim is not None:
        axes.append("tp")
        placements.append(Shard(dim))
    at = plan.coordinates(torch.distributed.get_rank()) if axes else {}
    part = cut(tensor, dim, plan, at)
    if not axes:
        return part
    assert mesh.device_mesh is not None
    sub = mesh.device_mesh[tuple(axes)]
    return DTensor.from_local(part, sub, placements, shape=tensor.shape, stride=tensor.stride())


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This rank's part; a change in place is one of the whole."""
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
