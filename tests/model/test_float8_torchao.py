"""Layers that torchao computes, against its own module; and what is said where it is not installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quern.errors import InputError
from quern.model.config import ModelConfig
from quern.model.float8.linear import apply_linear
from quern.model.float8.recipe import TORCHAO_GRADIENTS, Recipe
from quern.model.float8.torchao import Torchao
from quern.model.init import initialise
from quern.model.transformer import FeedForward, Transformer
from quern.parallel.apply import parallelize
from quern.parallel.planning.float8 import LAYERS
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh

both = pytest.mark.parametrize("scaling", list(TORCHAO_GRADIENTS))


def recipe(scaling: Any) -> Recipe:
    return Recipe(scaling, TORCHAO_GRADIENTS[scaling], implementation="torchao")


def case(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` [B, L, K], a weight [O, K] in float32, ``dy`` [B, L, O]; values of very different size."""
    generator = torch.Generator().manual_seed(3)
    x, weight, dy = (torch.randn(size, generator=generator) for size in ((2, 32, 64), (48, 64), (2, 32, 48)))
    x[:, :, 5] *= 300
    dy[1, 7] *= 1e4
    return x.to(dtype), weight, dy.to(dtype)


def gradients(layer: Any, x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, gradient of ``x``, gradient of the weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = layer(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), dy)]


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_has_the_bits_of_torchaos_module(scaling: str, dtype: torch.dtype) -> None:
    float8 = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear

    def module(x: Tensor, weight_OK: Tensor) -> Tensor:
        config = replace(float8.Float8LinearConfig.from_recipe_name(scaling), emulate=True)
        plain = nn.Linear(64, 48, bias=False, dtype=dtype)
        with torch.no_grad():
            plain.weight.copy_(weight_OK)
        layer = Float8Linear.from_float(plain, config)
        return torch.func.functional_call(layer, {"weight": weight_OK.to(dtype)}, (x,))

    given = case(dtype)
    found = gradients(lambda x, weight: apply_linear(x, weight, Torchao.of(recipe(scaling))), *given)
    expected = gradients(module, *given)
    assert [part.dtype for part in found] == [dtype, dtype, torch.float32]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    plain = gradients(lambda x, weight: x @ weight.to(x.dtype).T, *given)
    assert not any(torch.equal(ours, exact) for ours, exact in zip(found, plain, strict=True))


@both
def test_its_gradients_have_the_format_that_is_said(scaling: str) -> None:
    pytest.importorskip("torchao.float8")
    _, config = Torchao.of(recipe(scaling)).kernels
    assert not config.emulate
    assert str(config.cast_config_grad_output.target_dtype).startswith(f"torch.float8_{TORCHAO_GRADIENTS[scaling]}")


def test_a_models_parameters_stay_what_they_are() -> None:
    pytest.importorskip("torchao.float8")
    shape = ModelConfig(num_layers=1, dim=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_dim=64).shape(50)
    model = Transformer(shape, compute_dtype=torch.bfloat16)
    initialise(model, 1)
    before = dict(model.named_parameters())
    layout = Layout(compute_dtype=torch.bfloat16, float8=recipe("rowwise"))
    parallelize(model, build_mesh(MeshPlan(), "cpu"), layout)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is value and type(value) is nn.Parameter for name, value in before.items())
    assert set(model.state_dict()) == set(before)
    block = model.blocks["0"]
    assert all(isinstance(block.get_submodule(name).recipe, Torchao) for name in LAYERS)
    model(torch.arange(32).view(1, 32)).float().square().sum().backward()
    assert all(value.grad is not None and value.grad.dtype is torch.float32 for value in before.values())


@pytest.mark.slow
@both
def test_compiled_it_is_the_same(scaling: str) -> None:
    pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    layer = FeedForward(64, 128)
    for number, linear in enumerate((layer.w1, layer.w2, layer.w3)):
        nn.init.normal_(linear.weight, std=0.1 * (number + 1))
        linear.recipe = Torchao.of(recipe(scaling))
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def results(module: Any) -> list[Tensor]:
        layer.zero_grad()
        out = module(x)
        out.float().square().sum().backward()
        return [out.detach(), *(value.grad.clone() for value in layer.parameters())]

    for ours, theirs in zip(results(compiled), results(layer), strict=True):
        assert torch.equal(ours, theirs)


def test_without_torchao_the_field_and_the_way_to_get_it_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "torchao" or name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    said = (
        r"float8\.implementation: torchao is not installed .*; expected quern, or pip install 'torchao>=0\.18,<0\.19'"
    )
    with pytest.raises(InputError, match=said):
        Torchao.of(recipe("tensorwise"))
