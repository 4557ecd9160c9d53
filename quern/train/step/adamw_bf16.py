"""AdamW over float32 masters with moments or gradients in BF16, which torch's fused kernel does not take.

Every sum is in float32; a moment is rounded to nearest as it is stored, and the update takes it as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quern.parallel.clip import local_part

__all__ = ["AdamWBF16"]

_PIECE = 1 << 16
"""Elements."""


class AdamWBF16(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with state as :class:`torch.optim.AdamW` has it: ``step``,
    ``exp_avg``, ``exp_avg_sq``, the last two in ``moments``.

    ``grad_scale`` and ``found_inf``, set before a step, mean what they mean to the fused kernel, and the host reads
    neither: gradients are divided by the one (they stay as they are), and where the other is not 0, weights, moments
    and count stay bitwise. ``compiled``: one kernel a parameter; None = on CUDA. DTensors are updated by their local
    parts.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float,
        moments: torch.dtype = torch.bfloat16, compiled: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "capturable": True})
        self.moments, self._compiled = moments, compiled
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._held: dict[tuple[Any, ...], list[Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; ``closure`` is not for this optimizer."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        device, lr, (beta1, beta2) = parameters[0].device, group["lr"], group["betas"]
        states = [self._state(parameter) for parameter in parameters]
        skip = self._constants(device, 0.0)[0] if self.found_inf is None else self.found_inf
        divisor = self._constants(device, 1.0)[0] if self.grad_scale is None else self.grad_scale
        constants = self._constants(device, beta1, 1 - beta1, beta2, 1 - beta2, group["eps"])
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, (skip == 0).to(torch.float32))
        count_P = torch.stack(counts).double()
        rates = (lr / (1 - beta1**count_P)).float().unbind()
        roots = (1 - beta2**count_P).sqrt().float().unbind()
        shrink = torch.full((), 1 - lr * group["weight_decay"], device=device)
        compiled = device.type == "cuda" if self._compiled is None else self._compiled
        update: Callable[..., None] = _compiled() if compiled else _in_pieces
        for parameter, state, rate, root in zip(parameters, states, rates, roots, strict=True):
            parts = [_flat(own) for own in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
            if parts[0].numel():
                update(*parts, rate, root, shrink, divisor, skip, *constants)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self.moments, memory_format=torch.preserve_format)
        return state

    def _constants(self, device: torch.device, *values: float) -> list[Tensor]:
        """As 0-d tensors, copied there once."""
        key = (device, *values)
        if key not in self._held:
            self._held[key] = list(torch.tensor(values, dtype=torch.float32, device=device).unbind())
        return self._held[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does, which makes moments of the parameters' dtype: they are rounded back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(self.moments)


def _flat(tensor: Any) -> Tensor:
    """This rank's elements in one dimension, so that one compiled kernel serves all parameters."""
    part = local_part(tensor)
    return part.view(-1) if part.is_contiguous() else part


def _update(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rate: Tensor, root: Tensor, shrink: Tensor,
    divisor: Tensor, skip: Tensor, beta1: Tensor, rest1: Tensor, beta2: Tensor, rest2: Tensor, eps: Tensor,
) -> None:  # fmt: skip
    """In place, of four tensors alike in size; the other arguments are 0-d."""
    kept = skip != 0
    g = gradient.float() / divisor
    m = beta1 * first.float() + rest1 * g
    v = beta2 * second.float() + rest2 * (g * g)
    updated = weight * shrink - rate * (m / (v.sqrt() / root + eps))
    weight.copy_(torch.where(kept, weight, updated))
    first.copy_(torch.where(kept, first, m.to(first.dtype)))
    second.copy_(torch.where(kept, second, v.to(second.dtype)))


def _in_pieces(*tensors: Tensor) -> None:
    """Without a compiler every operation makes a tensor; of pieces these stay in a core's cache."""
    for parts in zip(*(tensor.split(_PIECE) if tensor.ndim else (tensor,) for tensor in tensors[:4]), strict=True):
        _update(*parts, *tensors[4:])


@cache
def _compiled() -> Callable[..., None]:
    """A graph for all sizes of matrices, and one for vectors."""
    return torch.compile(_update, dynamic=True)
