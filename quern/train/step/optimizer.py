"""AdamW (Loshchilov & Hutter 2019), with skips decided and gradients clipped on the device: torch's fused kernel, or
:class:`.AdamWBF16` where moments or gradients are in BF16."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quern.train.config import OptimizerConfig
from quern.train.step.adamw_bf16 import AdamWBF16

__all__ = ["build_optimizer", "step"]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW | AdamWBF16:
    """Weight decay on matrices (embedding and head too), none on norm weights. Learning rates come with each step.

    Built after sharding: it holds the parameters that ``model`` has now, in groups of one mesh each, since no fused
    kernel takes two, or DTensors beside plain tensors.
    """
    parameters: dict[tuple[float, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            parameters.setdefault((decay, mesh), []).append(parameter)
    groups = [{"params": alike, "weight_decay": decay} for (decay, _), alike in parameters.items()]
    betas = config.beta1, config.beta2
    if "bf16" in (config.moments, config.gradients):
        moments = torch.bfloat16 if config.moments == "bf16" else torch.float32
        return AdamWBF16(groups, lr=config.lr, betas=betas, eps=config.eps, moments=moments)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def step(
    optimizer: torch.optim.AdamW | AdamWBF16, lr: float, skip: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One update with learning rate ``lr``, or none where ``skip`` is true.

    ``skip``: bool or 0/1, 0-d, on the parameters' device, the same on every rank. The host never reads it: the fused
    kernel does, as it does a gradient scaler's ``found_inf``, and then leaves weights, moments and the count of steps
    bitwise as they were, whatever the gradients hold.

    ``divisor``: float32, 0-d, likewise (:func:`quern.parallel.clip.clip_divisor`). The kernel divides gradients by it
    where it reads them, as by a gradient scaler's ``grad_scale``, so clipping is no pass over them of its own.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale = divisor  # type: ignore[union-attr]
    optimizer.found_inf = None if skip is None else skip.to(torch.float32)  # type: ignore[union-attr]
    optimizer.step()
