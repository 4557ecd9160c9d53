"""Shapes and FLOPs of products as torch's own counter has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from quern.model.float8.linear import apply_linear
from quern.model.float8.product import available
from quern.model.float8.recipe import Recipe
from quern.train.profiling.account import account
from quern.train.profiling.products import Product
from quern.train.step.profile import recording
from quern.train.step.trace import read_trace


def products(folder, work) -> tuple[Product, ...]:
    with recording() as profiler:
        work()
    path = str(folder / "trace.json")
    profiler.export_chrome_trace(path)
    return account(read_trace(path)).products


def ones(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, requires_grad=dtype.is_floating_point)


def block(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ ones(8, 8)) @ ones(8, 8)


def recomputed() -> None:
    """Recomputation ends inside the operator of the last product, which is in the trace and never was."""
    checkpoint(block, ones(4, 8), use_reentrant=False).sum().backward()


WORKS = {
    "mm": lambda: ones(4, 6) @ ones(6, 8),
    "a vector": lambda: ones(4, 6) @ ones(6),
    "addmm": lambda: torch.addmm(ones(8), ones(4, 6), ones(6, 8)),
    "out": lambda: torch.mm(torch.ones(4, 6), torch.ones(6, 8), out=torch.empty(4, 8)),
    "bmm": lambda: torch.bmm(ones(3, 4, 6), ones(3, 6, 8)),
    "baddbmm": lambda: torch.baddbmm(ones(3, 4, 8), ones(3, 4, 6), ones(3, 6, 8)),
    "linear": lambda: F.linear(ones(2, 5, 6), ones(8, 6), ones(8)),
    "einsum": lambda: torch.einsum("abc,cd->abd", ones(2, 3, 4), ones(4, 5)),
    "backward": lambda: F.linear(ones(2, 5, 6), ones(8, 6)).square().sum().backward(),
    "recomputed": recomputed,
    "twice": lambda: (ones(4, 6) @ ones(6, 8), ones(4, 6) @ ones(6, 8)),
}


@pytest.mark.parametrize("name", WORKS)
def test_flops_are_those_of_torchs_counter(tmp_path, name):
    with FlopCounterMode(display=False) as counter:
        WORKS[name]()
    expected = counter.get_total_flops() or 2 * 4 * 6  # the counter overlooks a vector
    assert sum(product.flops for product in products(tmp_path, WORKS[name])) == expected


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_products_in_float8_know_their_recipe(tmp_path, scaling):
    x, weight = ones(2, 16, 64, dtype=torch.bfloat16), ones(48, 64)
    found = products(tmp_path, lambda: apply_linear(x, weight, Recipe(scaling)).sum().backward())
    shapes = {(p.shape.m, p.shape.n, p.shape.k) for p in found if p.shape and p.shape.scaling == scaling}
    if not available(Recipe(scaling), x.device, x.dtype):  # torch 2.11 has no kernel for the CPU
        assert shapes == set()
        return
    assert shapes == {(32, 48, 64), (32, 64, 48), (48, 64, 32)}
    assert {p.shape.dtype for p in found if p.shape} == {"float8_e4m3fn"}
    assert all(product.count == 1 for product in found)


def test_products_inside_attention_are_the_attentions(tmp_path):
    q = ones(1, 2, 4, 8, dtype=torch.float64)
    with recording() as profiler, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = account(read_trace(str(tmp_path / "trace.json")))
    assert found.products == ()
    assert found.classes["attention"] > found.classes["elementwise"]
