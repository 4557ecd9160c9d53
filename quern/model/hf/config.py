"""Converts a model's sizes to and from the ``config.json`` of ``transformers``; what computes otherwise is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from quern.config import show
from quern.errors import InputError
from quern.model.config import ModelShape, RopeScaling
from quern.model.moe.config import MoEShape

__all__ = ["CONFIG_FILE", "hf_config", "shape_from_config"]

CONFIG_FILE = "config.json"

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
MIXTRAL, QWEN3_MOE, OLMOE = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"
MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3", MIXTRAL: "mixtral", QWEN3_MOE: "qwen3_moe", OLMOE: "olmoe"}
_QK_NORM: dict[str, Any] = {LLAMA: False, QWEN3: True, MIXTRAL: False, QWEN3_MOE: True, OLMOE: "whole"}
#: What ``transformers`` takes for fields that are absent, where it is not the same for all.
_DEFAULTS: dict[str, dict[str, Any]] = {
    LLAMA: {},
    QWEN3: {"num_key_value_heads": 32, "head_dim": 128},
    MIXTRAL: {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
    QWEN3_MOE: {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
    OLMOE: {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
}
_EXPERTS = {MIXTRAL: 8, QWEN3_MOE: 128, OLMOE: 64}
#: Bounded: names are made for every expert of a foreign file.
_MOST_EXPERTS = 100_000

_ROPE = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")} | {
    "original_max_position": "original_max_position_embeddings"
}
"""transformers' keys of a llama3 scaling, by ours."""


def hf_config(shape: ModelShape, *, max_position: int | None, eos_id: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """The content of ``config.json``.

    ``max_position``: the longest sequence the model was trained on; None = not known, then 2,048 or, with rope scaling,
    the length it stretches to. There is no BOS: training puts nothing before a document.

    Raises:
        InputError: sizes that ``transformers`` cannot express. Of experts a capacity is not expressed: there nothing is
            dropped.
    """
    architecture = _architecture(shape)
    if architecture == LLAMA and shape.dim % shape.num_heads:
        raise InputError(
            f"model.num_heads: transformers' {LLAMA} needs a divisor of dim ({shape.dim}), got {shape.num_heads}"
        )
    scaling = shape.rope_scaling
    longest = max_position or (0 if scaling else 2048)
    if scaling:
        longest = max(longest, int(scaling.factor * scaling.original_max_position))
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": longest,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if scaling:
        config["rope_scaling"] = {"rope_type": "llama3"} | {key: getattr(scaling, own) for own, key in _ROPE.items()}
    return config | _own_keys(architecture, shape)


def _architecture(shape: ModelShape) -> str:
    moe = shape.moe
    if moe is None:
        if shape.qk_norm == "whole":
            raise InputError("model.qk_norm: whole has no counterpart in transformers without experts (OLMoE has them)")
        return QWEN3 if shape.qk_norm else LLAMA
    found = next(name for name in _EXPERTS if _QK_NORM[name] == shape.qk_norm)
    only: dict[str, Any] = {
        "score": "softmax",
        "scale": 1.0,
        "bias": False,
        "shared_ffn_dim": 0,
        "top_groups": moe.groups,
    }
    only |= {} if found == QWEN3_MOE else {"first_dense": 0, "every": 1}
    only |= {"normalize": True} if found == MIXTRAL else {}
    for key, value in only.items():
        if getattr(moe, key) != value:
            raise InputError(
                f"model.moe.{key}: transformers' {found}, which model.qk_norm {show(shape.qk_norm)} asks for, knows "
                f"{show(value)} alone, got {show(getattr(moe, key))}"
            )
    if found == OLMOE and shape.num_heads * shape.head_dim != shape.dim:
        raise InputError(
            f"model.head_dim: transformers' {OLMOE} needs dim / num_heads ({shape.dim} / {shape.num_heads}), got "
            f"{shape.head_dim}"
        )
    return found


def _own_keys(architecture: str, shape: ModelShape) -> dict[str, Any]:
    """Those that other architectures do not have."""
    moe = shape.moe
    if moe is None:
        return {"use_sliding_window": False} if shape.qk_norm else {"mlp_bias": False, "pretraining_tp": 1}
    own = {"num_experts_per_tok": moe.top_k, "output_router_logits": False}
    if architecture == MIXTRAL:
        return own | {"intermediate_size": moe.ffn_dim, "num_local_experts": moe.num_experts, "sliding_window": None}
    own |= {"num_experts": moe.num_experts, "norm_topk_prob": moe.normalize}
    if architecture == OLMOE:
        return own | {"intermediate_size": moe.ffn_dim, "clip_qkv": None}
    steps = moe.first_dense % moe.every == 0  # transformers counts its steps from the first layer
    dense = range(moe.first_dense) if steps else [n for n in range(shape.num_layers) if not moe.is_sparse(n)]
    return own | {
        "moe_intermediate_size": moe.ffn_dim, "decoder_sparse_step": moe.every if steps else 1,
        "mlp_only_layers": list(dense), "use_sliding_window": False,
    }  # fmt: skip


def shape_from_config(config: Any, name: str) -> ModelShape:
    """The sizes a ``config.json`` states; ``name`` is the file's, for errors.

    Raises:
        InputError: another architecture, or a switch that changes what the network computes.
    """
    if not isinstance(config, dict):
        raise InputError(f"{name}: expected a JSON object")
    architectures = config.get("architectures")
    if architectures not in [[known] for known in MODEL_TYPES]:
        known = " or ".join(f"[{known!r}]" for known in MODEL_TYPES)
        raise InputError(f"{name}: architectures: expected {known}, got {architectures!r}")
    (architecture,) = architectures
    required: dict[str, tuple[Any, ...]] = {
        "model_type": (MODEL_TYPES[architecture], None), "hidden_act": ("silu", None),
        "attention_bias": (False, None), "mlp_bias": (False, None), "pretraining_tp": (1, None),
        "use_sliding_window": (False, None), "partial_rotary_factor": (1, None), "quantization_config": (None,),
        "clip_qkv": (None,), "router_jitter_noise": (0, None),
    }  # fmt: skip
    if architecture == MIXTRAL:  # Qwen's files state one that is not used
        required["sliding_window"] = (None,)
    for key, allowed in required.items():
        if config.get(key) not in allowed:
            raise InputError(f"{name}: {key}: expected {allowed[0]!r}, got {config[key]!r}")
    layer_types = config.get("layer_types")
    other = [kind for kind in layer_types or () if kind != "full_attention"]
    if other:
        raise InputError(f"{name}: layer_types: expected only 'full_attention', got {other[0]!r}")

    config = _DEFAULTS[architecture] | {key: value for key, value in config.items() if value is not None}

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}: {key}: expected an integer ≥ 1, got {value!r}")
        return value

    dim, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", dim // heads)
    if heads % kv_heads:
        raise InputError(f"{name}: num_key_value_heads: expected a divisor of {heads}, got {kv_heads}")
    if head_dim % 2:
        raise InputError(f"{name}: head_dim: expected an even number, got {head_dim}")
    theta, scaling = _rope(config, name)
    layers, ffn_dim, moe = size("num_hidden_layers"), size("intermediate_size"), None
    try:
        if architecture in _EXPERTS:
            count = "num_experts" if "num_experts" in config else "num_local_experts"
            experts = size(count, _EXPERTS[architecture])
            if experts * layers > _MOST_EXPERTS:
                raise InputError(
                    f"{name}: {count}: expected at most {_MOST_EXPERTS:,} in all layers, got {experts} × {layers}"
                )
            first_dense, every = _sparse_layers(config, size("decoder_sparse_step", 1), layers, name)
            moe = MoEShape(
                num_experts=experts, top_k=size("num_experts_per_tok"), ffn_dim=size("moe_intermediate_size", ffn_dim),
                normalize=architecture == MIXTRAL or config.get("norm_topk_prob", False), first_dense=first_dense,
                every=every,
            )  # fmt: skip
        return ModelShape(
            num_layers=layers, dim=dim, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            ffn_dim=ffn_dim, vocab_size=size("vocab_size"), vocab_multiple=128,
            rope_theta=theta, rope_scaling=scaling, norm_eps=config.get("rms_norm_eps", 1e-6),
            qk_norm=_QK_NORM[architecture], tied_embeddings=config.get("tie_word_embeddings", False), moe=moe,
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first["loc"] else first["ctx"]["error"]
        raise InputError(f"{name}: {why}") from None


def _sparse_layers(config: Mapping[str, Any], step: int, layers: int, name: str) -> tuple[int, int]:
    """``first_dense`` and ``every``, by which the layers with experts are those of Qwen3-MoE's two fields."""
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise InputError(f"{name}: mlp_only_layers: expected a list of numbers of layers, got {show(dense)}")
    sparse = sorted({*range(step - 1, layers, step)} - {*dense})
    first = sparse[0] if sparse else -1
    every = sparse[1] - first if len(sparse) > 1 else layers - first
    if not sparse or first - every + 1 < 0 or sparse != [*range(first, layers, every)]:
        raise InputError(
            f"{name}: mlp_only_layers: expected that after the first layers every n-th one has experts, got experts in "
            f"{show(sparse)} of {layers}"
        )
    return first - every + 1, every


def _rope(config: Mapping[str, Any], name: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling: in ``rope_theta`` and ``rope_scaling``, from transformers 5 on in ``rope_parameters``."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    stated = config.get(key)
    if stated is None:
        stated = {}
    if not isinstance(stated, dict):
        raise InputError(f"{name}: {key}: expected an object, got {stated!r}")
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise InputError(f"{name}: {key}.rope_type: expected 'default' or 'llama3', got {kind!r}")
    if stated.get("partial_rotary_factor") not in (None, 1):
        raise InputError(f"{name}: {key}.partial_rotary_factor: expected 1, got {stated['partial_rotary_factor']!r}")
    theta = stated.get("rope_theta", config.get("rope_theta", 10_000.0))
    if kind == "default":
        return theta, None
    original = {"original_max_position_embeddings": config.get("max_position_embeddings")} | stated
    try:
        return theta, RopeScaling.model_validate({own: original[key] for own, key in _ROPE.items()})
    except KeyError as error:
        raise InputError(f"{name}: {key}.{error.args[0]}: missing; rope_type 'llama3' needs it") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{name}: {key}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
