"""AdamW and the norm of gradients alone: time, bytes that have to be moved, and whether the update is right."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parts.common import distance, gpu, seconds_of, shape_of, sized
from quern.model.transformer import Block
from quern.parallel.clip import clip_divisor, global_grad_norm
from quern.train.config import OptimizerConfig
from quern.train.step.optimizer import build_optimizer, step

LR = 1e-4


def adamw(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The update, with and without clipping where it reads gradients; and the norm that clipping needs. ``bf16``:
    moments and gradients in BF16, for which the update is not torch's, and leaves gradients as they are."""
    device, bf16 = gpu(spec), spec.get("bf16", False)
    model = blocks(spec, device)
    parameters = list(model.parameters())
    config, said = config_of(spec), ", BF16" if bf16 else ""
    optimizer, skip = build_optimizer(model, config), torch.zeros((), device=device)
    step(optimizer, LR, skip)  # makes the moments
    count = sum(parameter.numel() for parameter in parameters)
    one = torch.ones((), device=device)  # of a divisor the kernel does not ask whether it is one
    found: list[dict[str, Any]] = []
    for name, divisor in (("AdamW", None), ("AdamW that clips", one)):
        seconds = seconds_of(lambda divisor=divisor: step(optimizer, LR, skip, divisor), device)
        clips = divisor is not None and not bf16
        found.append({"what": name + said, "parameters": count,
                      **sized(seconds, moved=moved(optimizer, clips=clips))})  # fmt: skip
    norm = {"what": "norm of gradients" + said, "parameters": count, **sized(
        seconds_of(lambda: global_grad_norm(parameters), device),
        moved=sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None))}  # fmt: skip
    return [*found, norm]


def right(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """One clipped update beside the paper's (Loshchilov & Hutter 2019, algorithm 2) in float64, from moments as they
    are after another step."""
    device, config = gpu(spec), config_of(spec)
    model = blocks(spec, device)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, config)
    step(optimizer, LR)
    exact_norm = torch.stack([parameter.grad.double().square().sum() for parameter in parameters]).sum().sqrt()
    norm = global_grad_norm(parameters)
    before = [
        (parameter.detach().double(), parameter.grad.double(), *(
            optimizer.state[parameter][name].double() for name in ("exp_avg", "exp_avg_sq")))
        for parameter in parameters
    ]  # fmt: skip
    step(optimizer, LR, None, clip_divisor(spec["clip"], norm))  # which leaves the gradients clipped
    worst = {"weight": 0.0, "change": 0.0, "moments": 0.0}
    for parameter, (weight, gradient, first, second) in zip(parameters, before, strict=True):
        gradient = gradient / max(1.0, float((exact_norm + 1e-6) / spec["clip"]))
        first = config.beta1 * first + (1 - config.beta1) * gradient
        second = config.beta2 * second + (1 - config.beta2) * gradient**2
        for name, moment in (("exp_avg", first), ("exp_avg_sq", second)):
            worst["moments"] = max(worst["moments"], distance(optimizer.state[parameter][name], moment))
        decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        corrected = first / (1 - config.beta1**2), (second / (1 - config.beta2**2)).sqrt() + config.eps
        after = weight * (1 - LR * decay) - LR * corrected[0] / corrected[1]
        worst["weight"] = max(worst["weight"], distance(parameter.detach(), after))
        worst["change"] = max(worst["change"], distance(parameter.detach().double() - weight, after - weight))
    # moments are rounded to nearest as they are stored, by half a step of 2^-7 at most
    bounds = {"weight": 1e-6, "change": 2e-4, "moments": 2**-8 if spec.get("bf16") else 1e-6, "norm": 1e-5}
    worst["norm"] = float((norm.double() - exact_norm).abs() / exact_norm)
    return [{"what": f"{name} beside float64", "error": worst[name], "bound": bound, "passes": worst[name] <= bound}
            for name, bound in bounds.items()]  # fmt: skip


def config_of(spec: dict[str, Any]) -> OptimizerConfig:
    """The trainer's defaults, or moments and gradients in BF16."""
    dtype = "bf16" if spec.get("bf16") else "fp32"
    return OptimizerConfig(moments=dtype, gradients=dtype)


def moved(optimizer: torch.optim.Optimizer, *, clips: bool) -> int:
    """Weights, gradients and moments are read, all but gradients written, and these too where they are divided on the
    way: bytes of the tensors that are there."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            kept = parameter.nbytes + state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
            total += 2 * kept + (2 if clips else 1) * parameter.grad.nbytes
    return total


def blocks(spec: dict[str, Any], device: torch.device) -> nn.Module:
    """With float32 weights, and gradients in float32 or BF16."""
    shape = shape_of(spec)
    torch.manual_seed(0)
    with device:
        model = nn.ModuleList(Block(shape, layer) for layer in range(spec["blocks"]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        if spec.get("bf16"):
            parameter.grad_dtype = torch.bfloat16
        parameter.grad = torch.randn_like(parameter).to(parameter.grad_dtype)
    return model
