"""Sizes: presets against published parameter counts, defaults, and refusals."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from quern.model.config import PRESETS, ModelConfig, RopeScaling


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [  # from the safetensors index of meta-llama's repositories
        ("1B", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, parameters):
    assert ModelConfig(preset=preset).shape(vocab_size=128_256).num_parameters == parameters


def test_the_small_presets_are_as_large_as_they_say():
    assert 110e6 < ModelConfig(preset="125M").shape(50_257).num_parameters < 140e6
    assert ModelConfig(preset="debug").shape(8192).num_parameters < 10e6


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_overridden_size_by_size(preset):
    plain = ModelConfig(preset=preset).shape(1000)
    assert plain.head_dim == PRESETS[preset].get("head_dim", plain.dim // plain.num_heads)
    changed = ModelConfig(preset=preset, num_layers=3, tied_embeddings=not plain.tied_embeddings).shape(1000)
    expected = {"num_layers": 3, "tied_embeddings": not plain.tied_embeddings}
    assert changed.model_dump() == plain.model_dump() | expected


def test_sizes_left_out_follow_from_the_others():
    shape = ModelConfig(num_layers=2, dim=512, num_heads=8).shape(1000)
    assert (shape.num_kv_heads, shape.head_dim) == (8, 64)
    assert shape.ffn_dim == 1408  # 8/3 · 512 = 1365.3, next multiple of 64
    assert (shape.rope_theta, shape.tied_embeddings, shape.rope_scaling) == (10_000.0, False, None)


@pytest.mark.parametrize(
    ("vocab", "multiple", "padded"), [(50_257, 128, 50_304), (128, 128, 128), (129, 128, 256), (5, 1, 5)]
)
def test_the_vocabulary_is_padded_to_its_multiple_and_padding_is_no_parameter(vocab, multiple, padded):
    shape = ModelConfig(num_layers=1, dim=4, num_heads=1, vocab_multiple=multiple).shape(vocab)
    assert shape.padded_vocab_size == padded
    wider = ModelConfig(num_layers=1, dim=4, num_heads=1, vocab_multiple=multiple).shape(vocab + 1)
    assert wider.num_parameters - shape.num_parameters == 2 * 4


def test_flops_of_llama_3_8b():
    # 6 · (parameters without the embedding) + 12 · 32 · 4096 · 8192, the last half when causal
    shape = ModelConfig(preset="llama3-8b").shape(128_256)
    multiplied = 8_030_261_248 - 128_256 * 4096 - 4096
    assert shape.flops_per_token(8192, causal=False) == 6 * multiplied + 12_884_901_888
    assert shape.flops_per_token(8192, causal=True) == 6 * multiplied + 6_442_450_944


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "num_layers: missing; expected it, or preset: one of debug, 125M"),
        ({"num_layers": 1, "dim": 8}, "num_heads: missing"),
        ({"num_layers": 1, "dim": 10, "num_heads": 3}, r"num_heads: expected a divisor of dim \(10\), or head_dim"),
        ({"num_layers": 1, "dim": 8, "num_heads": 4, "num_kv_heads": 3}, r"num_kv_heads: expected a divisor of num_h"),
        ({"num_layers": 1, "dim": 9, "num_heads": 3}, "head_dim: expected an even number"),
        ({"preset": "2B"}, "preset"),
        ({"preset": "debug", "dim": 0}, "dim"),
        ({"preset": "debug", "depth": 3}, "depth"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig(**sizes)


def test_scaling_bands_must_be_in_order():
    with pytest.raises(ValidationError, match=r"high_freq_factor: expected a number > low_freq_factor \(4\), got 4"):
        RopeScaling(low_freq_factor=4, high_freq_factor=4)
