"""Relative errors of a linear layer's output and gradients in FP8, by recipe, format of gradients and outliers.

    OMP_NUM_THREADS=1 python benchmarks/float8_error.py [--tokens 512] [--inputs 512] [--outputs 512] [--seed 0]

``x``, the weight and ``dy`` are normal, in BF16; the exact results are float64's of the same BF16 numbers. A relative
error is the norm of the difference over the norm of the exact result. With outliers, a channel of ``x`` and a token of
``dy`` are multiplied, and the columns say the error of the results beside them: the output's of all, dX's of the other
tokens, dW's of the other channels (of all, the outliers' own values would be the whole norm). BF16 is the peer, and
torchao's ``Float8Linear`` where it is installed; its ``rowwise`` rounds scales to powers of two. Errors depend on the
machine by the order of sums alone.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.float8.linear import apply_linear
from quern.model.float8.recipe import Recipe

OUTLIERS = (1.0, 50.0, 1e3, 1e6)
CHANNEL = TOKEN = 0


@dataclass(frozen=True)
class Case:
    x_TK: Tensor
    weight_OK: Tensor
    dy_TO: Tensor

    @staticmethod
    def random(tokens: int, inputs: int, outputs: int, outlier: float, seed: int) -> Case:
        generator = torch.Generator().manual_seed(seed)
        x, weight, dy = (
            torch.randn(size, generator=generator) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        x[:, CHANNEL] *= outlier
        dy[TOKEN] *= outlier
        return Case(x.bfloat16(), (weight / inputs**0.5).bfloat16(), dy.bfloat16())

    def results(self, layer: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Output, gradient of the input, gradient of the weight."""
        x_TK, weight_OK = (matrix.to(dtype).requires_grad_() for matrix in (self.x_TK, self.weight_OK))
        out_TO = layer(x_TK, weight_OK)
        return [out_TO.detach(), *torch.autograd.grad(out_TO, (x_TK, weight_OK), self.dy_TO.to(dtype))]


def layers() -> Iterator[tuple[str, str, Callable[[Tensor, Tensor], Tensor]]]:
    """Name, format of gradients, the layer."""
    yield "BF16", "", F.linear
    for scaling, gradients in product(("tensorwise", "rowwise", "blockwise"), ("e4m3", "e5m2")):
        recipe = Recipe(scaling, gradients)
        yield scaling, gradients, lambda x, weight, recipe=recipe: apply_linear(x, weight, recipe)
    yield from torchaos()


def torchaos() -> Iterator[tuple[str, str, Callable[[Tensor, Tensor], Tensor]]]:
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    except ImportError:
        return
    for name, gradients in (("tensorwise", "e5m2"), ("rowwise", "e4m3")):
        config = Float8LinearConfig.from_recipe_name(name)
        assert str(config.cast_config_grad_output.target_dtype).startswith(f"torch.float8_{gradients}")

        def layer(x_TK: Tensor, weight_OK: Tensor, config: Float8LinearConfig = config) -> Tensor:
            plain = nn.Linear(weight_OK.shape[1], weight_OK.shape[0], bias=False, dtype=weight_OK.dtype)
            theirs = Float8Linear.from_float(plain, copy.copy(config))
            return torch.func.functional_call(theirs, {"weight": weight_OK}, (x_TK,))

        yield f"torchao {name}", gradients, layer


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tokens", "inputs", "outputs"):
        parser.add_argument(f"--{name}", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchao")
    print(f"torch {torch.__version__}, {options.tokens} tokens, {options.inputs} inputs, {options.outputs} outputs\n")
    print("| outliers | layer | gradients | output | dX | dW |\n|---|---|---|---|---|---|")
    for outlier in OUTLIERS:
        case = Case.random(options.tokens, options.inputs, options.outputs, outlier, options.seed)
        exact = case.results(F.linear, torch.float64)
        for name, gradients, layer in layers():
            found = case.results(layer)
            parts = (slice(None), slice(None)), (slice(TOKEN + 1, None),), (slice(None), slice(CHANNEL + 1, None))
            figures = (relative(ours[part], best[part]) for ours, best, part in zip(found, exact, parts, strict=True))
            said = f"×{outlier:g}" if outlier != 1 else "none"
            print(f"| {said} | {name} | {gradients} | " + " | ".join(f"{figure:.2e}" for figure in figures) + " |")


if __name__ == "__main__":
    main()
