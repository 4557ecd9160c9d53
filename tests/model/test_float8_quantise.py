"""Quantisers against an FP8 made by hand, number by number, and torchao's casts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quern.model.float8.quantise import E4M3, E5M2, Quantised, blocks_1x128, blocks_128x128, cast, rowwise, tensorwise
from support.oracles import float8_oracle as oracle

FORMATS = {E4M3: oracle.E4M3, E5M2: oracle.E5M2}
QUANTISERS = {tensorwise: (10**6, 10**6), rowwise: (1, 10**6), blocks_1x128: (1, 128), blocks_128x128: (128, 128)}
"""And the block that shares a scale."""

both = pytest.mark.parametrize("fp8", FORMATS, ids=["e4m3", "e5m2"])
all_quantisers = pytest.mark.parametrize("quantise", QUANTISERS, ids=lambda quantise: quantise.__name__)


def random(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Over many binades, so that subnormals are among the quantised."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    size *= torch.exp2(4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    return size.clamp(-6e4, 6e4).to(dtype)


@both
def test_the_formats_by_hand_are_torchs(fp8):
    numbers = FORMATS[fp8].numbers
    codes = torch.arange(len(numbers), dtype=torch.uint8)
    assert codes.view(fp8).double().tolist() == numbers.tolist()
    assert (codes + 128).view(fp8).double().tolist() == (-numbers).tolist()
    assert torch.finfo(fp8).max == numbers[-1] == FORMATS[fp8].largest


@both
@all_quantisers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_value_is_the_nearest_number_of_its_block(quantise, fp8, dtype):
    rows, columns = (128, 128) if quantise is blocks_128x128 else (3, 256)
    x = random(rows, columns, dtype)
    found = quantise(x, fp8)
    wide = torch.promote_types(dtype, torch.float32)
    assert found.data_RS.dtype == fp8
    assert found.scale.dtype == wide
    expected = oracle.quantised(x.to(wide).numpy(), *QUANTISERS[quantise], FORMATS[fp8])
    np.testing.assert_array_equal(found.dequantised(wide).numpy(), expected)


@both
def test_squares_share_a_scale(fp8):
    x = random(256, 384)
    x[:128, 128:256] *= 2.0**20
    found = blocks_128x128(x, fp8)
    assert found.scale.shape == (2, 3)
    for row in range(2):
        for column in range(3):
            block = x[row * 128 :, column * 128 :][:128, :128]
            assert found.scale[row, column] == block.abs().max() / torch.finfo(fp8).max
            alone = tensorwise(block, fp8)
            assert torch.equal(found.data_RS[row * 128 :, column * 128 :][:128, :128].float(), alone.data_RS.float())


@all_quantisers
def test_layout_in_memory_changes_nothing_and_what_is_given_is_contiguous(quantise):
    x = random(128, 256, torch.bfloat16)
    straight = quantise(x)
    for other in (x.T.contiguous().T, torch.cat([x, x], 1)[:, :256], x.repeat_interleave(2, 0)[::2]):
        found = quantise(other)
        assert found.data_RS.is_contiguous()
        assert found.scale.is_contiguous()
        assert torch.equal(found.data_RS.view(torch.uint8), straight.data_RS.view(torch.uint8))
        assert torch.equal(found.scale, straight.scale)


@pytest.mark.parametrize("quantise", [tensorwise, blocks_128x128])
def test_transposed_is_quantised_of_the_transposed(quantise):
    x = random(128, 384, torch.bfloat16)
    turned, again = quantise(x).transposed, quantise(x.T)
    assert turned.data_RS.is_contiguous()
    assert torch.equal(turned.data_RS.view(torch.uint8), again.data_RS.view(torch.uint8))
    assert torch.equal(turned.scale, again.scale)


@pytest.mark.parametrize("quantise", [rowwise, blocks_1x128])
def test_a_scale_along_a_row_is_not_transposed(quantise):
    with pytest.raises(AssertionError, match="no use to a column"):
        _ = quantise(random(128, 256)).transposed


@both
@pytest.mark.parametrize("length", [1, 16, 127, 128, 129, 300])
def test_strips_are_padded_with_zeros(fp8, length):
    x = random(5, length)
    found = blocks_1x128(x, fp8)
    padded = -(-length // 128) * 128
    assert found.data_RS.shape == (5, padded)
    assert found.scale.shape == (5, padded // 128)
    values = found.dequantised(torch.float32)
    np.testing.assert_array_equal(values[:, :length].numpy(), oracle.quantised(x.numpy(), 1, 128, FORMATS[fp8]))
    assert torch.count_nonzero(values[:, length:]) == 0


@both
@all_quantisers
def test_zeros_stay_zeros(quantise, fp8):
    x = torch.zeros(128, 128)
    found = quantise(x, fp8)
    assert torch.equal(found.dequantised(torch.float32), x)
    assert (found.scale >= torch.finfo(torch.float32).smallest_normal).all()


@both
@all_quantisers
def test_next_to_nothing_and_next_to_infinity_are_finite(quantise, fp8):
    """What is below the least scale becomes zero; all else keeps the format's precision."""
    for exponent in (-149, -140, -126, -110, -100, -96, 100, 127):
        x = torch.full((128, 128), 2.0).pow(exponent)
        x[::2] *= -1
        found = quantise(x, fp8).dequantised(torch.float64)
        assert torch.isfinite(found).all()
        if exponent >= -96:
            torch.testing.assert_close(found, x.double(), rtol=1e-6, atol=0)
        else:
            assert (found.abs() <= 2 * x.abs()).all()
            assert (found * x >= 0).all()


@both
@all_quantisers
def test_what_is_not_finite_stays_so_and_spoils_its_block_alone(quantise, fp8):
    rows, columns = QUANTISERS[quantise]
    top, left = 130 // rows * rows, 7 // columns * columns
    for dtype, bad in itertools.product((torch.bfloat16, torch.float64), (math.inf, -math.inf, math.nan)):
        x = random(256, 256, dtype, seed=1)
        x[130, 7] = bad
        finite = torch.isfinite(quantise(x, fp8).dequantised(torch.float64))
        assert not finite[130, 7]
        finite[top : top + rows, left : left + columns] = True
        assert finite.all()


@both
def test_a_cast_clamps_what_its_scale_is_too_small_for(fp8):
    most = torch.finfo(fp8).max
    x = torch.tensor([1.0, 3.0, most, 1.07 * most, 1e30, -1e30, math.inf, -math.inf, math.nan])
    found = cast(x, torch.tensor(1.0), fp8).float()
    assert found[:8].tolist() == [1.0, 3.0, most, most, most, -most, most, -most]
    assert found[8].isnan()


@pytest.mark.parametrize("quantise", [tensorwise, rowwise, blocks_1x128])
@pytest.mark.parametrize("shape", [(0, 128), (16, 0), (0, 0)])
def test_nothing_is_quantised_to_nothing(quantise, shape):
    found = quantise(torch.zeros(shape, dtype=torch.bfloat16))
    assert found.data_RS.shape == shape
    assert found.dequantised(torch.float32).shape == shape


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 5),
    fp8=st.sampled_from(list(FORMATS)),
    numbers=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=15, max_size=15),
)
def test_any_finite_matrix(rows, columns, fp8, numbers):
    x = torch.tensor(numbers[: rows * columns], dtype=torch.float32).view(rows, columns)
    for quantise in (tensorwise, rowwise):
        expected = oracle.quantised(x.numpy(), *QUANTISERS[quantise], FORMATS[fp8])
        np.testing.assert_array_equal(quantise(x, fp8).dequantised(torch.float32).numpy(), expected)


def test_granularity_is_read_off_the_scale():
    x = random(256, 256)
    assert [quantise(x).granularity for quantise in QUANTISERS] == ["tensor", "row", "1x128", "128x128"]
    assert blocks_1x128(x[:, :128]).granularity == "row"
    assert blocks_128x128(x[:128, :128]).granularity == "128x128"
    assert blocks_128x128(x[:, :128]).granularity == "128x128"
    assert Quantised(x[:1].to(E4M3), torch.ones(1, 2)).granularity == "1x128"


@both
@pytest.mark.parametrize("quantise", [tensorwise, rowwise])
def test_torchaos_casts_agree(quantise, fp8):
    """It multiplies with a rounded reciprocal where quern divides: next to a tie a value may go to the neighbour."""
    float8_utils = pytest.importorskip("torchao.float8.float8_utils")
    from torchao.float8.config import ScalingGranularity

    x = random(64, 256)
    granularity = ScalingGranularity.TENSORWISE if quantise is tensorwise else ScalingGranularity.AXISWISE
    scale = float8_utils.tensor_to_scale(
        x, fp8, scaling_granularity=granularity, axiswise_dim=None if quantise is tensorwise else -1
    )
    theirs = float8_utils.to_fp8_saturated(x * scale, fp8)
    ours = quantise(x, fp8)
    torch.testing.assert_close(ours.scale, scale.reciprocal(), rtol=1e-6, atol=0)
    differ = ours.data_RS.view(torch.uint8).int() - theirs.view(torch.uint8).int()
    assert differ.abs().max() <= 1
    assert torch.count_nonzero(differ) <= x.numel() // 1000
