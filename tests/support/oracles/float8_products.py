"""Linear layers in FP8 by hand, for the plain loop: every number rounded by a table of all that E4M3 can hold.

The formats are those of Micikevicius et al. 2022, table 1; the blocks those of DeepSeek-V3, section 3.3.2. Imports
nothing from the package under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray

#: A number's place is its code: 15 exponents of 8 fractions, the first of them subnormal; 480 would be, and is NaN.
E4M3 = np.array([
    (code % 8) / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)
])  # fmt: skip
BETWEEN = (E4M3[1:] + E4M3[:-1]) / 2


def rounded(x: Array) -> Array:
    """The nearest number, of two equally near the one with an even code; 448 for all above.

    By way of float32, as torch casts float64: rounded twice, a value within 2^-25 of a tie may end on its other side.
    """
    size = np.abs(x).astype(np.float32).astype(np.float64)
    code = np.searchsorted(BETWEEN, size, side="left")  # the lower one where it is a tie
    tie = (size == BETWEEN[np.minimum(code, len(BETWEEN) - 1)]) & (code % 2 == 1)
    return np.copysign(E4M3[np.minimum(code + tie, len(E4M3) - 1)], x)


def in_blocks(x_RS: Array, rows: int, columns: int) -> Array:
    """What remains of a matrix with a scale for each block of that size; zeros fill up the last ones."""
    down, right = -(-x_RS.shape[0] // rows), -(-x_RS.shape[1] // columns)
    filled = np.zeros((down * rows, right * columns))
    filled[: x_RS.shape[0], : x_RS.shape[1]] = x_RS
    blocks = filled.reshape(down, rows, right, columns)
    largest = np.abs(blocks).max((1, 3), keepdims=True)
    scale = np.where(largest > 1e-30, largest, 1e-30) / 448
    found = (rounded(blocks / scale) * scale).reshape(filled.shape)
    return found[: x_RS.shape[0], : x_RS.shape[1]]


def factors(recipe: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """What remains of an activation or a gradient, summed over along its rows; and of a weight."""
    if recipe == "tensorwise":
        whole = lambda x: in_blocks(x, *x.shape)  # noqa: E731
        return whole, whole
    if recipe == "rowwise":
        row = lambda x: in_blocks(x, 1, x.shape[1])  # noqa: E731
        return row, row
    return lambda x: in_blocks(x, 1, 128), lambda x: in_blocks(x, 128, 128)


class Product(torch.autograd.Function):
    """``x Wᵀ`` and its gradients, both factors of each as FP8 leaves them, in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OK: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight_OK)
        ctx.recipe = recipe
        value, weight = factors(recipe)
        return torch.from_numpy(value(x.flatten(0, 1).numpy()) @ weight(weight_OK.numpy()).T).view(*x.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_OK = ctx.saved_tensors
        value, weight = factors(ctx.recipe)
        x_TK, dy_TO = x.flatten(0, 1).numpy(), dy.flatten(0, 1).numpy()
        dx_TK = value(dy_TO) @ weight(weight_OK.numpy().T).T  # turned first: rows are what is not summed over
        dw_OK = value(dy_TO.T) @ value(x_TK.T).T
        return torch.from_numpy(dx_TK).view(x.shape), torch.from_numpy(dw_OK), None


def product(recipe: str) -> Callable[[Tensor, Tensor], Tensor]:
    """For ``Shape.product`` of the plain loop."""
    return lambda x, weight_OK: Product.apply(x, weight_OK, recipe)
