"""Products in FP8 against exact arithmetic, and what kernels are given against torch's description of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.torch_version import TorchVersion

from quern.model.float8 import product
from quern.model.float8.product import available, emulated, multiply
from quern.model.float8.quantise import E4M3, E5M2, Quantised, blocks_1x128, blocks_128x128, rowwise, tensorwise
from quern.model.float8.recipe import Recipe
from quern.parallel.activation import kept_operations

PAIRS = [
    (tensorwise, tensorwise),
    (rowwise, rowwise),
    (blocks_1x128, blocks_128x128),
    (blocks_1x128, blocks_1x128),
]
pairs = pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda quantise: quantise.__name__)
formats = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def whole_numbers(rows: int, columns: int, quantise: Any, seed: int) -> Tensor:
    """From -7 to 7 in float64, times a power of two a block, with a 7 in each: quantised without a rounding error, as
    7 and both formats' largest numbers have a power of two between them, and summed without one in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-7, 8, (rows, columns), generator=generator).double()
    x[:, ::128] = 7
    powers = torch.exp2(torch.randint(0, 4, (rows, -(-columns // 128)), generator=generator).double())
    if quantise is tensorwise:
        return x
    if quantise is rowwise:
        return x * powers[:, :1]
    if quantise is blocks_128x128:
        powers = powers[::128].repeat_interleave(128, 0)
    return x * powers.repeat_interleave(128, 1)[:, :columns]


@formats
@pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_product_without_rounding_errors_is_exact(left, right, fp8, dtype):
    for rows, inner, columns in [(128, 256, 384), (1, 128, 256), (37, 384, 128), (16, 128, 128)]:
        a, b = whole_numbers(rows, inner, left, 1), whole_numbers(columns, inner, right, 2)
        wide = torch.promote_types(dtype, torch.float32)
        factors = left(a.to(wide), fp8), right(b.to(wide), E4M3)
        expected = (a @ b.T).to(dtype)
        assert torch.equal(multiply(*factors, dtype), expected)
        assert torch.equal(multiply(*factors, dtype, fast=True), expected)
        assert torch.equal(emulated(*factors, dtype), expected)


@settings(max_examples=40, deadline=None)
@given(
    quantise=st.sampled_from([tensorwise, rowwise]),
    fp8=st.sampled_from([E4M3, E5M2]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    sizes=st.tuples(*[st.integers(1, 5)] * 3),
    ragged=st.just((0, 0, 0)) | st.tuples(*[st.integers(0, 15)] * 3),
    seed=st.integers(0, 9),
)
def test_kernel_and_emulation_are_one(quantise, fp8, dtype, sizes, ragged, seed):
    """To the bit where every size is a multiple, as long as the CPU's kernel is none of special instructions; in the
    order of float32's sums always."""
    rows, inner, columns = (16 * size - less for size, less in zip(sizes, ragged, strict=True))
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, inner, generator=generator) for size in (rows, columns))
    factors = quantise(a, fp8), quantise(b, E4M3)
    found, other = multiply(*factors, dtype), emulated(*factors, dtype)
    assert found.shape == other.shape == (rows, columns)
    assert found.dtype == dtype
    exact = factors[0].dequantised(torch.float64) @ factors[1].dequantised(torch.float64).T
    size = factors[0].dequantised(torch.float64).abs() @ factors[1].dequantised(torch.float64).abs().T
    slack = (
        (inner + 3) * 2.0**-24 * size + torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal
    )
    assert ((found.double() - exact).abs() <= 1.01 * slack).all()
    assert ((other.double() - exact).abs() <= 1.01 * slack).all()
    if not any(ragged) and not torch.cpu._is_amx_tile_supported():
        assert torch.equal(found, other)


@formats
@pairs
def test_factors_that_are_empty(left, right, fp8):
    found = multiply(left(torch.zeros(0, 128), fp8), right(torch.zeros(256, 128), E4M3), torch.bfloat16)
    assert found.shape == (0, 256)
    if right is not blocks_128x128:
        found = multiply(left(torch.zeros(16, 0), fp8), right(torch.zeros(32, 0), E4M3), torch.bfloat16)
        assert torch.equal(found, torch.zeros(16, 32, dtype=torch.bfloat16))


def documented(
    mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, *,
    output_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """What a kernel on an H100 does of ``mat_a`` [M, K] and ``mat_b`` [K, N], element by element of every scale."""
    (m, k), n = mat_a.shape, mat_b.shape[1]
    assert mat_a.stride() == (k, 1)
    assert mat_b.stride() == (1, k)
    assert k % 16 == n % 16 == m % 4 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    M, K, N = torch.arange(m), torch.arange(k), torch.arange(n)
    four = -(-(k // 128) // 4) * 4
    if recipe_a is ScalingType.TensorWise:
        of_a, of_b = scale_a.expand(m, k), scale_b.expand(k, n)
    elif recipe_a is ScalingType.RowWise:
        assert scale_a.shape == (m, 1)
        assert scale_b.shape == (1, n)
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        of_a, of_b = scale_a[M[:, None], 0 * K], scale_b[0 * K[:, None], N]
    else:
        assert recipe_a is ScalingType.BlockWise1x128
        assert not use_fast_accum
        assert scale_a.shape == (m, k // 128)
        assert scale_a.stride() == (1, m) or k == 128
        of_a = scale_a[M[:, None], K // 128]
        if recipe_b is ScalingType.BlockWise1x128:
            assert scale_b.shape == (n, k // 128)
            assert scale_b.stride() == (1, n) or k == 128
            of_b = scale_b[N, K[:, None] // 128]
        else:
            assert recipe_b is ScalingType.BlockWise128x128
            assert scale_b.shape == (four, n // 128)
            assert scale_b.stride() == (1, four)
            of_b = scale_b[K[:, None] // 128, N // 128]
    return ((mat_a.double() * of_a.double()) @ (mat_b.double() * of_b.double())).to(output_dtype)


@formats
@pairs
@pytest.mark.parametrize("inner", [128, 256, 512, 640])
def test_a_kernel_is_given_what_its_description_asks_for(left, right, fp8, inner, monkeypatch):
    monkeypatch.setattr(product, "_available", lambda *_: True)
    monkeypatch.setattr(F, "scaled_mm", documented)
    for rows, columns in [(128, 256), (7, 384)]:
        a, b = whole_numbers(rows, inner, left, 3), whole_numbers(columns, inner, right, 4)
        found = multiply(left(a.float(), fp8), right(b.float(), E4M3), torch.float32, fast=True)
        assert torch.equal(found, (a @ b.T).float())


@pytest.mark.slow
@pytest.mark.parametrize("right", [blocks_128x128, blocks_1x128])
def test_a_compiled_product_of_blocks_gives_the_kernel_the_same(right, monkeypatch):
    """Inductor makes of torch's own operation an older one, with the scales of blocks the wrong way round."""
    monkeypatch.setattr(product, "_available", lambda *_: True)
    seen = []
    monkeypatch.setattr(F, "scaled_mm", lambda *given, **options: seen.append(given) or documented(*given, **options))
    a, b = whole_numbers(256, 512, blocks_1x128, 3).float(), whole_numbers(384, 512, right, 4).float()

    def work(a: Tensor, b: Tensor) -> Tensor:
        return multiply(blocks_1x128(a * 1.0, E4M3), right(b, E4M3), torch.float32).relu()

    torch.compiler.reset()
    found = torch.compile(work, fullgraph=True)(a, b)
    assert torch.equal(found, (a.double() @ b.double().T).float().relu())
    assert len(seen) == 1
    graphs = []
    torch.compiler.reset()
    torch.compile(work, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)(a, b)
    named = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("quern.blockwise_scaled_mm" in name for name in named) == 1
    assert torch.ops.quern.blockwise_scaled_mm.default in kept_operations(), "selective recomputation keeps products"


@formats
@pairs
@pytest.mark.parametrize("inner", [128, 256, 640])
def test_torchs_own_checks_take_what_a_kernel_on_a_gpu_is_given(left, right, fp8, inner, monkeypatch):
    """A tensor on ``meta`` is checked as one on CUDA is."""
    monkeypatch.setattr(product, "_available", lambda *_: True)
    for rows, columns in [(128, 384), (384, 128), (5, 256)]:
        a, b = left(torch.zeros(rows, inner), fp8), right(torch.zeros(columns, inner), E4M3)
        on_meta = [Quantised(factor.data_RS.to("meta"), factor.scale.to("meta")) for factor in (a, b)]
        found = multiply(*on_meta, torch.bfloat16, fast=True)
        assert found.shape == (rows, columns)
        assert found.dtype == torch.bfloat16


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("scaling", "gpu", "cuda", "dtypes"),
    [
        ("tensorwise", None, None, {BF16, FP16, FP32}),
        ("rowwise", None, None, {BF16, FP16, FP32}),
        ("blockwise", None, None, set()),
        ("tensorwise", (8, 0), "12.9", set()),
        ("rowwise", (8, 0), "12.9", set()),
        ("tensorwise", (8, 9), "12.1", {BF16, FP16, FP32}),
        ("rowwise", (8, 9), "12.1", {BF16}),
        ("blockwise", (8, 9), "12.9", set()),
        ("tensorwise", (9, 0), "12.4", {BF16, FP16, FP32}),
        ("rowwise", (9, 0), "12.4", {BF16}),
        ("blockwise", (9, 0), "12.8", set()),
        ("blockwise", (9, 0), "12.9", {BF16, FP32}),
        ("blockwise", (9, 0), "13.0", {BF16, FP32}),
        ("rowwise", (10, 0), "13.0", {BF16}),
        ("blockwise", (10, 0), "13.0", set()),
        ("tensorwise", (9, 4), None, set()),  # AMD's
    ],
)
def test_which_products_have_a_kernel(scaling, gpu, cuda, dtypes, monkeypatch):
    if gpu is not None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        properties = SimpleNamespace(major=gpu[0], minor=gpu[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = CPU if gpu is None else CUDA
    if gpu is None and TorchVersion(torch.__version__) < "2.13":  # 2.11 has none; 2.12 is not known
        dtypes = dtypes if product.FLOAT8_ON_CPU else set()
    found = {dtype for dtype in (BF16, FP16, FP32, FP64) if available(Recipe(scaling), device, dtype)}
    assert found == dtypes


def test_other_devices_have_no_kernel():
    for scaling in ("tensorwise", "rowwise", "blockwise"):
        assert not available(Recipe(scaling), torch.device("mps"), BF16)
        assert not available(Recipe(scaling), torch.device("meta"), BF16)


@pairs
def test_autocast_changes_no_product(left, right):
    generator = torch.Generator().manual_seed(0)
    a, b = (quantise(torch.randn(128, 256, generator=generator)) for quantise in (left, right))
    expected = multiply(a, b, FP32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(multiply(a, b, FP32), expected)
