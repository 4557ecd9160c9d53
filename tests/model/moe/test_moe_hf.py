"""Networks with experts against transformers' Mixtral, Qwen3-MoE and OLMoE, from the same files, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from quern.errors import InputError
from quern.model import hf
from quern.model.config import ModelConfig, ModelShape
from quern.model.hf import files
from quern.model.moe.layer import MoE
from quern.model.transformer import Transformer

VOCAB = 70  # padded to 128
SIZES: dict[str, Any] = {"num_layers": 3, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 20}
EXPERTS: dict[str, Any] = {"num_experts": 6, "top_k": 2, "ffn_dim": 20, "normalize": True}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"moe": EXPERTS},
    "mixtral-own-head-dim": {"moe": EXPERTS, "head_dim": 10, "tied_embeddings": True},
    "qwen3": {"moe": EXPERTS | {"ffn_dim": 12}, "qk_norm": True, "head_dim": 12, "norm_eps": 1e-6},
    "qwen3-not-normalized": {"moe": EXPERTS | {"normalize": False, "top_k": 3}, "qk_norm": True},
    "qwen3-first-dense": {"moe": EXPERTS | {"first_dense": 1}, "qk_norm": True},
    "qwen3-every-second": {"moe": EXPERTS | {"every": 2}, "qk_norm": True, "num_layers": 4},
    "qwen3-after-one-every-second": {
        "moe": EXPERTS | {"first_dense": 1, "every": 2}, "qk_norm": True, "num_layers": 5,
    },
    "olmoe": {"moe": EXPERTS | {"normalize": False}, "qk_norm": "whole", "num_kv_heads": 4},
    "olmoe-grouped": {"moe": EXPERTS, "qk_norm": "whole"},
}  # fmt: skip
CLASSES = {"mixtral": MixtralForCausalLM, "qwen3": Qwen3MoeForCausalLM, "olmoe": OlmoeForCausalLM}


def shape_of(name: str, **changes: Any) -> ModelShape:
    return ModelConfig(**SIZES | MODELS[name] | changes).shape(VOCAB)


def random_model(shape: ModelShape, dtype: torch.dtype) -> Transformer:
    model = Transformer(shape).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread
            parameter.copy_(drawn + 1 if parameter.ndim == 1 else drawn)
    return model


def unpadded(model: Transformer) -> dict[str, Tensor]:
    rows = {"embed.weight", "head.weight"}
    return {name: (p[:VOCAB] if name in rows else p).detach() for name, p in model.named_parameters()}


def write(folder: Path, model: Transformer, **options: Any) -> str:
    dtype = hf.write_weights(str(folder), model.shape, sorted(unpadded(model).items()), **options)
    config = hf.hf_config(model.shape, max_position=64, eos_id=7, dtype=dtype)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def read(folder: Path) -> tuple[ModelShape, dict[str, Tensor]]:
    shape = hf.shape_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    with hf.HFWeights(str(folder), shape) as weights:
        return shape, dict(weights)


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))


def gradients_of(theirs: Any, shape: ModelShape) -> dict[str, Tensor]:
    """Gradients of a model of transformers by our names; in memory it has w1 and w3 of all experts as one."""
    found = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    ours: dict[str, Tensor] = {}
    for name in hf.expected_tensors(shape):
        if ".experts." not in name:
            key = hf.hf_names(name, shape)[0].replace("block_sparse_moe", "mlp")
            ours[name] = found.pop(key)
        else:
            layer, part = name.split(".")[1], name.split(".")[-1]
            stem, width = f"model.layers.{layer}.mlp.experts", shape.moe.ffn_dim
            whole = found[f"{stem}.down_proj" if part == "w2" else f"{stem}.gate_up_proj"]
            ours[name] = {"w1": whole[:, :width], "w2": whole, "w3": whole[:, width:]}[part]
    assert all(".experts." in name for name in found), found.keys()
    return ours


@pytest.mark.usefixtures("transformers_in_float64")
@pytest.mark.parametrize("name", MODELS)
def test_logits_choices_and_every_gradient_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = random_model(shape_of(name), torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(
        write(tmp_path, model), local_files_only=True, experts_implementation="eager"
    )
    assert type(theirs) is CLASSES[name.split("-")[0]]
    assert theirs.dtype == torch.float64
    chosen: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    for block, layer in zip(model.blocks.values(), theirs.model.layers, strict=True):
        if isinstance(block.ffn, MoE):
            block.ffn.on_routing = lambda routing: chosen["ours"].append(routing.chosen_TK)
            layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen["theirs"].append(out[2]))
    logits, expected = model(tokens()), theirs(tokens()).logits
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert len(chosen["ours"]) == sum(model.shape.is_sparse(layer) for layer in range(model.shape.num_layers))
    assert torch.equal(torch.stack(chosen["ours"]), torch.stack(chosen["theirs"]))
    assert len(torch.stack(chosen["ours"]).unique()) == 6
    targets = tokens().roll(-1, dims=1)
    model(tokens(), targets)[0].backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    exact, padded = gradients_of(theirs, model.shape), dict(model.named_parameters())
    assert exact.keys() == padded.keys()
    for key, found in padded.items():
        wanted = exact[key]
        assert found.grad is not None
        assert (found.grad[: len(wanted)] - wanted).abs().max() <= 1e-10 * wanted.abs().max(), key


@pytest.mark.parametrize("name", MODELS)
def test_export_and_import_keep_every_bit(tmp_path: Path, name: str) -> None:
    model = random_model(shape_of(name), torch.bfloat16)
    write(tmp_path, model, max_shard_bytes=4000)
    shape, weights = read(tmp_path)
    assert shape == model.shape
    assert weights.keys() == unpadded(model).keys()
    for key, expected in unpadded(model).items():
        assert weights[key].dtype == torch.bfloat16
        assert torch.equal(weights[key], expected), key


def test_files_have_the_names_of_the_published_ones(tmp_path: Path) -> None:
    for name, stem, parts in (
        ("mixtral", "block_sparse_moe", ("w1", "w2", "w3")),
        ("olmoe", "mlp", ("gate_proj", "down_proj", "up_proj")),
    ):
        model = random_model(shape_of(name), torch.float32)
        folder = tmp_path / name
        folder.mkdir()
        write(folder, model)
        tensors = load_file(folder / "model.safetensors")
        block = model.blocks["1"]
        assert torch.equal(tensors[f"model.layers.1.{stem}.gate.weight"], block.ffn.router.weight)
        for ours, part in zip(("w1", "w2", "w3"), parts, strict=True):
            whole = getattr(block.ffn.experts, ours)
            assert torch.equal(tensors[f"model.layers.1.{stem}.experts.3.{part}.weight"], whole[3])
        assert len([key for key in tensors if key.startswith("model.layers.1.")]) == 6 + 1 + 18 + 2 * (name == "olmoe")


OWN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 6, "intermediate_size": 20}),
    "qwen3-first-dense": (Qwen3MoeConfig, Qwen3MoeForCausalLM,
              {"num_experts": 6, "moe_intermediate_size": 20, "norm_topk_prob": True, "mlp_only_layers": [0],
               "intermediate_size": 20}),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 6, "intermediate_size": 20}),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_model_of_transformers_computes_the_same_here(tmp_path: Path, name: str) -> None:
    """Config and weights saved by transformers itself, in its present format."""
    make_config, make_model, experts = OWN[name]
    shape = shape_of(name)
    torch.manual_seed(11)
    theirs = make_model(
        make_config(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=shape.num_kv_heads,
            vocab_size=VOCAB, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.3,
            num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, **experts,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    found, weights = read(tmp_path)
    assert found == shape
    model = Transformer(shape)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter[: len(weights[key])].copy_(weights[key])
        logits, expected = model(tokens()), theirs(tokens()).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_names_are_those_of_the_network() -> None:
    odd = ModelConfig(**SIZES, moe=EXPERTS | {"shared_ffn_dim": 8, "shared_gate": True, "bias": True}).shape(VOCAB)
    for shape in (odd, *map(shape_of, MODELS)):
        model = Transformer(shape)
        sizes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        sizes |= {name: tuple(tensor.shape) for name, tensor in unpadded(model).items()}
        assert hf.expected_tensors(shape) == sizes


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    for make_config, make_model, _ in OWN.values():
        full = make_config(architectures=[make_model.__name__], num_attention_heads=32, num_hidden_layers=4)
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                  "architectures")  # fmt: skip
        given = {key: getattr(full, key) for key in needed}
        assert hf.shape_from_config(given, "c") == hf.shape_from_config(full.to_dict(), "c")


def test_of_experts_one_stacked_tensor_and_a_shard_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of a stacked tensor that wait for their shard would keep all of it, and one of every layer."""
    largest: list[int] = []

    def save(tensors: dict[str, Tensor], path: str, **options: Any) -> None:
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for key, t in tensors.items() if "experts" in key
        }
        largest.append(sum(storage.nbytes() for storage in storages.values()))
        save_file(tensors, path, **options)

    monkeypatch.setattr(files, "save_file", save)
    write(tmp_path, random_model(shape_of("mixtral"), torch.float32), max_shard_bytes=9000)
    assert 6 * 20 * 32 * 4 > 9000
    assert max(largest) <= 9000


GOOD = {name: hf.hf_config(shape_of(name), max_position=64, eos_id=7, dtype=torch.float32) for name in MODELS}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral", {"sliding_window": 4096}, "sliding_window: expected None, got 4096"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: expected 0, got 0.1"),
        ("mixtral", {"attention_bias": True}, "attention_bias: expected False, got True"),
        ("mixtral", {"num_experts_per_tok": 7}, "top_k: expected at most num_experts (6), got 7"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts: expected an integer ≥ 1, got 0"),
        ("mixtral", {"num_local_experts": 10**6}, "num_local_experts: expected at most 100,000 in all layers, got 1"),
        ("mixtral", {"num_hidden_layers": 10**12}, "num_local_experts: expected at most 100,000 in all layers, got 6"),
        ("mixtral", {"model_type": "qwen3_moe"}, "model_type: expected 'mixtral', got 'qwen3_moe'"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window: expected False, got True"),
        ("qwen3", {"mlp_only_layers": [1]}, "mlp_only_layers: expected that after the first layers every n-th one has"),
        ("qwen3", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers: expected that after the first layers every n-th"),
        ("qwen3", {"mlp_only_layers": "0"}, 'mlp_only_layers: expected a list of numbers of layers, got "0"'),
        ("qwen3", {"mlp_only_layers": [True]}, "mlp_only_layers: expected a list of numbers of layers, got [true]"),
        ("qwen3", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected an integer ≥ 1, got 0"),
        ("qwen3", {"decoder_sparse_step": 4}, "mlp_only_layers: expected that after the first layers every n-th one"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: expected None, got 8.0"),
        ("olmoe", {"norm_topk_prob": "perhaps"}, "normalize: "),
    ],
)
def test_a_config_that_computes_something_else_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    assert hf.shape_from_config(GOOD[name], "c.json") == shape_of(name)
    with pytest.raises(InputError) as caught:
        hf.shape_from_config(GOOD[name] | change, "c.json")
    assert str(caught.value).startswith(f"c.json: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"moe": EXPERTS | {"normalize": False}},
            "model.moe.normalize: transformers' MixtralForCausalLM, which model",
        ),
        ({"moe": EXPERTS | {"first_dense": 1}}, "model.moe.first_dense: .* knows 0 alone, got 1"),
        ({"moe": EXPERTS | {"score": "sigmoid"}}, 'model.moe.score: .* knows "softmax" alone, got "sigmoid"'),
        ({"moe": EXPERTS | {"bias": True}}, "model.moe.bias: "),
        ({"moe": EXPERTS | {"shared_ffn_dim": 4}}, "model.moe.shared_ffn_dim: "),
        ({"moe": EXPERTS | {"groups": 2}}, "model.moe.top_groups: .* knows 2 alone, got 1"),
        (
            {"moe": EXPERTS | {"scale": 2.0}, "qk_norm": True},
            "model.moe.scale: .*Qwen3MoeForCausalLM.* knows 1.0 ",
        ),
        ({"moe": EXPERTS | {"every": 2}, "qk_norm": "whole"}, "model.moe.every: .*OlmoeForCausalLM"),
        ({"qk_norm": "whole", "head_dim": 10}, r"model.head_dim: .* needs dim / num_heads \(32 / 4\), got 10"),
        ({"qk_norm": "whole", "moe": None}, "model.qk_norm: whole has no counterpart in transformers without experts"),
    ],
)
def test_what_transformers_cannot_express_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hf.hf_config(shape_of("mixtral", **change), max_position=8, eos_id=0, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.experts.5.up_proj.weight"), "experts.5.up_proj.weight: missing; "),
        (lambda t: t.update({"model.layers.0.mlp.experts.6.up_proj.weight": torch.ones(20, 32)}),
         "model.layers.0.mlp.experts.6.up_proj.weight: expected no such tensor"),
        (lambda t: t.update({"model.layers.0.mlp.experts.0.down_proj.weight": torch.ones(20, 32)}),
         r"experts.0.down_proj.weight: expected size \[32, 20\], got \[20, 32\]"),
    ],
)  # fmt: skip
def test_experts_other_than_expected_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    shape = shape_of("olmoe")
    write(tmp_path, random_model(shape, torch.float32))
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=message):
        hf.HFWeights(str(tmp_path), shape)


def test_experts_of_several_dtypes_are_read_in_the_widest(tmp_path: Path) -> None:
    model = random_model(shape_of("olmoe"), torch.bfloat16)
    write(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    tensors[name] = tensors[name].float() + np.float32(2**-20)
    save_file(tensors, tmp_path / "model.safetensors")
    whole = read(tmp_path)[1]["blocks.1.ffn.experts.w3"]
    assert whole.dtype == torch.float32
    assert torch.equal(whole[4], tensors[name])
    assert torch.equal(whole[5].bfloat16(), model.blocks["1"].ffn.experts.w3[5])
