"""Products of rows that are sorted by expert with each expert's weight, as one operation and its gradients.

Operations of their own, so that a compiled block has them whole in every dtype (torch 2.13 traces ``grouped_mm`` in
BF16 alone), and selective checkpointing keeps what they gave.

Shapes: S rows, of which expert e has those from the end of e - 1 to its own; E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.model.float8.linear import Products, products
from quern.model.float8.recipe import Recipe

__all__ = ["multiply"]

_ALIGNED = 16
"""A row of what ``grouped_mm`` reads has to be a multiple of this many bytes."""


def multiply(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor, recipe: Recipe | None = None) -> Tensor:
    """``x Wᵀ`` [S, O]; ``ends_E`` int32. Rows after the last end hold anything, and so do their gradients.

    ``grouped_mm`` in float32 and half precision for sizes of whole 16 bytes (in BF16 the host does not wait for it);
    else a loop over experts. By a ``recipe`` (of FP8, without a history) each expert's product, and its gradients, are
    those of a linear layer for its rows alone, where blocks of tokens begin.
    """
    scaling, gradients = (None, None) if recipe is None else (recipe.scaling, recipe.gradients)
    return cast(Tensor, _multiply(x_SI, weight_EOI, ends_E, scaling, gradients))


@torch.library.custom_op("quern::multiply_experts", mutates_args=())
def _multiply(
    x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor, scaling: str | None, gradients: str | None, turned: bool = False
) -> Tensor:
    """``turned``: ``x`` [S, O] is the gradient of the output, and what is returned [S, I] that of the input."""
    by = _in_float8(scaling, gradients)
    if by is None and _grouped(x_SI, *weight_EOI.shape[1:]):
        return F.grouped_mm(x_SI, weight_EOI if turned else weight_EOI.mT, offs=ends_E)
    y = x_SI.new_zeros(len(x_SI), weight_EOI.shape[2 if turned else 1])
    for weight_OI, rows in zip(weight_EOI, _rows(ends_E), strict=True):
        if by is None:
            torch.mm(x_SI[rows], weight_OI if turned else weight_OI.T, out=y[rows])
        else:
            y[rows] = (by.grad_input if turned else by.forward)(x_SI[rows], weight_OI)
    return y


@torch.library.custom_op("quern::expert_gradients", mutates_args=())
def _of_weights(grad_SO: Tensor, x_SI: Tensor, ends_E: Tensor, scaling: str | None, gradients: str | None) -> Tensor:
    """[E, O, I]."""
    by = _in_float8(scaling, gradients)
    if by is not None:
        return torch.stack([by.grad_weight(grad_SO[rows], x_SI[rows]) for rows in _rows(ends_E)])
    if _grouped(x_SI, grad_SO.shape[1], x_SI.shape[1]):
        return F.grouped_mm(grad_SO.T, x_SI, offs=ends_E)
    return torch.stack([grad_SO[rows].T @ x_SI[rows] for rows in _rows(ends_E)])


def _in_float8(scaling: str | None, gradients: str | None) -> Products | None:
    return None if scaling is None else products(Recipe(cast(Any, scaling), cast(Any, gradients)))


def _grouped(x: Tensor, *widths: int) -> bool:
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and not any(width * x.element_size() % _ALIGNED for width in widths)


def _rows(ends_E: Tensor) -> Iterator[slice]:
    ends = ends_E.tolist()
    return map(slice, [0, *ends[:-1]], ends)


@_multiply.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, scaling: Any, gradients: Any, turned: bool = False) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if turned else 1])


@_of_weights.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor, scaling: Any, gradients: Any) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.recipe = inputs[3:5]


def _gradients(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, ...]:
    x_SI, weight_EOI, ends_E = ctx.saved_tensors
    grad_SO = grad_SO.contiguous()  # grouped_mm takes no expanded one
    dx_SI = _multiply(grad_SO, weight_EOI, ends_E, *ctx.recipe, turned=True)
    return dx_SI, _of_weights(grad_SO, x_SI, ends_E, *ctx.recipe), None, None, None, None


_multiply.register_autograd(_gradients, setup_context=_keep)
