"""Experts: sorts assignments of tokens by expert, multiplies each group by its expert's weights, and sums up by token.

Shapes: T tokens, K experts of a token, S = T · K assignments, A those that are multiplied, E experts, D model, F width
of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.float8.recipe import Recipe
from quern.model.moe.products import multiply
from quern.model.moe.rows import spread, weighted

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

    def forward(
        self, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """For each token the sum of its experts' results times their weights, [T, D]; ``sent_TK`` E = to no expert.
        ``meanwhile`` is called once, where tokens travel while they do."""
        return self.multiply(x_TD, sent_TK, weights_TK, self.w1, self.w2, self.w3, meanwhile=meanwhile)

    def multiply(
        self, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor,
        *, assigned: int | None = None, meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """The same with these weights, which may be a part of the experts, or of each one's width. ``assigned``: how
        many assignments are to an expert, where the host knows it."""
        num_experts, top_k = len(w1_EFD), sent_TK.shape[1]
        sorted_S, order_S = sent_TK.flatten().sort(stable=True)
        row_S = torch.empty_like(order_S).scatter(0, order_S, torch.arange(len(order_S), device=order_S.device))
        ends_E = torch.searchsorted(sorted_S, torch.arange(num_experts, device=order_S.device), right=True)
        row_TK, place_A = row_S.view(sent_TK.shape), order_S[:assigned]
        there_TK = sent_TK < num_experts if self.drops or assigned is not None else None
        x_AD = spread(x_TD, place_A // top_k, row_TK, there_TK)
        y_AD = self.swiglu(x_AD, ends_E.to(torch.int32), w1_EFD, w2_EDF, w3_EFD)
        y_TD = weighted(y_AD, weights_TK, place_A, row_TK, there_TK).to(x_TD.dtype)
        if meanwhile is not None:
            meanwhile()
        return y_TD

    def swiglu(self, x_AD: Tensor, ends_E: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
        """Of rows that are sorted by expert, [A, D]; those after the last end hold anything, and so do their
        gradients."""
        w1, w2, w3 = (weight.to(x_AD.dtype) for weight in (w1_EFD, w2_EDF, w3_EFD))
        gate_AF, up_AF = (multiply(x_AD, weight, ends_E, self.recipe) for weight in (w1, w3))
        return multiply(F.silu(gate_AF) * up_AF, w2, ends_E, self.recipe)
