"""Copies tokens to where they are used, as rows, and sums up for each token what its rows became.

No sum is formed in an order that may change from run to run: both ways gather, by tables that are each other's inverse,
and nothing is added up where it comes from.

Shapes: T tokens, K places in which a token may be used, A rows, D values of a token.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["spread", "summed", "weighted"]


def spread(x_TD: Tensor, token_A: Tensor, row_TK: Tensor, there_TK: Tensor | None) -> Tensor:
    """The rows [A, D]: of each the token ``token_A``. ``row_TK``: in which rows a token is, where ``there_TK``; None =
    everywhere."""
    return cast(Tensor, _Spread.apply(x_TD, token_A, row_TK, there_TK))


def summed(y_AD: Tensor, token_A: Tensor, row_TK: Tensor, there_TK: Tensor | None) -> Tensor:
    """For each token the sum of its rows, [T, D], in at least float32; see :func:`spread`."""
    return cast(Tensor, _Summed.apply(y_AD, token_A, row_TK, there_TK))


def weighted(y_AD: Tensor, weights_TK: Tensor, place_A: Tensor, row_TK: Tensor, there_TK: Tensor | None) -> Tensor:
    """For each token the sum of its rows times ``weights_TK``, [T, D], in the wider of the two dtypes. ``place_A``: of
    each row the place, t · K + k."""
    return cast(Tensor, _Weighted.apply(y_AD, weights_TK, place_A, row_TK, there_TK))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_A: Tensor, row_TK: Tensor, there_TK: Tensor | None) -> Tensor:
        ctx.save_for_backward(row_TK, there_TK)
        return x_TD[token_A]

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor) -> Any:
        return _sum(grad_AD, *ctx.saved_tensors).to(grad_AD.dtype), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_AD: Tensor, token_A: Tensor, row_TK: Tensor, there_TK: Tensor | None) -> Tensor:
        ctx.save_for_backward(token_A)
        ctx.dtype = y_AD.dtype
        return _sum(y_AD, row_TK, there_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        (token_A,) = ctx.saved_tensors
        return grad_TD.to(ctx.dtype)[token_A], None, None, None


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_AD: Tensor, weights_TK: Tensor, place_A: Tensor, row_TK: Tensor, there_TK: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(y_AD, weights_TK, place_A, row_TK, there_TK)
        return _sum(y_AD, row_TK, there_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        y_AD, weights_TK, place_A, row_TK, there_TK = ctx.saved_tensors
        grad_AD = grad_TD[place_A // weights_TK.shape[1]]
        dy_AD = (grad_AD * weights_TK.flatten()[place_A][:, None]).to(y_AD.dtype)
        dw_A = (grad_AD * y_AD).sum(dim=1).to(weights_TK.dtype)
        dw_TK = [_rows(dw_A, row_T, there_T) for row_T, there_T in _places(row_TK, there_TK)]
        return dy_AD, torch.stack(dw_TK, dim=1), None, None, None


def _sum(y_AD: Tensor, row_TK: Tensor, there_TK: Tensor | None, weights_TK: Tensor | None = None) -> Tensor:
    """In the order of places; one after the other, so that no [T, K, D] is held."""
    wide = torch.promote_types(y_AD.dtype, torch.float32 if weights_TK is None else weights_TK.dtype)
    total_TD = y_AD.new_zeros(len(row_TK), y_AD.shape[1], dtype=wide)
    for place, (row_T, there_T) in enumerate(_places(row_TK, there_TK)):
        part_TD = _rows(y_AD, row_T, there_T)
        total_TD = total_TD + (part_TD if weights_TK is None else part_TD * weights_TK[:, place, None])
    return total_TD


def _places(row_TK: Tensor, there_TK: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    there = [None] * row_TK.shape[1] if there_TK is None else there_TK.unbind(1)
    return list(zip(row_TK.unbind(1), there, strict=True))


def _rows(y_A: Tensor, row_T: Tensor, there_T: Tensor | None) -> Tensor:
    """Zero where there is none: what no product has written may hold NaN, and 0 · NaN is NaN."""
    if there_T is None:
        return y_A[row_T]
    if len(y_A) == 0:
        return y_A.new_zeros(len(row_T), *y_A.shape[1:])
    rows = y_A[row_T.clamp(max=len(y_A) - 1)]
    return rows.where(there_T.view(-1, *(1,) * (rows.ndim - 1)), 0)
