"""Routing: which experts each token is given to, and with which weights.

Shapes: T tokens of a call, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quern.model.moe.config import MoEShape

__all__ = ["Routing", "choose", "drop", "routing"]


class Routing(NamedTuple):
    """Where the tokens of a call go."""

    chosen_TK: Tensor
    """int64: experts of each token, best first."""
    weights_TK: Tensor
    """Of each in the token's result; gradients of the router come through them."""
    scores_TE: Tensor
    logits_TE: Tensor
    sent_TK: Tensor
    """``chosen_TK``, with E where capacity drops an assignment."""


def routing(logits_TE: Tensor, moe: MoEShape, bias_E: Tensor | None = None) -> Routing:
    """The routing by ``logits_TE``, in whose dtype scores and weights are. ``bias_E`` is added to scores for the choice
    alone. The host waits for nothing."""
    scores_TE = logits_TE.softmax(dim=1) if moe.score == "softmax" else logits_TE.sigmoid()
    merit_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    chosen_TK = choose(merit_TE, moe)
    weights_TK = scores_TE.gather(1, chosen_TK)
    if moe.normalize:  # sigmoids may all be 0; DeepSeek-V3 adds the same
        weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + (1e-20 if moe.score == "sigmoid" else 0))
    weights_TK = weights_TK * moe.scale
    return Routing(chosen_TK, weights_TK, scores_TE, logits_TE, drop(chosen_TK, weights_TK.detach(), moe))


def choose(merit_TE: Tensor, moe: MoEShape) -> Tensor:
    """The ``top_k`` experts of greatest merit among the best groups, greatest first, int64 [T, K]. Of equals the one
    with the lower number is greater, which ``torch.topk`` does not promise."""
    if moe.top_groups < moe.groups:
        merit_TGM = merit_TE.unflatten(1, (moe.groups, moe.group_size))
        best_TG = merit_TGM.sort(dim=2, descending=True).values[:, :, :2].sum(dim=2)
        rank_TG = best_TG.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
        merit_TE = merit_TGM.where((rank_TG < moe.top_groups)[:, :, None], -torch.inf).flatten(1)
    # a copy: as a view it would keep the order of all experts until the backward pass
    return merit_TE.sort(dim=1, descending=True, stable=True).indices[:, : moe.top_k].contiguous()


def drop(chosen_TK: Tensor, weights_TK: Tensor, moe: MoEShape) -> Tensor:
    """``chosen_TK`` with E in place of those that an expert has no room for: later tokens', or lower weights'."""
    if moe.limit is None:
        return chosen_TK
    tokens, most = len(chosen_TK), -(-len(chosen_TK) * moe.limit[0] // moe.limit[1])
    chosen_S = chosen_TK.flatten()
    # the order in which experts take assignments; a token gives an expert no two
    first_S = torch.arange(tokens * moe.top_k, device=chosen_TK.device)
    if moe.drop == "score":
        first_S = weights_TK.flatten().sort(descending=True, stable=True).indices
    by_expert_S = chosen_S[first_S].sort(stable=True)
    order_S = first_S[by_expert_S.indices]
    starts_E = torch.searchsorted(by_expert_S.values, torch.arange(moe.num_experts, device=chosen_TK.device))
    place_S = torch.arange(len(order_S), device=chosen_TK.device) - starts_E[by_expert_S.values]
    sent_S = by_expert_S.values.where(place_S < most, moe.num_experts)
    return torch.empty_like(sent_S).scatter(0, order_S, sent_S).view(chosen_TK.shape)
