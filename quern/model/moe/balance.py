"""Losses that keep a router's choices even and its logits small.

Shapes: B rows, l tokens of a row on this rank, T = B · l, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from quern.model.moe.config import MoEShape
from quern.model.moe.routing import Routing

__all__ = ["balance_losses", "carry", "z_losses"]


def balance_losses(
    found: Routing,
    moe: MoEShape,
    rows: int,
    seq_len: int,
    over: str,
    last_E: Tensor | None = None,
    total: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Tensor:
    """Σ over rows of ``E Σ_e f_e P_e`` (Fedus et al. 2021, equations 4 to 6, for K experts): 0-d, 1 a row where loads
    are even and softmax is the score. This rank's tokens' part of it: ranks that share rows add up to the whole.

    ``P_e`` is the mean of the row's scores, which are divided by their sum; ``f_e`` the share of assignments that go to
    e, without gradient: of the row (DeepSeek-V3, equations 17 to 20), of the micro-batch, or ``last_E``, counts of the
    last step's global batch; before the first one shares are even. ``total`` adds up counts over ranks that share rows.
    """
    experts, scores_TE = moe.num_experts, found.scores_TE
    if moe.score == "sigmoid":
        scores_TE = scores_TE / (scores_TE.sum(dim=1, keepdim=True) + 1e-20)
    means_BE = scores_TE.unflatten(0, (rows, -1)).sum(dim=1) / seq_len
    if over == "global":
        assert last_E is not None
        counts = last_E[None]
    else:
        chosen_BS = found.chosen_TK.detach().reshape(rows, -1)
        ones_BS = torch.ones_like(chosen_BS, dtype=scores_TE.dtype)
        counts = total(scores_TE.new_zeros(rows, experts).scatter_add(1, chosen_BS, ones_BS))
        counts = counts if over == "sequence" else counts.sum(dim=0, keepdim=True)
    assigned = counts.sum(dim=1, keepdim=True)
    shares = torch.where(assigned > 0, counts / assigned.clamp(min=1), 1 / experts)
    return experts * (shares.to(means_BE.dtype) * means_BE).sum()


def z_losses(found: Routing, seq_len: int) -> Tensor:
    """Σ over rows of the mean of ``log²Σ_e exp(logit_e)`` over tokens (Zoph et al. 2022, equation 5): this rank's
    tokens' part of it, 0-d."""
    return found.logits_TE.logsumexp(dim=1).square().sum() / seq_len


def carry(weights_TK: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
    """``weights_TK`` as they are; the backward pass that comes through them gives ``loss`` the gradient ``factor``
    (0-d), as if factor · loss were a part of what is minimised."""
    return cast(Tensor, _Carry.apply(weights_TK, loss, factor))


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor.to(loss.dtype, copy=True))
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grad_TK, factor, None
