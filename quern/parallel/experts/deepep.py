"""The exchange of tokens by DeepEP's kernels (github.com/deepseek-ai/DeepEP, version 2), where that is installed.

Same rows, same sums as :class:`.exchange.Exchange`, but that its kernel adds up what travels back. It is called as its
README describes; **no part of this has met a GPU yet**.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from quern.parallel.experts.exchange import Compute

__all__ = ["Buffer", "DeepEP", "open_buffer"]


@dataclass(frozen=True, eq=False)
class Buffer:
    """The memory through which rows travel, of all layers."""

    kernels: Any
    tokens: int
    """Of a rank, at most."""


def open_buffer(group: ProcessGroup, tokens: int, dim: int, top_k: int) -> Buffer:
    """For so many tokens of each rank at a time. Collective."""
    import deep_ep

    return Buffer(deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=tokens, hidden=dim, num_topk=top_k), tokens)


@dataclass(frozen=True, eq=False)
class DeepEP:
    """In place of :class:`.exchange.Exchange`, between all ranks of ``ep``."""

    buffer: Buffer
    ranks: int
    experts: int
    """Of each rank."""
    compute: Compute

    def __call__(
        self, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor, assigned: int | None = None, /,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, D]; see :meth:`.exchange.Exchange.__call__`. Collective."""
        way = _Way(self)
        chosen_TK = sent_TK.where(sent_TK < self.ranks * self.experts, -1)
        x_MD, weights_MK = cast(tuple[Tensor, Tensor], _Dispatch.apply(x_TD, weights_TK, chosen_TK, way))
        if meanwhile is not None:
            meanwhile()
        way.event.current_stream_wait()
        sent_MK = way.chosen_MK.where(way.chosen_MK >= 0, self.experts)
        coming = sum(way.handle.num_recv_tokens_per_expert_list)
        y_MD = self.compute(x_MD, sent_MK, weights_MK, coming)
        return cast(Tensor, _Combine.apply(y_MD, way))


class _Way:
    """What one forward's dispatch leaves for what follows."""

    def __init__(self, own: DeepEP) -> None:
        self.kernels = own.buffer.kernels
        self.how = {
            "num_experts": own.ranks * own.experts,
            "num_max_tokens_per_rank": own.buffer.tokens,
        }
        self.handle: Any = None
        self.event: Any = None
        """Of the dispatch: what it gave must not be read before."""
        self.chosen_MK: Any = None
        """int64: of each row that came the numbers of its experts on this rank, -1 elsewhere."""


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, way: _Way) -> Any:
        ctx.way = way
        x_MD, way.chosen_MK, weights_MK, way.handle, way.event = way.kernels.dispatch(
            x_TD, topk_idx=chosen_TK, topk_weights=weights_TK, async_with_compute_stream=True, **way.how
        )
        return x_MD, weights_MK

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor, grad_MK: Tensor) -> Any:
        way: _Way = ctx.way
        grad_TD, grad_TK, event = way.kernels.combine(
            grad_MD.contiguous(), handle=way.handle, topk_weights=grad_MK.contiguous(), async_with_compute_stream=True
        )
        event.current_stream_wait()
        return grad_TD, grad_TK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        y_TD, _, event = way.kernels.combine(y_MD, handle=way.handle, async_with_compute_stream=True)
        event.current_stream_wait()
        return cast(Tensor, y_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        way: _Way = ctx.way
        grad_MD, _, _, _, event = way.kernels.dispatch(
            grad_TD.contiguous(), handle=way.handle, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return grad_MD, None
