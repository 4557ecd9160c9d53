"""A linear layer whose three products are computed by a recipe in FP8, or with a weight that is kept for them.

``y = x Wᵀ``, ``dx = dy W``, ``dW = dyᵀ x``; shapes: T tokens, K inputs, O outputs. What is multiplied is rounded from
the dtype of activations, weights too, so that a weight gathered in that dtype gives the same bits as its master.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quern.model.float8.accumulate import add_product
from quern.model.float8.delayed import GRADIENT, INPUT, WEIGHT, Delayed
from quern.model.float8.needed_grads import needed_grads
from quern.model.float8.product import multiply
from quern.model.float8.quantise import E4M3, E5M2, Quantised, blocks_1x128, blocks_128x128, rowwise, tensorwise
from quern.model.float8.recipe import Recipe
from quern.model.float8.torchao import Torchao
from quern.model.float8.weight import Float8Weight, factor

__all__ = ["PLAIN", "Kept", "Products", "Weighted", "apply_linear", "products", "weighted"]


class Products(Protocol):
    """The products of a linear layer, each in the dtype of its first factor."""

    def forward(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        """``x Wᵀ`` [T, O]."""

    def grad_input(self, dy_TO: Tensor, weight_OK: Tensor) -> Tensor:
        """``dy W`` [T, K]."""

    def forward_by(self, weight_OK: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """:meth:`forward` of any number of ``x_TK`` of a dtype, for which the weight is cast once."""

    def grad_input_by(self, weight_OK: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The same of :meth:`grad_input`."""

    def grad_weight(self, dy_TO: Tensor, x_TK: Tensor) -> Tensor:
        """``dyᵀ x`` [O, K]."""


class Weighted(Products, Protocol):
    """Products with a weight in the form in which they take it, which may be kept as long as the weight stays."""

    delayed: bool
    """Whether scales are those of a history, which a forward adds to."""

    def factor(self, weight_OK: Tensor) -> Any:
        """Of a weight in the dtype of activations, for :meth:`times`: a tensor, or a Quantised."""

    def turned(self, weight_OK: Tensor) -> Any:
        """The same for :meth:`times_turned`."""

    def times(self, x_TK: Tensor, factor: Any) -> Tensor:
        """``x Wᵀ`` [T, O]."""

    def times_turned(self, dy_TO: Tensor, turned: Any) -> Tensor:
        """``dy W`` [T, K]."""


class _Weighted:
    delayed = False

    def forward(self: Weighted, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        return self.forward_by(weight_OK, x_TK.dtype)(x_TK)

    def grad_input(self: Weighted, dy_TO: Tensor, weight_OK: Tensor) -> Tensor:
        return self.grad_input_by(weight_OK, dy_TO.dtype)(dy_TO)

    def forward_by(self: Weighted, weight_OK: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        factor = self.factor(weight_OK.to(dtype))
        return lambda x_TK: self.times(x_TK, factor)

    def grad_input_by(self: Weighted, weight_OK: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        turned = self.turned(weight_OK.to(dtype))
        return lambda dy_TO: self.times_turned(dy_TO, turned)


class _Plain(_Weighted):
    def factor(self, weight_OK: Tensor) -> Tensor:
        return weight_OK

    turned = factor

    def times(self, x_TK: Tensor, factor: Tensor) -> Tensor:
        return x_TK @ factor.T

    def times_turned(self, dy_TO: Tensor, turned: Tensor) -> Tensor:
        return dy_TO @ turned

    def grad_weight(self, dy_TO: Tensor, x_TK: Tensor) -> Tensor:
        return dy_TO.T @ x_TK


@dataclass(frozen=True)
class _Float8(_Weighted):
    recipe: Recipe

    def factor(self, weight_OK: Tensor) -> Quantised:
        if isinstance(weight_OK, Float8Weight):
            return factor(weight_OK)
        return {"tensorwise": tensorwise, "rowwise": rowwise, "blockwise": blocks_128x128}[self.recipe.scaling](
            weight_OK
        )

    def turned(self, weight_OK: Tensor) -> Quantised:
        return rowwise(weight_OK.T) if self.recipe.scaling == "rowwise" else self.factor(weight_OK).transposed

    def times(self, x_TK: Tensor, factor: Quantised) -> Tensor:
        return multiply(self.activation(x_TK), factor, x_TK.dtype, fast=True)

    def times_turned(self, dy_TO: Tensor, turned: Quantised) -> Tensor:
        return multiply(self.gradient(dy_TO), turned, dy_TO.dtype)

    def grad_weight(self, dy_TO: Tensor, x_TK: Tensor) -> Tensor:
        if self.recipe.scaling != "tensorwise":
            return multiply(self.gradient(dy_TO.T), self.activation(x_TK.T), dy_TO.dtype)
        # what the other products take, turned: in a compiled block both are rounded once, from one largest magnitude
        return multiply(self.gradient(dy_TO).transposed, self.activation(x_TK).transposed, dy_TO.dtype)

    def activation(self, x_RS: Tensor) -> Quantised:
        return self._cast(x_RS, E4M3)

    def gradient(self, dy_RS: Tensor) -> Quantised:
        return self._cast(dy_RS, E5M2 if self.recipe.gradients == "e5m2" else E4M3)

    def _cast(self, x_RS: Tensor, dtype: torch.dtype) -> Quantised:
        how = {"tensorwise": tensorwise, "rowwise": rowwise, "blockwise": blocks_1x128}[self.recipe.scaling]
        return how(x_RS, dtype)


@dataclass(frozen=True)
class _Delayed(_Float8):
    delayed = True
    recipe: Delayed

    def factor(self, weight_OK: Tensor) -> Quantised:
        return factor(weight_OK) if isinstance(weight_OK, Float8Weight) else self.recipe.quantise(weight_OK, WEIGHT)

    def activation(self, x_RS: Tensor) -> Quantised:
        return self.recipe.quantise(x_RS, INPUT)

    def _cast(self, x_RS: Tensor, dtype: torch.dtype) -> Quantised:
        return self.recipe.quantise(x_RS, GRADIENT, dtype)


PLAIN = _Plain()
"""In the dtype of activations."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Products with a weight that is kept in the form in which they take it, whatever weight they are given; equal to
    itself alone. Who keeps it makes it anew when the weight changes."""

    by: Weighted
    factor: Any
    """The weight's factor in forward: a tensor, or a Quantised; of its own memory."""
    turned: Any
    """And in grad_input; may be the same."""
    total_OK: Tensor | None = None
    """What gradients of the weight are added to, in place of being returned; None = they are returned."""
    amax: Tensor | None = None
    """With delayed scaling: the weight's largest magnitude, which every step's history has."""

    def forward(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        if self.amax is not None:
            assert isinstance(self.by, _Delayed)
            self.by.recipe.see(self.amax, WEIGHT)
        return self.by.times(x_TK, self.factor)

    def grad_input(self, dy_TO: Tensor, weight_OK: Tensor) -> Tensor:
        return self.by.times_turned(dy_TO, self.turned)

    def forward_by(self, weight_OK: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda x_TK: self.forward(x_TK, weight_OK)

    def grad_input_by(self, weight_OK: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda dy_TO: self.grad_input(dy_TO, weight_OK)

    def grad_weight(self, dy_TO: Tensor, x_TK: Tensor) -> Tensor:
        return self.by.grad_weight(dy_TO, x_TK)

    def add_grad_weight(self, dy_TO: Tensor, x_TK: Tensor) -> None:
        """Add to ``total_OK``: in BF16 and FP16 on CUDA without rounding the product."""
        assert self.total_OK is not None
        if isinstance(self.factor, Tensor):
            add_product(self.total_OK, dy_TO, x_TK)
        else:
            self.total_OK.add_(self.by.grad_weight(dy_TO, x_TK))


def weighted(recipe: Recipe | None) -> Weighted:
    """The products of a recipe; None: :data:`PLAIN`. With delayed scaling they are a layer's own, of an
    :class:`~quern.model.float8.delayed.Amaxes`."""
    if recipe is None:
        return PLAIN
    if isinstance(recipe, Delayed):
        return _Delayed(recipe)
    assert not recipe.delayed, "delayed scaling needs a history: Amaxes.of"
    assert recipe.implementation == "quern", "torchao computes whole layers: Torchao.of"
    return _Float8(recipe)


def products(recipe: Recipe | Kept | None) -> Products:
    """The same, or with a weight that is kept."""
    return recipe if isinstance(recipe, Kept) else weighted(recipe)


def apply_linear(x: Tensor, weight_OK: Tensor, recipe: Recipe | Kept) -> Tensor:
    """``x Wᵀ`` [..., O] of ``x`` [..., K], its gradients by the same recipe; the weight's has the weight's dtype."""
    if isinstance(recipe, Torchao):
        return recipe.linear(x, weight_OK)
    out_TO: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), recipe, weight_OK)
    return out_TO.view(*x.shape[:-1], weight_OK.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, recipe: Recipe | Kept, weight_OK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, weight_OK)
        ctx.recipe = recipe
        return products(recipe).forward(x_TK, weight_OK)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_wanted, weight_wanted = needed_grads(ctx, first_weight=2)
        x_TK, weight_OK = ctx.saved_tensors
        by = products(ctx.recipe)
        dx_TK = by.grad_input(dy_TO, weight_OK) if x_wanted else None
        dw_OK = None
        if weight_wanted and isinstance(by, Kept) and by.total_OK is not None:
            by.add_grad_weight(dy_TO, x_TK)
        elif weight_wanted:
            dw_OK = by.grad_weight(dy_TO, x_TK).to(weight_OK.dtype)
        return dx_TK, None, dw_OK
