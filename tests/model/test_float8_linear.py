"""The FP8 linear layer: its errors against those that the formats predict, and what it does to what is not ordinary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from quern.model.float8 import linear
from quern.model.float8.linear import PLAIN, apply_linear, products
from quern.model.float8.recipe import Recipe
from support.oracles import float8_oracle as oracle

RECIPES = [Recipe(*both) for both in itertools.product(("tensorwise", "rowwise", "blockwise"), ("e4m3", "e5m2"))]
T, K, O = 192, 256, 384  # noqa: E741

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.scaling}-{recipe.gradients}")


def case(dtype: torch.dtype = torch.float32, tokens: int = T, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` [T, K], a weight [O, K], ``dy`` [T, O]."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, dy = (torch.randn(size, generator=generator) for size in ((tokens, K), (O, K), (tokens, O)))
    return x.to(dtype), weight / 16, dy.to(dtype)


def gradients(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, gradient of ``x``, gradient of the weight."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    out = function(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), dy)]


def by(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: apply_linear(x, weight, recipe)


def errors(recipe: Recipe, x: Tensor, weight: Tensor, dy: Tensor) -> list[np.ndarray]:
    """What each result is off the exact one, in float64."""
    found = gradients(by(recipe), x, weight, dy)
    exact = gradients(lambda x, weight: x @ weight.T, x.double(), weight.double(), dy.double())
    return [(ours.double() - theirs).numpy() for ours, theirs in zip(found, exact, strict=True)]


def predicted(recipe: Recipe, x: Tensor, weight: Tensor, dy: Tensor) -> list[np.ndarray]:
    """The variance of each result's error, if the rounding errors of all factors are independent and uniform."""
    x, weight, dy = (array.double().numpy() for array in (x, weight, dy))
    block = {"tensorwise": (10**6, 10**6), "rowwise": (1, 10**6), "blockwise": (1, 128)}[recipe.scaling]
    square = (128, 128) if recipe.scaling == "blockwise" else block
    gradient = oracle.E5M2 if recipe.gradients == "e5m2" else oracle.E4M3

    def product(a: np.ndarray, of_a: np.ndarray, b: np.ndarray, of_b: np.ndarray) -> np.ndarray:
        return of_a @ (b**2).T + a**2 @ of_b.T + of_a @ of_b.T

    def noise(values: np.ndarray, blocks: tuple[int, int], fp8: oracle.Format = oracle.E4M3) -> np.ndarray:
        return oracle.noise(values, *blocks, fp8)

    return [
        product(x, noise(x, block), weight, noise(weight, square)),
        product(dy, noise(dy, block, gradient), weight.T, noise(weight.T, square)),
        product(dy.T, noise(dy.T, block, gradient), x.T, noise(x.T, block)),
    ]


OUTLIERS = {
    "none": (1.0, 1.0),
    "a channel of x x50": (50.0, 1.0),
    "a channel of x x1000": (1e3, 1.0),
    "a token of dy x1000": (1.0, 1e3),
}


@pytest.mark.slow
@pytest.mark.parametrize("outlier", OUTLIERS)
@every_recipe
def test_errors_are_those_of_the_formats(recipe, outlier):
    """The root mean square over a result and over its part beside the outliers, within 2% of the prediction; within 15%
    where the some 300 errors of the outliers themselves are most of it."""
    x, weight, dy = case()
    of_x, of_dy = OUTLIERS[outlier]
    x[:, 5] *= of_x
    dy[7] *= of_dy
    beside = [(slice(8, None), slice(None))] * 2 + [(slice(None), slice(6, None))]
    found, expected = errors(recipe, x, weight, dy), predicted(recipe, x, weight, dy)
    for error, variance, rest in zip(found, expected, beside, strict=True):
        for part in ((slice(None), slice(None)), rest):
            slack = 0.02 if outlier == "none" else 0.15
            assert math.sqrt((error[part] ** 2).mean()) == pytest.approx(math.sqrt(variance[part].mean()), rel=slack)


@every_recipe
def test_errors_of_ordinary_numbers_are_within_the_formats_bounds(recipe):
    """A number with m bits of mantissa is 2^m to 2^(m+1) times its ulp, and a rounding error's root mean square is
    ulp/√12: of a factor, 1/(2√12) to 1/√12 of 2^-m; of two factors, the root of the sum of both squares."""
    x, weight, dy = case()
    bits = [(3, 3)] + [(2 if recipe.gradients == "e5m2" else 3, 3)] * 2
    exact = gradients(lambda x, weight: x @ weight.T, x.double(), weight.double(), dy.double())
    for error, result, mantissas in zip(errors(recipe, x, weight, dy), exact, bits, strict=True):
        relative = np.linalg.norm(error) / torch.linalg.norm(result).item()
        most = math.hypot(*(2.0**-bit for bit in mantissas)) / math.sqrt(12)
        assert most / 2 < relative < most


def test_scales_of_blocks_keep_an_outlier_to_its_block():
    """A channel 10^6 times the others takes all of E4M3's 18 binades: with one scale, nothing is left of the others."""
    x, weight, dy = case()
    x[:, 5] *= 1e6
    dy[7] *= 1e6
    beside_x, beside_dy = (slice(None), slice(6, None)), (slice(8, None), slice(None))
    exact = gradients(lambda x, weight: x @ weight.T, x.double(), weight.double(), dy.double())
    relative = {}
    for scaling in ("tensorwise", "rowwise", "blockwise"):
        _, of_dx, of_dw = errors(Recipe(scaling), x, weight, dy)
        relative[scaling] = [
            np.linalg.norm(error[part]) / torch.linalg.norm(result[part]).item()
            for error, result, part in ((of_dx, exact[1], beside_dy), (of_dw, exact[2], beside_x))
        ]
    assert min(relative["tensorwise"]) > 0.5
    assert max(relative["rowwise"]) < 0.06
    assert max(relative["blockwise"]) < 0.06


@every_recipe
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, (2, 3, 7, K)),
        (torch.float16, (1, K)),
        (torch.float32, (K,)),
        (torch.float64, (5, K)),
        (torch.bfloat16, (0, K)),
        (torch.float64, (3, 0, K)),
    ],
    ids=str,
)
def test_shapes_and_dtypes(recipe, dtype, shape):
    x, weight, dy = case(dtype, max(math.prod(shape[:-1]), 1))
    x = x[: math.prod(shape[:-1])].reshape(shape)
    dy = dy[: math.prod(shape[:-1])].reshape(*shape[:-1], O)
    out, dx, dw = gradients(by(recipe), x, weight, dy)
    assert (out.shape, out.dtype) == ((*shape[:-1], O), dtype)
    assert (dx.shape, dx.dtype) == (shape, dtype)
    assert (dw.shape, dw.dtype) == (weight.shape, torch.float32)
    if x.numel() == 0:
        assert torch.count_nonzero(dw) == 0
    exact = gradients(lambda x, weight: x @ weight.T, x.double(), weight.double(), dy.double())
    for found, result in zip((out, dx, dw), exact, strict=True):
        assert torch.linalg.norm(found.double() - result) <= 0.09 * torch.linalg.norm(result)


@every_recipe
def test_memory_layout_changes_no_bit(recipe):
    x, weight, dy = case(torch.bfloat16)
    expected = gradients(by(recipe), x, weight, dy)
    turned = [matrix.T.contiguous().T for matrix in (x, weight, dy)]
    x, weight = (matrix.requires_grad_() for matrix in turned[:2])
    out = apply_linear(x, weight, recipe)
    for found, before in zip((out.detach(), *torch.autograd.grad(out, (x, weight), turned[2])), expected, strict=True):
        assert torch.equal(found, before)


@every_recipe
def test_a_gathered_weight_gives_the_bits_of_its_master(recipe):
    x, weight, dy = case(torch.bfloat16)
    gathered, master = gradients(by(recipe), x, weight.bfloat16(), dy), gradients(by(recipe), x, weight, dy)
    assert gathered[2].dtype == torch.bfloat16
    for found, expected in zip(gathered, master, strict=True):
        assert torch.equal(found, expected.to(found.dtype))


@every_recipe
@pytest.mark.parametrize(
    ("dtype", "bad"), [(torch.bfloat16, math.inf), (torch.bfloat16, math.nan), (torch.float64, -math.inf)], ids=str
)
def test_what_is_not_finite_arrives(recipe, dtype, bad):
    """As it would without FP8: in its token's row, its output's column; a guard on the loss or the norm sees it."""
    reached = [[(0, 3, ...), (2, ..., 5)], [(0, ..., 3), (1, ..., 5)], [(1, 3, ...), (2, 5, ...)]]
    for which, rows in enumerate(reached):
        matrices = list(case(dtype))
        matrices[which][3, 5] = bad
        found = gradients(by(recipe), *matrices)
        for result, *place in rows:
            assert not torch.isfinite(found[result][tuple(place)]).any()
        (clean,) = {0, 1, 2} - {result for result, *_ in rows}
        assert torch.isfinite(found[clean]).all()


@every_recipe
def test_all_that_is_huge_and_finite_stays_finite(recipe):
    x, weight, dy = case(torch.bfloat16)
    x, dy = x / x.abs().amax() * 3.3e38, dy / dy.abs().amax() * 1e-29
    _, dx, dw = gradients(by(recipe), x, weight * 1e-29, dy)
    assert torch.isfinite(dx).all()
    assert torch.isfinite(dw).all()
    exact = dy.double().T @ x.double()
    assert torch.linalg.norm(dw.double() - exact) <= 0.09 * torch.linalg.norm(exact)


@every_recipe
def test_zeros(recipe):
    x, weight, dy = case(torch.bfloat16)
    for found in gradients(by(recipe), x * 0, weight, dy * 0):
        assert torch.equal(found, torch.zeros_like(found))


def test_only_what_is_wanted_is_computed(monkeypatch):
    """A pipeline that splits its backward pass asks for the input's gradient first, and for the weight's later."""
    count = 0

    def counting(*arguments, **options):
        nonlocal count
        count += 1
        return multiply(*arguments, **options)

    multiply = linear.multiply
    monkeypatch.setattr(linear, "multiply", counting)
    x, weight, dy = case(torch.bfloat16)
    recipe = Recipe("blockwise")
    both = gradients(by(recipe), x, weight, dy)
    assert count == 3
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = apply_linear(x, weight, recipe)
    count = 0
    (dx,) = torch.autograd.grad(out, x, dy, retain_graph=True)
    assert count == 1
    (dw,) = torch.autograd.grad(out, weight, dy)
    assert count == 2
    assert torch.equal(dx, both[1])
    assert torch.equal(dw, both[2])
    out = apply_linear(x.detach(), weight, recipe)
    out.backward(dy)
    assert count == 4
    assert torch.equal(weight.grad, both[2])


@every_recipe
def test_recomputed_is_the_same(recipe):
    x, weight, dy = case(torch.bfloat16)
    for found, expected in zip(
        gradients(lambda x, weight: checkpoint(by(recipe), x, weight, use_reentrant=False), x, weight, dy),
        gradients(by(recipe), x, weight, dy),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_blockwise_in_float64_is_the_same_however_it_is_split(gradient):
    """Along tokens, outputs and inputs in multiples of 128, as ranks split it: blocks are the same."""
    x, weight, dy = (matrix.double() for matrix in case(torch.float64, 256))
    how = products(Recipe("blockwise", gradient))
    y, dx, dw = how.forward(x, weight), how.grad_input(dy, weight), how.grad_weight(dy, x)
    first, second = slice(0, 128), slice(128, None)

    def same(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13 * expected.abs().max().item())

    same(torch.cat([how.forward(x[part], weight) for part in (first, second)]), y)
    same(torch.cat([how.forward(x, weight[part]) for part in (first, second)], 1), y)
    same(sum(how.forward(x[:, part], weight[:, part]) for part in (first, second)), y)
    same(sum(how.grad_input(dy[:, part], weight[part]) for part in (first, second)), dx)
    same(torch.cat([how.grad_input(dy, weight[:, part]) for part in (first, second)], 1), dx)
    same(sum(how.grad_weight(dy[part], x[part]) for part in (first, second)), dw)
    same(torch.cat([how.grad_weight(dy[:, part], x) for part in (first, second)]), dw)


def test_without_a_recipe_products_are_plain():
    x, weight, dy = case(torch.bfloat16)
    assert products(None) is PLAIN
    assert torch.equal(PLAIN.forward(x, weight), x @ weight.bfloat16().T)
    assert torch.equal(PLAIN.grad_input(dy, weight), dy @ weight.bfloat16())
    assert torch.equal(PLAIN.grad_weight(dy, x), dy.T @ x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=() if number == 5 else pytest.mark.long) for number, recipe in enumerate(RECIPES)],
    ids=lambda recipe: f"{recipe.scaling}-{recipe.gradients}",
)
def test_compiled_to_one_graph_it_gives_the_same_bits(recipe):
    x, weight, dy = case(torch.bfloat16, 48)
    torch.compiler.reset()  # one function for all recipes: a graph each, and torch keeps 8
    compiled = torch.compile(by(recipe), backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled, x, weight, dy), gradients(by(recipe), x, weight, dy), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
def test_compiled_by_inductor_it_gives_the_same_numbers(scaling):
    """But for float32's rounding in another order."""
    x, weight, dy = case(torch.float32, 48)
    recipe = Recipe(scaling)
    torch.compiler.reset()  # one function for all recipes: a graph each, and torch keeps 8
    compiled = torch.compile(by(recipe), fullgraph=True)
    for found, expected in zip(gradients(compiled, x, weight, dy), gradients(by(recipe), x, weight, dy), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.long
def test_compiled_tensorwise_looks_for_each_largest_magnitude_once() -> None:
    """Of input, weight and gradient: three in a forward and backward of five uses. From 2.14 on torch merges nothing
    that backward repeats of forward, and computes it beside forward."""
    found: list[int] = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        found.append(sum("amax" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(by(Recipe("tensorwise")), backend=backend, fullgraph=True)
    parts = case(torch.bfloat16)
    for ours, plain in zip(gradients(compiled, *parts), gradients(by(Recipe("tensorwise")), *parts), strict=True):
        assert torch.equal(ours, plain)
    assert found == [2 if TorchVersion(torch.__version__) < "2.14" else 4, 1]
