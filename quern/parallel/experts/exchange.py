"""Hands tokens out to the ranks that hold their experts, and sums up for each token what comes back.

A token travels once to a rank, whatever the number of its experts there, with the numbers and weights of those; the
rank weighs and sums what they give, and one row travels back (as DeepSeek-V3 does, 2412.19437, section 3.2.2). Where
``ep`` reaches over nodes, the same is done twice: once to each node that has an expert of the token, to the rank with
the sender's place there, and from it to the ranks of the node.

The host has to know how many rows come: it waits for the counts, once a stage. With a capacity every expert has as
many places for each rank's tokens, and nobody waits (:class:`Places`).

Shapes: R ranks, T tokens of this rank, K experts of a token, N rows that it sends, M rows that it gets, E experts of a
rank, C places of an expert, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quern.model.moe.rows import spread, summed, weighted
from quern.parallel.experts.all_to_all import AsyncAllToAll, all_to_all

__all__ = ["Compute", "Exchange", "Places", "Swiglu"]


class Compute(Protocol):
    """For each row the weighted sum of what its experts give, [M, D]; see :meth:`.Experts.multiply`."""

    def __call__(self, x_MD: Tensor, sent_MK: Tensor, weights_MK: Tensor, assigned: int | None, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Exchange:
    """Between ranks, or nodes, that hold equal parts of the experts, in the order of their numbers."""

    group: str
    """Name of the process group, in whose order they are."""
    ranks: int
    experts: int
    """Of each of them."""
    compute: Compute
    """What is done where the rows arrive, with numbers of experts from 0 on."""
    float8: bool = False
    """Whether tokens travel to experts in FP8."""

    def __call__(
        self, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor, assigned: int | None = None, /,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, D]; ``sent_TK`` of all experts, with one number too many for none. ``meanwhile`` is called while tokens
        are under way. Collective."""
        rank_TK = sent_TK // self.experts  # R: to none
        goes_RT = rank_TK.new_zeros(self.ranks + 1, len(rank_TK), dtype=torch.bool)
        goes_RT = goes_RT.scatter_(0, rank_TK.T, True)[: self.ranks]
        assigned_R = (rank_TK.flatten()[None] == torch.arange(self.ranks, device=rank_TK.device)[:, None]).sum(dim=1)
        counts_R2 = torch.stack((goes_RT.sum(dim=1), assigned_R), dim=1)
        even = [1] * self.ranks
        arriving_R2 = torch.ops._c10d_functional.wait_tensor(all_to_all(counts_R2, even, even, self.group))
        (leaving, _), (arriving, coming) = torch.stack((counts_R2, arriving_R2)).transpose(1, 2).tolist()

        # rows by rank, and by token within: the n-th is where the running count of those that go reaches n
        count_RT = goes_RT.flatten().cumsum(0)
        row_N = torch.searchsorted(count_RT, torch.arange(1, sum(leaving) + 1, device=count_RT.device))
        rank_N, token_N = row_N // max(len(rank_TK), 1), row_N % max(len(rank_TK), 1)
        there_TK = rank_TK < self.ranks
        row_TK = (count_RT.view(goes_RT.shape) - 1).T.gather(1, rank_TK.where(there_TK, 0))
        same_TKK = rank_TK[:, :, None] == rank_TK[:, None, :]
        first_TK = there_TK & ~same_TKK.tril(-1).any(dim=2)  # of a token's experts on one rank

        own_NK = rank_TK[token_N] == rank_N[:, None]
        sent_NK = (sent_TK[token_N] - rank_N[:, None] * self.experts).where(own_NK, self.experts)
        weights_NK = spread(weights_TK, token_N, row_TK, first_TK).where(own_NK, 0)
        told_NK = torch.cat((weights_NK, sent_NK.to(weights_NK.dtype)), dim=1)  # in one message: whole numbers
        way = AsyncAllToAll(leaving, arriving, self.group, float8=self.float8)
        telling = AsyncAllToAll(leaving, arriving, self.group)
        link_MD = way.start(spread(x_TD, token_N, row_TK, first_TK))
        link_MK = telling.start(told_NK)
        if meanwhile is not None:
            meanwhile()
        x_MD, told_MK = way.end(link_MD), telling.end(link_MK)
        weights_MK, sent_MK = told_MK.chunk(2, dim=1)
        y_MD = self.compute(x_MD, sent_MK.to(torch.int64), weights_MK, sum(coming))
        y_ND = AsyncAllToAll(arriving, leaving, self.group).whole(y_MD)
        return summed(y_ND, token_N, row_TK, first_TK).to(x_TD.dtype)


class Swiglu(Protocol):
    """Of rows sorted by expert, with int32 ends; see :meth:`.Experts.swiglu`."""

    def __call__(self, x_AD: Tensor, ends_E: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Places:
    """The same where experts have a capacity: of a rank's tokens each takes at most so many, and for so many there are
    places, which travel whether they are filled or not. The host waits for nothing."""

    group: str
    ranks: int
    experts: int
    """Of each rank."""
    limit: tuple[int, int]
    """Places of an expert for one token, numerator and denominator; to be rounded up for all of a call."""
    swiglu: Swiglu
    float8: bool = False

    def __call__(
        self, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """[T, D]. Collective."""
        total, places = self.ranks * self.experts, -(-len(sent_TK) * self.limit[0] // self.limit[1])
        there_TK, rows = sent_TK < total, total * places
        sorted_S, order_S = sent_TK.flatten().sort(stable=True)
        starts_E = torch.searchsorted(sorted_S, torch.arange(total + 1, device=order_S.device))
        row_S = sorted_S * places + torch.arange(len(order_S), device=order_S.device) - starts_E[sorted_S]
        row_TK = torch.empty_like(row_S).scatter(0, order_S, row_S).view(sent_TK.shape)
        place_A = order_S.new_zeros(rows + 1).scatter(0, row_S.clamp(max=rows), order_S)[:rows]  # the last: of none
        taken_E = starts_E.diff().repeat_interleave(places)
        filled_A1 = (torch.arange(rows, device=order_S.device) % places < taken_E)[:, None]
        x_AD = spread(x_TD, place_A // sent_TK.shape[1], row_TK, there_TK).where(filled_A1, 0)

        even, by_rank = [self.experts * places] * self.ranks, (self.ranks, self.experts, places)
        way = AsyncAllToAll(even, even, self.group, float8=self.float8)
        link_AD = way.start(x_AD)
        if meanwhile is not None:
            meanwhile()
        x_AD = way.end(link_AD).unflatten(0, by_rank).transpose(0, 1).flatten(0, 2)
        ends_E = torch.arange(1, self.experts + 1, device=order_S.device, dtype=torch.int32) * (self.ranks * places)
        y_AD = self.swiglu(x_AD, ends_E)
        y_AD = y_AD.unflatten(0, (self.experts, self.ranks, places)).transpose(0, 1).flatten(0, 2)
        y_AD = AsyncAllToAll(even, even, self.group).whole(y_AD).where(filled_A1, 0)
        return weighted(y_AD, weights_TK, place_A, row_TK, there_TK).to(x_TD.dtype)
