"""Computes the gradient norm over all parameters and ranks and clips by it, without a host sync."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from quern.parallel.planning.mesh import Mesh

__all__ = ["Norms", "clip", "clip_divisor", "global_grad_norm", "local_part"]


@dataclass(frozen=True)
class Norms:
    """2-norms of this rank's parts of gradients that are sharded in the same way."""

    parameters: Sequence[nn.Parameter]
    groups: Sequence[dist.ProcessGroup]
    """Over which their elements are dealt out; all other ranks hold copies."""
    norms_P: torch.Tensor
    """On their device; P = parameters."""


def global_grad_norm(
    parameters: Iterable[nn.Parameter],
    stages: dist.ProcessGroup | None = None,
    mesh: Mesh | None = None,
    parts: list[Norms] | None = None,
) -> torch.Tensor:
    """The 2-norm of all gradients as one vector: 0-d, on their device, the same bits on every rank.

    Gradients are already summed over ranks (plain, DDP) or are DTensors (FSDP2, HSDP, split tensors), of which every
    element counts once. ``stages``: the ranks of a pipeline, each with parameters of its own. Parameters without a
    gradient count as zero. The dtype is that of the gradients, and float32 for BF16. Collective.

    ``mesh`` holds the groups by the names of their axes; None = each gradient's own mesh. Where a process has made
    equal meshes in turn, DTensor's caches may put an earlier one on a gradient, and not on every rank alike.

    Every rank adds up the same gathered norms in the same order: an all-reduce may round differently in two groups of
    replicas, whose weights would then part.

    ``parts`` is given the norms of this rank's parts, which are formed on the way.

    Raises ValueError if no parameter has a gradient, which a stage of a pipeline may not have.
    """
    parameters = list(parameters)
    alike: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], list[nn.Parameter], list[torch.Tensor]]] = {}
    layouts: dict[Any, tuple[list[nn.Parameter], list[torch.Tensor]]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        # a model has hundreds of gradients and a handful of layouts
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        if layout not in layouts:
            groups = _cut_over(gradient, mesh)
            name = tuple(group.group_name for group in groups)
            layouts[layout] = alike.setdefault(name, (groups, [], []))[1:]
        owners, gradients = layouts[layout]
        owners.append(parameter)
        gradients.append(local_part(gradient))
    norms = []
    for groups, owners, gradients in alike.values():
        rounded = gradients[0].dtype == torch.bfloat16
        norms_P = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32 if rounded else None))
        if parts is not None:
            parts.append(Norms(owners, groups, norms_P))
        norm = torch.linalg.vector_norm(norms_P)
        for group in groups:
            norm = _combined(norm, group)
        norms.append(norm)
    if norms:
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    elif stages is not None and parameters:
        total = torch.zeros((), dtype=parameters[0].dtype, device=parameters[0].device)
    else:
        raise ValueError("global_grad_norm: no parameter has a gradient")
    return total if stages is None else _combined(total, stages)


def clip_divisor(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """What gradients of this norm are divided by so that it is at most ``max_norm`` (Pascanu et al. 2013): 0-d, ≥ 1.

    ``norm`` is :func:`global_grad_norm`'s; 1e-6 is added to it as :func:`torch.nn.utils.clip_grad_norm_` does. A
    norm that is not finite leaves gradients that are not either: the step must be skipped.
    """
    return torch.clamp((norm + 1e-6) / max_norm, min=1.0)


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """The same in a pass of its own over the gradients: they are multiplied by ``max_norm / norm``, on device, in
    place."""
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part, of which a change in place is one of the gradient."""
    part: torch.Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return part.detach()


def _cut_over(gradient: torch.Tensor, whole: Mesh | None) -> list[dist.ProcessGroup]:
    """The groups over which the gradient's elements are dealt out, innermost axis first; none for a whole one."""
    if not isinstance(gradient, DTensor):
        return []
    mesh = gradient.device_mesh
    for placement in gradient.placements:
        if placement.is_partial():
            raise ValueError(f"global_grad_norm: expected gradients that are summed, got {placement}")
    cut = [not placement.is_replicate() and mesh.size(axis) > 1 for axis, placement in enumerate(gradient.placements)]
    axes = [axis for axis in reversed(range(mesh.ndim)) if cut[axis]]
    if whole is None:
        return [mesh.get_group(axis) for axis in axes]
    assert mesh.mesh_dim_names is not None
    return [whole.group(mesh.mesh_dim_names[axis]) for axis in axes]


def _combined(norm: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm of all ranks' parts, from the norm of each."""
    parts = norm.new_empty(dist.get_world_size(group))
    dist.all_gather(list(parts.split(1)), norm.reshape(1), group=group)
    return torch.linalg.vector_norm(parts)
