"""Number formats of a run: compute dtype, master weights, and FP16's loss scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quern.parallel.clip import local_part

__all__ = ["LossScale", "Precision", "precision_of"]


@dataclass(frozen=True)
class Precision:
    """``compute`` is of activations and of weights at use; ``master`` of weights, moments and reductions."""

    name: str
    compute: torch.dtype
    master: torch.dtype

    @property
    def scaled(self) -> bool:
        """Whether gradients would underflow without a loss scale (FP16's 5 exponent bits)."""
        return self.compute == torch.float16


def precision_of(name: str) -> Precision:
    """The precision by its name: ``bf16 | fp16 | fp32 | fp64``."""
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]
    return Precision(name, compute, torch.promote_types(compute, torch.float32))


class LossScale:
    """Dynamic loss scaling on device (Micikevicius et al. 2018, section 3.2; constants of ``torch.amp.GradScaler``).

    The scale halves at a step with a non-finite gradient and doubles after ``interval`` steps without one. Nothing here
    waits for the device.
    """

    def __init__(self, device: torch.device, *, enabled: bool, initial: float = 2.0**16, interval: int = 2000) -> None:
        self.enabled = enabled
        self.interval = interval
        self.scale = torch.tensor(initial if enabled else 1.0, device=device)
        self.good = torch.tensor(0.0, device=device)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The scaled loss, from which backward starts."""
        return loss * self.scale.to(loss.dtype) if self.enabled else loss

    def unscale_(self, parameters: list[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if not self.enabled:
            return
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self.scale.reciprocal())

    def update(self, non_finite: torch.Tensor) -> None:
        """``non_finite``: 0 or 1, the same on every rank."""
        if not self.enabled:
            return
        bad = non_finite.to(self.scale.dtype)
        grown = (self.good + 1 >= self.interval).to(self.scale.dtype) * (1 - bad)
        moved = self.scale * torch.where(bad > 0, 0.5, 1 + grown)
        self.scale = torch.where(torch.isfinite(moved), moved, self.scale)  # where nothing ever overflows
        self.good = (self.good + 1) * (1 - bad) * (1 - grown)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Two scalars; empty when there is no scaling."""
        return {"scale": self.scale, "good": self.good} if self.enabled else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """What :meth:`state_dict` gave; a run that changes its precision starts with a fresh scale."""
        if self.enabled and state:
            self.scale.copy_(state["scale"])
            self.good.copy_(state["good"])
