"""Our network against transformers': the same logits from the same files, in both directions, and refusals."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from quern.errors import InputError, QuernError
from quern.model import hf
from quern.model.config import ModelConfig, ModelShape
from quern.model.transformer import Transformer

VOCAB = 150  # padded to 256
SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 4, "num_kv_heads": 4},
    "grouped-tied": {"num_heads": 4, "num_kv_heads": 2, "tied_embeddings": True},
    "own-head-dim": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 10},
    "scaled": {"num_heads": 2, "num_kv_heads": 1, "rope_scaling": SCALING, "rope_theta": 500.0, "norm_eps": 1e-3},
    "qwen3": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "rope_theta": 1e6},
    "qwen3-odd": {"num_heads": 3, "head_dim": 12, "qk_norm": True, "tied_embeddings": True, "rope_scaling": SCALING},
}


def shape_of(name: str, **changes: Any) -> ModelShape:
    return ModelConfig(**{"num_layers": 3, "dim": 32, "ffn_dim": 52} | MODELS[name] | changes).shape(VOCAB)


def random_model(shape: ModelShape, dtype: torch.dtype = torch.float32) -> Transformer:
    """Weights large enough that each one matters, norms too."""
    model = Transformer(shape).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[1] ** -0.5
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread
            parameter.copy_(drawn + 1 if parameter.ndim == 1 else drawn)
    return model


def unpadded(model: Transformer) -> dict[str, torch.Tensor]:
    rows = {"embed.weight", "head.weight"}
    return {name: (p[:VOCAB] if name in rows else p).detach() for name, p in model.named_parameters()}


def write(folder: Path, model: Transformer, **options: Any) -> str:
    folder.mkdir(exist_ok=True)
    dtype = hf.write_weights(str(folder), model.shape, sorted(unpadded(model).items()), **options)
    config = hf.hf_config(model.shape, max_position=64, eos_id=7, dtype=dtype)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 48), generator=torch.Generator().manual_seed(5))


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_exported_logits_are_ours(tmp_path: Path, name: str) -> None:
    model = random_model(shape_of(name))
    theirs = AutoModelForCausalLM.from_pretrained(write(tmp_path, model), local_files_only=True)
    assert type(theirs) is (Qwen3ForCausalLM if model.shape.qk_norm else LlamaForCausalLM)
    with torch.no_grad():
        assert_close(theirs(tokens()).logits, model(tokens()), 1e-5)


@pytest.mark.usefixtures("transformers_in_float64")
@pytest.mark.parametrize("name", MODELS)
def test_exported_logits_are_ours_in_float64(tmp_path: Path, name: str) -> None:
    model = random_model(shape_of(name), torch.float64)
    folder = write(tmp_path, model)
    theirs = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert theirs.dtype == torch.float64  # config.json says so
    with torch.no_grad():
        assert_close(theirs(tokens()).logits, model(tokens()), 1e-10)


@pytest.mark.parametrize("name", ["grouped-tied", "scaled", "qwen3"])
def test_a_model_of_transformers_computes_the_same_here(tmp_path: Path, name: str) -> None:
    """Config and weights saved by transformers itself, in its present format."""
    shape = shape_of(name)
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling:
        scaling = shape.rope_scaling.model_dump()
        rope |= {
            "rope_type": "llama3",
            "original_max_position_embeddings": scaling.pop("original_max_position"),
        } | scaling
    sizes = {
        "hidden_size": shape.dim, "intermediate_size": shape.ffn_dim, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": shape.norm_eps, "rope_parameters": rope,
        "tie_word_embeddings": shape.tied_embeddings, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(11)
    theirs = (
        Qwen3ForCausalLM(Qwen3Config(**sizes)) if shape.qk_norm else LlamaForCausalLM(LlamaConfig(**sizes))
    ).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / hf.INDEX_FILE).exists()

    config = json.loads((tmp_path / "config.json").read_text())
    assert hf.shape_from_config(config, "config.json") == shape
    model = Transformer(shape)
    with hf.HFWeights(str(tmp_path), shape) as weights, torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            tensor = weights[parameter_name]
            parameter[: len(tensor)].copy_(tensor)
    with torch.no_grad():
        assert_close(model(tokens()), theirs(tokens()).logits, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_export_and_import_keep_every_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = random_model(shape_of(name), dtype)
    folder = write(tmp_path, model, max_shard_bytes=20_000)
    shape = hf.shape_from_config(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert shape == model.shape
    with hf.HFWeights(folder, shape) as weights:
        assert set(weights) == set(unpadded(model))
        for parameter_name, expected in unpadded(model).items():
            assert weights[parameter_name].dtype == dtype
            assert torch.equal(weights[parameter_name], expected), parameter_name


def test_the_names_are_those_of_the_network() -> None:
    for name in MODELS:
        model = Transformer(shape_of(name))
        assert hf.expected_tensors(model.shape) == {n: tuple(p.shape) for n, p in unpadded(model).items()}


def test_bf16_rounds_the_weights_and_says_so(tmp_path: Path) -> None:
    model = random_model(shape_of("llama"))
    theirs = AutoModelForCausalLM.from_pretrained(write(tmp_path, model, dtype=torch.bfloat16))
    assert theirs.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    name = "blocks.1.ffn.w2.weight"
    assert torch.equal(theirs.state_dict()[hf.hf_names(name, model.shape)[0]], unpadded(model)[name].bfloat16())


@pytest.mark.parametrize("limit", [1, 7000, 30_000, 10**9])
def test_a_shard_holds_at_most_the_limit_or_one_tensor(tmp_path: Path, limit: int) -> None:
    model = random_model(shape_of("qwen3"))
    write(tmp_path, model, max_shard_bytes=limit)
    files = {path.name: load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))}
    for tensors in files.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit
    assert sum(len(tensors) for tensors in files.values()) == len(unpadded(model))
    (tmp_path / "any").write_bytes(b"")
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "any").stat().st_mode}
    if limit == 10**9:
        assert list(files) == ["model.safetensors"]
        assert not (tmp_path / hf.INDEX_FILE).exists()
        return
    index = json.loads((tmp_path / hf.INDEX_FILE).read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    assert list(files) == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]


def test_only_the_tensors_of_one_shard_are_held(tmp_path: Path) -> None:
    shape = shape_of("llama")
    limit, held = 20_000, 0
    most: list[int] = []

    def drop(size: int) -> None:
        nonlocal held
        held -= size

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal held
        for name, size in sorted(hf.expected_tensors(shape).items()):
            tensor = torch.zeros(size)
            held += tensor.nbytes
            most.append(held)
            weakref.finalize(tensor, drop, tensor.nbytes)
            yield name, tensor
            del tensor

    hf.write_weights(str(tmp_path), shape, weights(), max_shard_bytes=limit)
    largest = max(4 * np.prod(size) for size in hf.expected_tensors(shape).values())
    assert max(most) <= limit + largest
    assert sum(4 * np.prod(size) for size in hf.expected_tensors(shape).values()) > 3 * (limit + largest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm.weight"), "norm.weight: missing"),
        (lambda w: w.update({"norm.weight": torch.ones(33)}), r"norm.weight: expected \(32,\), got size \(33,\)"),
        (lambda w: w.update({"extra.weight": torch.ones(3)}), "extra.weight: expected no such name"),
    ],
)
def test_other_weights_than_the_shapes_are_not_written(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    weights = unpadded(random_model(shape_of("llama")))
    change(weights)
    with pytest.raises(QuernError, match=message):
        hf.write_weights(str(tmp_path), shape_of("llama"), weights.items())


def test_a_head_count_that_transformers_refuses_is_named() -> None:
    with pytest.raises(InputError, match=r"num_heads: .*LlamaForCausalLM needs a divisor of dim \(32\), got 3"):
        hf.hf_config(shape_of("llama", num_heads=3, num_kv_heads=3, head_dim=8), max_position=8, eos_id=0,
                     dtype=torch.float32)  # fmt: skip


GOOD = hf.hf_config(shape_of("scaled"), max_position=64, eos_id=7, dtype=torch.float32)
ROPE = {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures: expected ['LlamaForCausalLM'] or "),
        ({"architectures": None}, "architectures: expected"),
        ({"model_type": "qwen3"}, "model_type: expected 'llama', got 'qwen3'"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"mlp_bias": True}, "mlp_bias: expected False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected None, got {'bits': 4}"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected only 'full_attention', got"),
        ({"use_sliding_window": True}, "use_sliding_window: expected False, got True"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.rope_type: expected 'default' or 'llama3', "),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: expected 'default' or 'llama3', got"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor: missing; rope_type 'llama3' needs it"),
        ({"rope_scaling": ROPE | {"low_freq_factor": 5}}, "rope_scaling: "),
        ({"rope_scaling": 3}, "rope_scaling: expected an object, got 3"),
        ({"num_hidden_layers": 10**9}, "num_layers: Input should be less than or equal to 10000"),
        ({"hidden_size": None}, "hidden_size: expected an integer ≥ 1, got None"),
        ({"vocab_size": "150"}, "vocab_size: expected an integer ≥ 1, got '150'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 2, got 3"),
        ({"head_dim": 7}, "head_dim: expected an even number, got 7"),
        ({"rms_norm_eps": -1}, "norm_eps: "),
        ({"tie_word_embeddings": "perhaps"}, "tied_embeddings: "),
    ],
)
def test_a_config_that_computes_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    assert hf.shape_from_config(GOOD, "c.json") == shape_of("scaled")
    with pytest.raises(InputError) as caught:
        hf.shape_from_config(GOOD | change, "c.json")
    assert str(caught.value).startswith(f"c.json: {message}")
    assert "\n" not in str(caught.value)


def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    for config_class, name in ((LlamaConfig, "LlamaForCausalLM"), (Qwen3Config, "Qwen3ForCausalLM")):
        full = config_class(
            num_attention_heads=64,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            architectures=[name],
        )
        given = {key: getattr(full, key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers",
                                                     "num_attention_heads", "vocab_size", "architectures")}  # fmt: skip
        assert hf.shape_from_config(given, "c") == hf.shape_from_config(full.to_dict(), "c")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, random_model(shape_of("llama")), max_shard_bytes=20_000)
    return tmp_path


def rewrite(folder: Path, key: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Change the file that holds ``key``; returns it."""
    file = folder / json.loads((folder / hf.INDEX_FILE).read_text())["weight_map"][key]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"{NORM}: missing; expected a tensor of size [32]"),
        (lambda t: t.update({NORM: torch.ones(31)}), f"{NORM}: expected size [32], got [31]"),
        (lambda t: t.update({NORM: torch.ones(32).int()}), f"{NORM}: expected one of BF16, F16, F32, F64, got I32"),
        (lambda t: t.update({"model.norm.bias": torch.ones(32)}), "model.norm.bias: expected no such tensor"),
        (lambda t: t.update({EMBED: torch.ones(VOCAB, 32)}), f"{EMBED}: expected once, is also in "),
    ],
)
def test_tensors_other_than_expected_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    file = rewrite(folder, NORM, change)
    with pytest.raises(InputError) as caught:
        hf.HFWeights(str(folder), shape_of("llama"))
    assert message in str(caught.value)
    if "once" not in message:
        assert str(caught.value).startswith(f"{file}: ")


def test_a_head_beside_tied_embeddings_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"lm_head.weight: expected no such tensor .* ties it to the embedding"):
        hf.HFWeights(str(folder), shape_of("llama", tied_embeddings=True))


def test_the_rotation_buffer_of_old_files_is_passed_over(folder: Path) -> None:
    rewrite(folder, NORM, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    with hf.HFWeights(str(folder), shape_of("llama")) as weights:
        assert set(weights) == set(hf.expected_tensors(shape_of("llama")))


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(InputError, match=r"pytorch_model.bin: a pickle, which runs code when it is read"):
        hf.HFWeights(str(tmp_path), shape_of("llama"))


def test_a_folder_without_weights_and_damaged_files_are_named(folder: Path, tmp_path_factory: Any) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(InputError, match=f"{empty}: expected model.safetensors or"):
        hf.HFWeights(str(empty), shape_of("llama"))
    file = folder / json.loads((folder / hf.INDEX_FILE).read_text())["weight_map"][NORM]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InputError, match=f"{file}: cannot be read as safetensors"):
        hf.HFWeights(str(folder), shape_of("llama"))
    file.unlink()
    with pytest.raises(InputError, match=f"{file}: cannot be read as safetensors"):
        hf.HFWeights(str(folder), shape_of("llama"))


@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", 3, "model.bin"])
def test_an_index_may_name_files_beside_it_only(folder: Path, place: Any) -> None:
    index = json.loads((folder / hf.INDEX_FILE).read_text())
    index["weight_map"][NORM] = place
    (folder / hf.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(InputError, match=f"weight_map.{NORM}: expected a .safetensors file beside it, got"):
        hf.HFWeights(str(folder), shape_of("llama"))
