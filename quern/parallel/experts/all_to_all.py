"""Rows that travel between ranks while something else is computed, and their gradients, which do on the way back.

Autograd has two nodes for an all-to-all, its start and its end. Whatever is computed between them forward is
differentiated between them backward, so that it overlaps both ways. What links the nodes holds nothing: rows that have
not arrived must not be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from quern.model.float8.quantise import E4M3, Quantised, blocks_1x128
from quern.model.float8.recipe import BLOCK
from quern.parallel.experts.turns import BACKWARD, FORWARD, pass_on

__all__ = ["AsyncAllToAll", "all_to_all"]


def all_to_all(rows: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: str) -> Tensor:
    """Rows in the order of ranks to these, so many to each, for those that are arriving; not before
    ``wait_tensor``."""
    return cast(Tensor, torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), arriving, leaving, group))


class AsyncAllToAll:
    """Of rows [N, D] in the order of ranks to those ranks, for rows [M, D]. ``float8``: in E4M3, with a scale for each
    128 values, as DeepSeek-V3's (2412.19437, section 3.3); gradients travel in the dtype of the rows."""

    def __init__(self, leaving: Sequence[int], arriving: Sequence[int], group: str, *, float8: bool = False) -> None:
        self.leaving, self.arriving, self.group, self.float8 = list(leaving), list(arriving), group, float8
        self.under_way: Tensor | None = None

    def start(self, rows_ND: Tensor) -> Tensor:
        """What :meth:`end` takes."""
        return cast(Tensor, _Start.apply(rows_ND, self))

    def end(self, link_MD: Tensor) -> Tensor:
        """[M, D], once they are here."""
        return cast(Tensor, _End.apply(link_MD, self))

    def whole(self, rows_ND: Tensor) -> Tensor:
        """Both."""
        return self.end(self.start(rows_ND))

    def arrived(self) -> Tensor:
        """What has been under way."""
        rows, self.under_way = self.under_way, None
        return cast(Tensor, torch.ops._c10d_functional.wait_tensor(rows))


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, way: AsyncAllToAll) -> Tensor:
        ctx.way = way
        sent = _packed(rows_ND) if way.float8 else rows_ND
        way.under_way = all_to_all(sent, way.leaving, way.arriving, way.group)
        pass_on(FORWARD)
        return _link(rows_ND, sum(way.arriving))

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.way.arrived(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link_MD: Tensor, way: AsyncAllToAll) -> Tensor:
        ctx.way = way
        rows = way.arrived()
        return _unpacked(rows, link_MD) if way.float8 else rows

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> Any:
        way: AsyncAllToAll = ctx.way
        way.under_way = all_to_all(grad_MD, way.arriving, way.leaving, way.group)
        pass_on(BACKWARD)
        return _link(grad_MD, len(grad_MD)), None


def _link(like: Tensor, rows: int) -> Tensor:
    """Of the size and dtype of rows, with the memory of one value."""
    return like.new_zeros(()).expand(rows, like.shape[1])


def _packed(rows_ND: Tensor) -> Tensor:
    """Bytes: of each row its values, padded to whole blocks, then their scales."""
    quantised = blocks_1x128(rows_ND)
    width = quantised.scale.shape[1] * quantised.scale.itemsize
    scales = quantised.scale.flatten().view(torch.uint8).view(-1 if len(rows_ND) else 0, width)  # of none: any stride
    return torch.cat((quantised.data_RS.view(torch.uint8), scales), dim=1)


def _unpacked(packed: Tensor, like_MD: Tensor) -> Tensor:
    width = like_MD.shape[1]
    values = -(-width // BLOCK) * BLOCK
    wide = torch.promote_types(like_MD.dtype, torch.float32)
    scale = packed[:, values:].contiguous().view(wide)
    quantised = Quantised(packed[:, :values].view(E4M3), scale)
    return quantised.dequantised(wide)[:, :width].to(like_MD.dtype)
