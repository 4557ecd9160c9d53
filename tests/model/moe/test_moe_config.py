"""Sizes of models with experts: presets against published counts, what follows from what, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from quern.config import canonical_json, dump_yaml, load_config
from quern.model.config import ModelConfig, ModelShape
from quern.model.moe.config import MoEShape
from quern.model.transformer import Transformer

SIZES: dict[str, Any] = {"num_layers": 5, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24}
EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 3, "ffn_dim": 12}


def shape_of(sizes: dict[str, Any] | None = None, **experts: Any) -> ModelShape:
    return ModelConfig(**SIZES | (sizes or {}), moe=EXPERTS | experts).shape(50)


@pytest.mark.parametrize(
    ("preset", "vocab", "parameters", "active"),
    [  # from the safetensors index of each repository; active, in billions, from the papers and the model card
        ("mixtral-8x7b", 32_000, 46_702_792_704, 12.9),
        ("qwen3-30b-a3b", 151_936, 30_532_122_624, 3.3),
        ("olmoe-1b-7b", 50_304, 6_919_161_856, 1.3),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(preset, vocab, parameters, active):
    shape = ModelConfig(preset=preset).shape(vocab)
    assert shape.num_parameters == parameters
    assert shape.num_active_parameters / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize(
    "experts",
    [{}, {"shared_ffn_dim": 20, "shared_gate": True, "bias": True}, {"first_dense": 1, "every": 2}],
)
@pytest.mark.parametrize("qk_norm", [False, True, "whole"])
def test_parameters_are_those_of_the_network_and_active_ones_those_of_top_k_experts(experts, qk_norm):
    shape = shape_of({"qk_norm": qk_norm}, **experts)
    with torch.device("meta"):
        model = Transformer(shape)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    padding = 2 * (shape.padded_vocab_size - shape.vocab_size) * shape.dim
    assert shape.num_parameters == sum(sizes.values()) - padding
    assert shape.num_block_parameters == sum(size for name, size in sizes.items() if name.startswith("blocks."))
    idle = sum(size * 5 // 8 for name, size in sizes.items() if ".experts." in name)
    assert idle > 0
    assert shape.num_active_parameters == shape.num_parameters - idle
    blocks = shape.num_block_parameters - idle
    attention = 12 * 5 * 4 * 4 * 100
    assert shape.flops_per_token(100, causal=False) == 6 * (blocks + 50 * 16) + attention


@pytest.mark.parametrize(
    ("experts", "sparse"),
    [({}, [0, 1, 2, 3, 4]), ({"first_dense": 2}, [2, 3, 4]), ({"every": 2}, [1, 3]),
     ({"first_dense": 1, "every": 2}, [2, 4]), ({"first_dense": 1, "every": 4}, [4])],
)  # fmt: skip
def test_after_the_first_layers_every_so_manieth_has_experts(experts, sparse):
    shape = shape_of(**experts)
    assert [layer for layer in range(5) if shape.is_sparse(layer)] == sparse
    with torch.device("meta"):
        model = Transformer(shape)
    assert [int(n) for n, block in model.blocks.items() if hasattr(block.ffn, "experts")] == sparse


def test_a_preset_s_experts_are_overridden_one_by_one():
    plain = ModelConfig(preset="qwen3-30b-a3b").shape(100).moe
    changed = ModelConfig(preset="qwen3-30b-a3b", moe={"top_k": 4, "capacity": 1.5}).shape(100).moe
    assert changed == MoEShape(**plain.model_dump() | {"top_k": 4, "capacity": 1.5})
    assert ModelConfig(preset="mixtral-8x7b").shape(100).moe.ffn_dim == 14_336
    assert ModelConfig(**SIZES, moe={"num_experts": 4, "top_k": 1}).shape(50).moe.ffn_dim == 24
    one = ModelConfig(preset="qwen3-30b-a3b")
    assert (one.norm_eps, one.qk_norm) == (1e-6, True)
    other = ModelConfig(preset="qwen3-30b-a3b", norm_eps=1e-5, qk_norm=False)
    assert (other.norm_eps, other.qk_norm) == (1e-5, False)


@pytest.mark.parametrize("preset", [None, "olmoe-1b-7b"])
def test_what_is_written_is_read_as_the_same(preset, tmp_path):
    config = ModelConfig(preset=preset, **({} if preset else SIZES), moe={**EXPERTS, "capacity": 1.1})
    (tmp_path / "model.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "model.yaml", ModelConfig) == config
    shape = config.shape(50)
    assert ModelShape.model_validate_json(shape.model_dump_json(), strict=True) == shape


def test_a_dense_model_is_written_as_before():
    config = ModelConfig(preset="debug")
    assert "moe" not in config.model_dump()
    assert "moe" not in canonical_json(config.shape(50))
    assert '"qk_norm":false' in canonical_json(config)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"top_k": 9}, r"moe.top_k: expected at most num_experts \(8\), got 9"),
        ({"top_k": None}, "moe.top_k: missing; expected it, or a preset that has experts"),
        ({"num_experts": None}, "moe.num_experts: missing"),
        ({"groups": 3}, r"moe.groups: expected a divisor of num_experts \(8\), got 3"),
        ({"groups": 2, "top_groups": 3}, r"moe.top_groups: expected at most groups \(2\), got 3"),
        ({"groups": 4}, r"moe.top_groups: expected 2 or more, so that top_k \(3\) experts are in them \(2 in each\)"),
        ({"shared_gate": True}, "moe.shared_gate: gates the shared experts; expected shared_ffn_dim ≥ 1"),
        ({"drop": "score"}, "moe.drop: changes nothing where nothing is dropped; expected capacity with it"),
        ({"first_dense": 5}, "moe.first_dense: 5 with every 1 leave no layer of num_layers .5. with experts"),
        ({"every": 6}, "moe.first_dense: 0 with every 6 leave no layer"),
        ({"capacity": 0}, "moe.capacity"),
        ({"score": "linear"}, "moe.score"),
    ],
)
def test_experts_that_do_not_fit_are_refused(experts, message):
    with pytest.raises(ValidationError, match=message):
        shape_of(**experts)


def test_capacity_is_of_the_decimal_number():
    """In floating point 1.1 · 10 is more than 11, which would be rounded up to 12."""
    room, of = MoEShape(num_experts=1, top_k=1, ffn_dim=1, capacity=1.1).limit
    assert -(-10 * room // of) == 11
