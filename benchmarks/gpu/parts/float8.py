"""FP8 products of each recipe: by the kernel, beside the emulation and beside float64's product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parts.common import distance, gpu, shape_of
from quern.model.float8 import linear
from quern.model.float8.product import available, emulated
from quern.model.float8.quantise import Quantised
from quern.model.float8.recipe import Recipe

#: Norm of the difference over the norm of the result, at most. Kernel and emulation multiply the same FP8 numbers and
#: both round the result to BF16, by half of 2⁻⁸ at most, so that they differ by little more where a sum falls on
#: another side; a forward's sums may lose bits in the tensor cores besides (DeepSeek-V3, section 3.3.2: near 2 % at the
#: worst single number of 4,096 summands).
KERNEL_BOUND = {"forward": 1e-2, "grad_input": 5e-3, "grad_weight": 5e-3}
#: Beside float64's product of the numbers before the casts. E4M3 rounds a number by 2⁻⁴ at most, some 2.6 % in the
#: mean square over a binade, and there are two factors; E5M2 rounds by twice as much.
EXACT_BOUND = {"e4m3": 5e-2, "e5m2": 8e-2}


def products(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Relative errors of the three products of a recipe, ``scaling``, at two sizes of weights."""
    shape, device, found = shape_of(spec), gpu(spec), []
    for gradients in ("e4m3", "e5m2"):
        recipe = Recipe(spec["scaling"], gradients)
        kernel = available(recipe, device, torch.bfloat16)
        for outputs, inputs in ((shape.dim, shape.ffn_dim), (shape.num_kv_heads * shape.head_dim, shape.dim)):
            x_TK, weight_OK, dy_TO = factors(spec["tokens"], inputs, outputs, device)
            x, weight, dy = x_TK.double(), weight_OK.double(), dy_TO.double()
            exact = {"forward": x @ weight.T, "grad_input": dy @ weight, "grad_weight": dy.T @ x}
            ours = three(linear.products(recipe), x_TK, weight_OK, dy_TO)
            with emulating():
                plain = three(linear.products(recipe), x_TK, weight_OK, dy_TO)
            for name in exact:
                bounds = KERNEL_BOUND[name], EXACT_BOUND["e4m3" if name == "forward" else gradients]
                errors = distance(ours[name], plain[name]), distance(ours[name], exact[name])
                found.append({
                    "gradients": gradients, "product": name, "outputs": outputs, "inputs": inputs, "kernel": kernel,
                    "to emulation": errors[0], "bound": bounds[0], "to float64": errors[1], "its bound": bounds[1],
                    "passes": errors[0] <= bounds[0] and errors[1] <= bounds[1],
                })  # fmt: skip
    return found


def three(by: linear.Products, x_TK: Tensor, weight_OK: Tensor, dy_TO: Tensor) -> dict[str, Tensor]:
    return {
        "forward": by.forward(x_TK, weight_OK),
        "grad_input": by.grad_input(dy_TO, weight_OK),
        "grad_weight": by.grad_weight(dy_TO, x_TK),
    }


def factors(tokens: int, inputs: int, outputs: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, weight, gradient: normal, in BF16, in the sizes that training has."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return (scale * torch.randn(rows, columns, device=device, generator=generator)).bfloat16()

    return normal(tokens, inputs, 1.0), normal(outputs, inputs, 0.02), normal(tokens, outputs, 1e-4)


@contextmanager
def emulating() -> Iterator[None]:
    """The same code with no kernel."""

    def multiply(a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        return emulated(a_MS, b_NS, dtype)

    with patch.object(linear, "multiply", multiply):
        yield
