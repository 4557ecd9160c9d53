"""Rotary positions against transformers' frequencies and against complex multiplication."""

from __future__ import annotations

import cmath

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quern.model import rope
from quern.model.config import ModelConfig, ModelShape, RopeScaling
from quern.model.rope import inverse_frequencies, rotate, rotation

CPU = torch.device("cpu")


def shape(**sizes: object) -> ModelShape:
    return ModelConfig(num_layers=1, dim=32, num_heads=2, **sizes).shape(vocab_size=7)


@pytest.mark.parametrize(("factor", "low", "high", "original"), [(8, 1, 4, 8192), (32, 1, 4, 8192), (4, 2, 3, 64)])
def test_scaled_frequencies_are_those_of_transformers(factor, low, high, original):
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131_072,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": float(factor), "low_freq_factor": float(low),
            "high_freq_factor": float(high), "original_max_position_embeddings": original,
        },
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    scaling = RopeScaling(
        factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
    )  # fmt: skip
    ours = inverse_frequencies(128, 500_000.0, scaling)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-6, atol=0)
    assert not torch.equal(ours, inverse_frequencies(128, 500_000.0))


def test_a_pair_turns_by_position_times_frequency():
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 4, 3, 0, 2]], dtype=torch.int32)
    turned = rotate(x, rotation(shape(), 5, dtype=x.dtype, device=CPU, positions_BL=positions))
    for b, i, n, r in [(0, 0, 0, 0), (0, 2, 1, 0), (0, 4, 2, 7), (1, 0, 0, 3), (1, 2, 2, 5)]:
        angle = positions[b, i].item() * 10_000.0 ** (-2 * r / 16)
        expected = complex(x[b, i, n, r], x[b, i, n, r + 8]) * cmath.exp(1j * angle)
        assert abs(complex(turned[b, i, n, r], turned[b, i, n, r + 8]) - expected) < 1e-13


def test_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=generator)

    def score(i: int, j: int) -> float:
        at = [rotation(shape(), 1000, dtype=q.dtype, device=CPU, positions_BL=torch.tensor([[p]])) for p in (i, j)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum().item()

    assert score(7, 3) == pytest.approx(score(904, 900), abs=1e-12)
    assert score(7, 3) != pytest.approx(score(3, 7), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_table_is_as_wide_as_the_activations_and_at_least_float32(dtype):
    by = rotation(shape(), 4, dtype=dtype, device=CPU)
    assert by.cos_BL1R.dtype == by.sin_BL1R.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert rotate(torch.ones(1, 4, 2, 16, dtype=dtype), by).dtype == dtype


def test_far_positions_are_exact_to_float32():
    by = rotation(shape(), 200_000, dtype=torch.float32, device=CPU, positions_BL=torch.tensor([[199_999]]))
    exact = torch.tensor([cmath.exp(1j * 199_999 * 10_000.0 ** (-2 * r / 16)).real for r in range(8)])
    torch.testing.assert_close(by.cos_BL1R.flatten(), exact, rtol=0, atol=1e-7)


def test_positions_omitted_are_counted_from_zero_in_every_row():
    omitted = rotation(shape(), 6, dtype=torch.float64, device=CPU)
    given = rotation(shape(), 6, dtype=torch.float64, device=CPU, positions_BL=torch.arange(6).repeat(3, 1))
    assert torch.equal(omitted.cos_BL1R.expand_as(given.cos_BL1R), given.cos_BL1R)
    assert torch.equal(omitted.sin_BL1R.expand_as(given.sin_BL1R), given.sin_BL1R)


def test_a_table_made_in_inference_mode_serves_training(monkeypatch):
    monkeypatch.setattr(rope, "_TABLES", {})
    with torch.inference_mode():
        rotation(shape(), 3, dtype=torch.float32, device=CPU)
    x = torch.ones(1, 3, 2, 16, requires_grad=True)
    rotate(x, rotation(shape(), 3, dtype=torch.float32, device=CPU)).sum().backward()
    assert x.grad is not None


def test_a_fake_table_is_never_kept(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    monkeypatch.setattr(rope, "_TABLES", {})
    kept = rotation(shape(), 3, dtype=torch.float32, device=CPU)
    with FakeTensorMode():
        for length in (3, 4):
            assert isinstance(rotation(shape(), length, dtype=torch.float32, device=CPU).cos_BL1R, FakeTensor)
    again = rotation(shape(), 3, dtype=torch.float32, device=CPU)
    assert type(again.cos_BL1R) is torch.Tensor
    assert again.cos_BL1R.data_ptr() == kept.cos_BL1R.data_ptr()
    assert type(rotation(shape(), 4, dtype=torch.float32, device=CPU).cos_BL1R) is torch.Tensor


def test_the_number_of_tables_is_bounded(monkeypatch):
    monkeypatch.setattr(rope, "_TABLES", {})
    for length in range(1, 60):
        by = rotation(shape(), length, dtype=torch.float32, device=CPU)
        assert by.cos_BL1R.shape == (1, length, 1, 8)
    assert len(rope._TABLES) < 30
