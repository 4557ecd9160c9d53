"""A linear layer in FP8: its three products, computed by a recipe.

``y = x Wᵀ``, ``dx = dy W``, ``dW = dyᵀ x``; shapes: T tokens, K inputs, O outputs. What is multiplied is rounded from
the dtype of activations, weights too, so that a weight gathered in that dtype gives the same bits as its master.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quern.model.float8.delayed import GRADIENT, INPUT, WEIGHT, Delayed
from quern.model.float8.needed_grads import needed_grads
from quern.model.float8.product import multiply
from quern.model.float8.quantise import E4M3, E5M2, Quantised, blocks_1x128, blocks_128x128, rowwise, tensorwise
from quern.model.float8.recipe import Recipe
from quern.model.float8.torchao import Torchao
from quern.model.float8.weight import Float8Weight, factor

__all__ = ["PLAIN", "Products", "float8_linear", "products"]


class Products(Protocol):
    """The products of a linear layer, each in the dtype of its first factor."""

    def forward(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        """``x Wᵀ`` [T, O]."""

    def grad_input(self, dy_TO: Tensor, weight_OK: Tensor) -> Tensor:
        """``dy W`` [T, K]."""

    def grad_weight(self, dy_TO: Tensor, x_TK: Tensor) -> Tensor:
        """``dyᵀ x`` [O, K]."""


class _Plain:
    def forward(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        return x_TK @ weight_OK.to(x_TK.dtype).T

    def grad_input(self, dy_TO: Tensor, weight_OK: Tensor) -> Tensor:
        return dy_TO @ weight_OK.to(dy_TO.dtype)

    def grad_weight(self, dy_TO: Tensor, x_TK: Tensor) -> Tensor:
        return dy_TO.T @ x_TK


@dataclass(frozen=True)
class _Float8:
    recipe: Recipe

    def forward(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        weight = self.weight(weight_OK.to(x_TK.dtype))
        return multiply(self.activation(x_TK), weight, x_TK.dtype, fast=True)

    def grad_input(self, dy_TO: Tensor, weight_OK: Tensor) -> Tensor:
        weight_OK = weight_OK.to(dy_TO.dtype)
        turned = rowwise(weight_OK.T) if self.recipe.scaling == "rowwise" else self.weight(weight_OK).transposed
        return multiply(self.gradient(dy_TO), turned, dy_TO.dtype)

    def grad_weight(self, dy_TO: Tensor, x_TK: Tensor) -> Tensor:
        if self.recipe.scaling != "tensorwise":
            return multiply(self.gradient(dy_TO.T), self.activation(x_TK.T), dy_TO.dtype)
        # what the other products take, turned: in a compiled block both are rounded once, from one largest magnitude
        return multiply(self.gradient(dy_TO).transposed, self.activation(x_TK).transposed, dy_TO.dtype)

    def weight(self, weight_OK: Tensor) -> Quantised:
        """The weight as a factor of forward, and transposed of grad_input, except for rowwise."""
        if isinstance(weight_OK, Float8Weight):
            return factor(weight_OK)
        return {"tensorwise": tensorwise, "rowwise": rowwise, "blockwise": blocks_128x128}[self.recipe.scaling](
            weight_OK
        )

    def activation(self, x_RS: Tensor) -> Quantised:
        return self._cast(x_RS, E4M3)

    def gradient(self, dy_RS: Tensor) -> Quantised:
        return self._cast(dy_RS, E5M2 if self.recipe.gradients == "e5m2" else E4M3)

    def _cast(self, x_RS: Tensor, dtype: torch.dtype) -> Quantised:
        how = {"tensorwise": tensorwise, "rowwise": rowwise, "blockwise": blocks_1x128}[self.recipe.scaling]
        return how(x_RS, dtype)


@dataclass(frozen=True)
class _Delayed(_Float8):
    recipe: Delayed

    def weight(self, weight_OK: Tensor) -> Quantised:
        return factor(weight_OK) if isinstance(weight_OK, Float8Weight) else self.recipe.quantise(weight_OK, WEIGHT)

    def activation(self, x_RS: Tensor) -> Quantised:
        return self.recipe.quantise(x_RS, INPUT)

    def _cast(self, x_RS: Tensor, dtype: torch.dtype) -> Quantised:
        return self.recipe.quantise(x_RS, GRADIENT, dtype)


PLAIN = _Plain()
"""In the dtype of activations."""


def products(recipe: Recipe | None) -> Products:
    """Of a recipe; None: :data:`PLAIN`. With delayed scaling it is a layer's own, of an
    :class:`~quern.model.float8.delayed.Amaxes`."""
    if recipe is None:
        return PLAIN
    if isinstance(recipe, Delayed):
        return _Delayed(recipe)
    assert not recipe.delayed, "delayed scaling needs a history: Amaxes.of"
    assert recipe.implementation == "quern", "torchao computes whole layers: Torchao.of"
    return _Float8(recipe)


def float8_linear(x: Tensor, weight_OK: Tensor, recipe: Recipe) -> Tensor:
    """``x Wᵀ`` [..., O] of ``x`` [..., K], gradients too in FP8; the weight's has the weight's dtype."""
    if isinstance(recipe, Torchao):
        return recipe.linear(x, weight_OK)
    out_TO: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), recipe, weight_OK)
    return out_TO.view(*x.shape[:-1], weight_OK.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, recipe: Recipe, weight_OK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, weight_OK)
        ctx.recipe = recipe
        return products(recipe).forward(x_TK, weight_OK)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_wanted, weight_wanted = needed_grads(ctx, first_weight=2)
        x_TK, weight_OK = ctx.saved_tensors
        by = products(ctx.recipe)
        dx_TK = by.grad_input(dy_TO, weight_OK) if x_wanted else None
        dw_OK = by.grad_weight(dy_TO, x_TK).to(weight_OK.dtype) if weight_wanted else None
        return dx_TK, None, dw_OK
