"""AdamW (Loshchilov & Hutter 2019), with skips decided and gradients clipped on the device: torch's fused kernel, or
:class:`.AdamWBF16` where moments or gradients are in BF16; on the host by :class:`.HostOptimizer`."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quern.parallel.apply import Parallel
from quern.parallel.host_masters import HostMasters
from quern.train.config import OptimizerConfig
from quern.train.config.experts import OwnUpdateConfig
from quern.train.step.adamw_bf16 import AdamWBF16
from quern.train.step.host_optimizer import HostOptimizer

__all__ = ["Optimizer", "build_optimizer", "follow_updates", "step"]

Optimizer = torch.optim.AdamW | AdamWBF16 | HostOptimizer


def build_optimizer(model: nn.Module, config: OptimizerConfig, masters: HostMasters | None = None) -> Optimizer:
    """Weight decay on matrices (embedding and head too), none on norm weights; on experts and routers as the config
    says. Learning rates come with each step.

    Built after sharding: it holds the parameters that ``model`` has now, in groups of one mesh each, since no fused
    kernel takes two, or DTensors beside plain tensors. ``masters``: those of which ``model`` is, if it is on the host.
    """
    own = _own_updates(model, config)
    parameters: dict[tuple[float, float, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
            update = own.get(parameter, OwnUpdateConfig())
            decay = decay if update.weight_decay is None else update.weight_decay
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            parameters.setdefault((decay, update.lr_factor, mesh), []).append(parameter)
    groups = [
        {"params": alike, "weight_decay": decay, "lr_factor": factor}
        for (decay, factor, _), alike in parameters.items()
    ]
    betas = config.beta1, config.beta2
    found: torch.optim.AdamW | AdamWBF16
    if "bf16" in (config.moments, config.gradients):
        moments = torch.bfloat16 if config.moments == "bf16" else torch.float32
        found = AdamWBF16(groups, lr=config.lr, betas=betas, eps=config.eps, moments=moments)
    else:
        found = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    return found if masters is None else HostOptimizer(found, masters)


def _own_updates(model: nn.Module, config: OptimizerConfig) -> dict[nn.Parameter, OwnUpdateConfig]:
    """Of experts' and routers' weights, which masters on the host have under the same names."""
    parts = {".ffn.experts.": config.experts, ".ffn.router.": config.router}
    return {weight: own for name, weight in model.named_parameters() for part, own in parts.items() if part in name}


def follow_updates(parallel: Parallel, optimizer: Optimizer) -> None:
    """Weights on the device for the masters that are there, FP8 scales for these weights and for those that every
    update leaves, the step's largest values into the history, and biases of experts by the step's loads. Collective,
    updates too."""
    if isinstance(optimizer, HostOptimizer):
        optimizer.publish()
    gather, amaxes = parallel.float8_gather, parallel.amaxes
    if gather is not None:
        gather.update()
        optimizer.register_step_post_hook(lambda *_: gather.update())
    if (loads := parallel.loads) is not None:
        optimizer.register_step_post_hook(lambda own, *_: loads.update(own.found_inf))
    if amaxes is not None:
        reduce = partial(dist.all_reduce, op=dist.ReduceOp.MAX) if dist.is_initialized() else None
        optimizer.register_step_post_hook(lambda own, *_: amaxes.roll(reduce, own.found_inf))


def step(
    optimizer: Optimizer, lr: float, skip: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One update with learning rate ``lr`` times each group's ``lr_factor``, or none where ``skip`` is true.

    ``skip``: bool or 0/1, 0-d, on the parameters' device, the same on every rank. The host never reads it: the fused
    kernel does, as it does a gradient scaler's ``found_inf``, and then leaves weights, moments and the count of steps
    bitwise as they were, whatever the gradients hold.

    ``divisor``: float32, 0-d, likewise (:func:`quern.parallel.clip.clip_divisor`). The kernel divides gradients by it
    where it reads them, as by a gradient scaler's ``grad_scale``, so clipping is no pass over them of its own.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    optimizer.grad_scale = divisor  # type: ignore[union-attr]
    optimizer.found_inf = None if skip is None else skip.to(torch.float32)  # type: ignore[union-attr]
    optimizer.step()
