"""Experts: sorts assignments of tokens by expert, multiplies each group by its expert's weights, and sorts back.

No sum is formed in an order that may change from run to run: a permutation's gradient is gathered by its inverse, never
added up where it comes from.

Shapes: T tokens, K experts of a token, S = T · K assignments, E experts, D model, F width of an expert.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.float8.recipe import Recipe
from quern.model.moe.products import multiply

__all__ = ["Experts"]


class Experts(nn.Module):
    """SwiGLU of each expert, ``w2(silu(w1 x) * w3 x)``, for the tokens that are sent to it."""

    def __init__(self, num_experts: int, dim: int, ffn_dim: int, *, drops: bool = False) -> None:
        """``drops``: whether some assignments may be to no expert."""
        super().__init__()
        self.drops = drops
        self.recipe: Recipe | None = None
        """Of all three products in FP8."""
        self.w1 = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))

    def forward(self, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """For each token the sum of its experts' results times their weights, [T, D]; ``sent_TK`` E = to no expert."""
        return self.multiply(x_TD, sent_TK, weights_TK, self.w1, self.w2, self.w3)

    def multiply(
        self, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
    ) -> Tensor:
        """The same with these weights, which may be a part of each expert's width."""
        num_experts, top_k = len(w1_EFD), sent_TK.shape[1]
        sorted_S, order_S = sent_TK.flatten().sort(stable=True)
        inverse_S = torch.empty_like(order_S).scatter(0, order_S, torch.arange(len(order_S), device=order_S.device))
        ends_E = torch.searchsorted(sorted_S, torch.arange(num_experts, device=order_S.device), right=True)
        x_SD = cast(Tensor, _Sorted.apply(x_TD, order_S, inverse_S, top_k))
        if self.drops:  # no product writes the rows of none, or their gradients: they may hold NaN, and 0 · NaN is NaN
            x_SD = x_SD.where((sorted_S < num_experts)[:, None], 0)
        w1, w2, w3 = (weight.to(x_TD.dtype) for weight in (w1_EFD, w2_EDF, w3_EFD))
        ends_E = ends_E.to(torch.int32)
        gate_SF, up_SF = (multiply(x_SD, weight, ends_E, self.recipe) for weight in (w1, w3))
        y_SD = multiply(F.silu(gate_SF) * up_SF, w2, ends_E, self.recipe)
        y_SD = cast(Tensor, _Unsorted.apply(y_SD, order_S, inverse_S))
        if self.drops:
            y_SD = y_SD.where((sent_TK < num_experts).view(-1, 1), 0)
        return (y_SD.view(*sent_TK.shape, -1) * weights_TK[:, :, None]).sum(dim=1).to(x_TD.dtype)


class _Sorted(torch.autograd.Function):
    """Tokens, each as often as it has experts, in the order of assignments by expert."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_S: Tensor, inverse_S: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.top_k = top_k
        return x_TD[order_S // top_k]

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> Any:
        (inverse_S,) = ctx.saved_tensors
        return grad_SD[inverse_S].unflatten(0, (-1, ctx.top_k)).sum(dim=1), None, None, None


class _Unsorted(torch.autograd.Function):
    """Rows by expert back in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(order_S)
        return y_SD[inverse_S]

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> Any:
        (order_S,) = ctx.saved_tensors
        return grad_SD[order_S], None, None
