"""AdamW (Loshchilov & Hutter 2019), fused, with a skip that is decided on the device."""

from __future__ import annotations

import torch
from torch import nn

from quern.train.config import OptimizerConfig

__all__ = ["build_optimizer", "step"]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Weight decay on matrices (embedding and head too), none on norm weights. Learning rates come with each step.

    Built after sharding: it holds the parameters that ``model`` has now.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def step(optimizer: torch.optim.AdamW, lr: float, skip: torch.Tensor | None = None) -> None:
    """One update with learning rate ``lr``, or none where ``skip`` is true.

    ``skip``: bool or 0/1, 0-d, on the parameters' device, the same on every rank. The host never reads it: the fused
    kernel does, as it does a gradient scaler's ``found_inf``, and then leaves weights, moments and the count of steps
    bitwise as they were, whatever the gradients hold.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = None if skip is None else skip.to(torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
