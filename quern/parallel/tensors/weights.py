"""Weights of which every rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

__all__ = ["split", "to_local"]


def split(weight: Tensor, dims: Sequence[int], mesh: DeviceMesh) -> nn.Parameter:
    """This rank's equal part of a whole weight, which every axis of the mesh splits along one of ``dims``."""
    whole = part = weight.detach()
    for axis, dim in enumerate(dims):
        part = part.chunk(mesh.size(axis), dim)[mesh.get_local_rank(axis)]
    part = part.clone(memory_format=torch.contiguous_format)
    placements = [Shard(dim) for dim in dims]
    made = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(made, requires_grad=weight.requires_grad)


def to_local(weight: Tensor) -> Tensor:
    """What this rank holds, gathered by FSDP2 where there is one; with gradient."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
