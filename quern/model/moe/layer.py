"""The layer that takes the feed-forward network's place: a router, experts, and experts that all tokens share.

Shapes: B batch, L sequence, T = B · L tokens, D model, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.moe.config import MoEShape
from quern.model.moe.experts import Experts
from quern.model.moe.routing import Routing, routing

__all__ = ["Gate", "MoE"]


class Gate(nn.Module):
    """Logits ``x Wᵀ`` in float32, or in the dtype of ``x`` where that is wider."""

    def __init__(self, dim: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, dim))

    def forward(self, x: Tensor) -> Tensor:
        compute = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(compute), self.weight.to(compute))


class MoE(nn.Module):
    """Mixture of experts (Shazeer et al. 2017): each token's ``top_k`` experts, weighted, and the shared ones."""

    bias: Tensor | None

    def __init__(self, moe: MoEShape, dim: int, shared: nn.Module | None = None) -> None:
        """``shared``: the network of ``shared_ffn_dim``, where there is one."""
        super().__init__()
        self.moe = moe
        self.router = Gate(dim, moe.num_experts)
        self.register_buffer("bias", torch.zeros(moe.num_experts) if moe.bias else None)
        self.experts = Experts(moe.num_experts, dim, moe.ffn_dim, drops=moe.capacity is not None)
        """Called with (x_TD, sent_TK, weights_TK, meanwhile); a layout may replace it."""
        self.shared = shared
        self.shared_gate = Gate(dim, 1) if moe.shared_gate else None
        self.on_routing: Callable[[Routing], None] | None = None
        """Called with each forward's routing; again where a block is computed again for the backward."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        found = self.route(x_TD)
        if self.on_routing is not None:
            self.on_routing(found)
        shared: list[Tensor] = []
        meanwhile = None if self.shared is None else lambda: shared.append(self.share(x_BLD))
        y_BLD: Tensor = self.experts(x_TD, found.sent_TK, found.weights_TK, meanwhile).view(x_BLD.shape)
        return y_BLD + shared[0] if shared else y_BLD

    def share(self, x_BLD: Tensor) -> Tensor:
        """What the shared experts give."""
        assert self.shared is not None
        shared_BLD: Tensor = self.shared(x_BLD)
        if self.shared_gate is None:
            return shared_BLD
        return shared_BLD * self.shared_gate(x_BLD).sigmoid().to(x_BLD.dtype)

    def route(self, x_TD: Tensor) -> Routing:
        """Experts and weights of each token; a layout that deals tokens or experts out may replace it."""
        return routing(self.router(x_TD), self.moe, self.bias)
