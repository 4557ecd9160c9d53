"""The gradient's norm over all parameters and ranks, and clipping by it, without the host waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip", "global_grad_norm"]


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients as one vector: 0-d, on their device, the same bits on every rank.

    Gradients are already summed over ranks (plain, DDP) or are DTensors (FSDP2, HSDP), and are grouped by mesh, since
    no operator takes two. Parameters without a gradient count as zero. The dtype is that of the gradients.
    Collective where there are DTensors.
    """
    norms = []
    for group in _by_mesh(parameters).values():
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        raise ValueError("global_grad_norm: no parameter has a gradient")
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scales all gradients by ``max_norm / norm`` where that is below 1 (Pascanu et al. 2013), on device, in place.

    ``norm`` is :func:`global_grad_norm`'s; 1e-6 is added to it as :func:`torch.nn.utils.clip_grad_norm_` does. A
    norm that is not finite leaves gradients that are not either: the step must be skipped.
    """
    for group in _by_mesh(parameters).values():
        clip_grads_with_norm_(group, max_norm, norm)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    """Parameters that have a gradient, by its mesh (None: a plain tensor)."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return groups
