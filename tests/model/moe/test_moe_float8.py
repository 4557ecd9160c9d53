"""Experts in FP8: each expert's products against numbers rounded by a table, and what of a model is in FP8."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.config import ModelConfig, ModelShape
from quern.model.float8.linear import apply_linear
from quern.model.float8.recipe import Recipe
from quern.model.init import initialise
from quern.model.moe.experts import Experts
from quern.model.moe.products import multiply
from quern.model.rope import rotation
from quern.model.transformer import Linear, Transformer
from quern.parallel.activation import checkpoint_blocks
from quern.parallel.planning.float8 import fitting, local_sizes, use_float8
from support.oracles.float8_products import in_blocks

BLOCKS = Recipe("blockwise")
ENDS = [130, 130, 290, 295]
"""One expert has more rows than a block, one none; the last five rows are nobody's."""
ROWS = [slice(0, 130), slice(130, 130), slice(130, 290), slice(290, 295)]


def shape_of(**experts: Any) -> ModelShape:
    moe = {"num_experts": 4, "top_k": 2, "ffn_dim": 128, "first_dense": 1, "shared_ffn_dim": 128, "shared_gate": True}
    sizes = {"num_layers": 2, "dim": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "ffn_dim": 256}
    return ModelConfig(**sizes, moe=moe | experts).shape(60)


def drawn(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Magnitudes of all sizes, so that a scale of other values is another scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    return (x * 4 ** torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def computed(recipe: Recipe, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    x, w = drawn(300, 256, seed=1, dtype=dtype), drawn(4, 128, 256, seed=2, dtype=dtype)
    y = multiply(x, w, torch.tensor(ENDS, dtype=torch.int32), recipe)
    dy = drawn(300, 128, seed=3, dtype=dtype).detach()
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    return {"x": x.detach(), "w": w.detach(), "y": y.detach(), "dy": dy, "dx": dx, "dw": dw}


def test_blocks_of_an_experts_tokens_begin_at_its_first_row() -> None:
    found = {name: value.numpy() for name, value in computed(BLOCKS).items()}
    for expert, rows in enumerate(ROWS):
        x, dy, w = found["x"][rows], found["dy"][rows], found["w"][expert]
        if not len(x):
            assert not found["dw"][expert].any()
            continue
        weight = in_blocks(w, 128, 128)
        np.testing.assert_allclose(found["y"][rows], in_blocks(x, 1, 128) @ weight.T, rtol=1e-10, atol=1e-9)
        np.testing.assert_allclose(found["dx"][rows], in_blocks(dy, 1, 128) @ weight, rtol=1e-10, atol=1e-9)
        exact = in_blocks(dy.T, 1, 128) @ in_blocks(x.T, 1, 128).T
        np.testing.assert_allclose(found["dw"][expert], exact, rtol=1e-10, atol=1e-9 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", [Recipe("blockwise", "e5m2"), Recipe("tensorwise"), Recipe("rowwise", "e5m2")])
def test_an_expert_is_a_linear_layer_of_its_rows(recipe: Recipe, dtype: torch.dtype) -> None:
    found = computed(recipe, dtype)
    for expert, rows in enumerate(ROWS):
        x, w = found["x"][rows].clone().requires_grad_(), found["w"][expert].clone().requires_grad_()
        y = apply_linear(x, w, recipe)
        dx, dw = torch.autograd.grad(y, [x, w], found["dy"][rows])
        for name, own in (("y", y), ("dx", dx)):
            assert torch.equal(found[name][rows], own), name
        assert torch.equal(found["dw"][expert], dw)


def test_routers_are_not_in_float8_and_all_other_matrices_are() -> None:
    shape = shape_of()
    with torch.device("meta"):
        model = Transformer(shape)
    assert use_float8(model, BLOCKS) == []
    for name, module in model.blocks.named_modules():
        if isinstance(module, Linear | Experts):
            assert module.recipe == BLOCKS, name
        else:
            assert not hasattr(module, "recipe"), name
    known = {name: size for layer in (0, 1) for name, size in local_sizes(shape, 1, layer).items()}
    for block in model.blocks.values():
        for name, module in block.named_modules():
            if isinstance(module, Linear):
                assert known[name] == tuple(module.weight.shape)
            elif isinstance(module, Experts):
                assert known[name] == tuple(module.w1.shape[1:]) == tuple(module.w2.shape[:0:-1])


def test_a_part_of_an_experts_width_that_is_no_block_stays() -> None:
    shape = shape_of(ffn_dim=384, shared_ffn_dim=256)
    assert "ffn.experts" in fitting(shape, 3, BLOCKS, 1)
    assert "ffn.experts" in fitting(shape, 2, Recipe("tensorwise"), 1)
    with torch.device("meta"):
        model = Transformer(shape)
    assert "blocks.1.ffn.experts" in use_float8(model, BLOCKS, tp=2)
    experts = model.blocks["1"].get_submodule("ffn.experts")
    assert isinstance(experts, Experts)
    assert experts.recipe is None


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.quern.multiply_experts.default
        return func(*args, **(kwargs or {}))


def block_of(dtype: torch.dtype) -> tuple[Any, Tensor, Any]:
    model = Transformer(shape_of()).to(dtype)
    initialise(model, 0)
    use_float8(model, BLOCKS)
    x = drawn(2, 16, 128, seed=4, dtype=dtype)
    return model.blocks["1"], x, rotation(model.shape, 16, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("full", 3), ("selective", 0)])
def test_recomputation_keeps_products_and_changes_no_bit(mode: str, again: int) -> None:
    """A layer forms three products, and three for the gradients of their inputs."""
    block, x, turn = block_of(torch.float32)
    parameters = list(block.parameters())
    exact = torch.autograd.grad(block(x, turn).square().sum(), [x, *parameters])
    checkpoint_blocks([block], mode)
    with _Products() as seen:
        found = torch.autograd.grad(block(x, turn).square().sum(), [x, *parameters])
    assert seen.count == 3 + 3 + again
    assert all(map(torch.equal, found, exact))


@pytest.mark.long
def test_a_block_compiles_as_one_graph() -> None:
    block, x, turn = block_of(torch.float32)
    parameters = list(block.parameters())
    exact = torch.autograd.grad(block(x, turn).square().sum(), [x, *parameters])
    torch._dynamo.reset()
    checkpoint_blocks([block], "selective")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x, turn).square().sum(), [x, *parameters])
    for one, other in zip(found, exact, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
