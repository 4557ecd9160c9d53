"""Converts weights and config to and from ``transformers`` (LlamaForCausalLM; Qwen3ForCausalLM with qk_norm).

The tensors are the same numbers under other names: both layouts hold a projection as [out, in], rotate the halves of a
head against each other, and norm queries and keys a head before the rotation. The vocabulary is unpadded. Files are
read and written with ``safetensors``, one shard at a time; nothing here reads a pickle.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quern import storage
from quern.errors import InputError, QuernError
from quern.model.config import ModelShape, RopeScaling

__all__ = [
    "CONFIG_FILE", "INDEX_FILE", "MAX_SHARD_BYTES", "HFWeights", "expected_tensors", "hf_config", "hf_name",
    "shape_from_config", "write_weights",
]  # fmt: skip

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: What ``transformers`` writes by default.
MAX_SHARD_BYTES = 5 * 10**9

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3"}

_OUTSIDE = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
            "head.weight": "lm_head.weight"}  # fmt: skip
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
}
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)\.weight")
#: A buffer that old versions of ``transformers`` saved; it follows from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def hf_name(name: str) -> str:
    """The name in ``transformers`` of the parameter ``name``."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    found = _BLOCK_NAME.fullmatch(name)
    if not found or found[2] not in _IN_BLOCK:
        raise QuernError(f"parameter {name!r} has no counterpart in transformers")
    return f"model.layers.{found[1]}.{_IN_BLOCK[found[2]]}.weight"


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Our name → unpadded size, for every parameter of a model of this ``shape``."""
    dim, ffn = shape.dim, shape.ffn_dim
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attention_norm": (dim,),
        "attention.wq": (queries, dim),
        "attention.wk": (keys, dim),
        "attention.wv": (keys, dim),
        "attention.wo": (dim, queries),
        "ffn_norm": (dim,),
        "ffn.w1": (ffn, dim),
        "ffn.w2": (dim, ffn),
        "ffn.w3": (ffn, dim),
    }
    if shape.qk_norm:
        block |= {"attention.q_norm": (shape.head_dim,), "attention.k_norm": (shape.head_dim,)}
    sizes: dict[str, tuple[int, ...]] = {"embed.weight": (shape.vocab_size, dim)}
    for layer in range(shape.num_layers):
        sizes |= {f"blocks.{layer}.{part}.weight": size for part, size in block.items()}
    sizes["norm.weight"] = (dim,)
    if not shape.tied_embeddings:
        sizes["head.weight"] = (shape.vocab_size, dim)
    return sizes


def hf_config(shape: ModelShape, *, max_position: int | None, eos_id: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """The content of ``config.json``.

    ``max_position``: the longest sequence the model was trained on; None = not known, then 2,048 or, with rope scaling,
    the length it stretches to. There is no BOS: training puts nothing before a document.

    Raises:
        InputError: sizes that ``transformers`` cannot express.
    """
    architecture = QWEN3 if shape.qk_norm else LLAMA
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
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return config | ({"use_sliding_window": False} if shape.qk_norm else {"mlp_bias": False, "pretraining_tp": 1})


def shape_from_config(config: Any, name: str, *, vocab_multiple: int = 128) -> ModelShape:
    """The sizes a ``config.json`` states; ``name`` is the file's, for errors.

    Raises:
        InputError: another architecture, or a switch that changes what the network computes.
    """
    if not isinstance(config, dict):
        raise InputError(f"{name}: expected a JSON object")
    architectures = config.get("architectures")
    if architectures not in ([LLAMA], [QWEN3]):
        raise InputError(f"{name}: architectures: expected [{LLAMA!r}] or [{QWEN3!r}], got {architectures!r}")
    qwen3 = architectures == [QWEN3]
    required: dict[str, tuple[Any, ...]] = {
        "model_type": (MODEL_TYPES[architectures[0]], None), "hidden_act": ("silu", None),
        "attention_bias": (False, None), "mlp_bias": (False, None), "pretraining_tp": (1, None),
        "use_sliding_window": (False, None), "partial_rotary_factor": (1, None), "quantization_config": (None,),
    }  # fmt: skip
    for key, allowed in required.items():
        if config.get(key) not in allowed:
            raise InputError(f"{name}: {key}: expected {allowed[0]!r}, got {config[key]!r}")
    layer_types = config.get("layer_types")
    other = [kind for kind in layer_types or () if kind != "full_attention"]
    if other:
        raise InputError(f"{name}: layer_types: expected only 'full_attention', got {other[0]!r}")

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}: {key}: expected an integer ≥ 1, got {value!r}")
        return value

    dim, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", 32 if qwen3 else heads)  # absent = the default of transformers
    head_dim = size("head_dim", 128 if qwen3 else dim // heads)
    if heads % kv_heads:
        raise InputError(f"{name}: num_key_value_heads: expected a divisor of {heads}, got {kv_heads}")
    if head_dim % 2:
        raise InputError(f"{name}: head_dim: expected an even number, got {head_dim}")
    theta, scaling = _rope(config, name)
    try:
        return ModelShape(
            num_layers=size("num_hidden_layers"), dim=dim, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            ffn_dim=size("intermediate_size"), vocab_size=size("vocab_size"), vocab_multiple=vocab_multiple,
            rope_theta=theta, rope_scaling=scaling, norm_eps=config.get("rms_norm_eps", 1e-6), qk_norm=qwen3,
            tied_embeddings=config.get("tie_word_embeddings", False),
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


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
        return theta, RopeScaling.model_validate(
            {
                "factor": stated["factor"],
                "low_freq_factor": stated["low_freq_factor"],
                "high_freq_factor": stated["high_freq_factor"],
                "original_max_position": original["original_max_position_embeddings"],
            }
        )
    except KeyError as error:
        raise InputError(f"{name}: {key}.{error.args[0]}: missing; rope_type 'llama3' needs it") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{name}: {key}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def write_weights(
    folder: str,
    shape: ModelShape,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> torch.dtype:
    """Write ``weights`` (our names, unpadded) as ``model.safetensors``, or in shards with an index.

    Returns the dtype they have there. Takes one tensor after the other and holds those of one shard, which has at most
    ``max_shard_bytes``, or one tensor. ``dtype`` None keeps the first tensor's.

    Raises:
        QuernError: the weights are not exactly those of a model of this ``shape``.
    """
    missing = expected_tensors(shape)
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = parameters = 0

    def flush() -> None:
        shards.append(list(held))
        path = os.path.join(folder, f".shard{len(shards)}")
        with open(path, "xb") as created:
            mode = stat.S_IMODE(os.fstat(created.fileno()).st_mode)
        save_file(held, path, metadata={"format": "pt"})
        os.chmod(path, mode)  # as any file that is made here: safetensors lets nobody else read it
        held.clear()

    for name, tensor in weights:
        size = missing.pop(name, None)
        if size != tuple(tensor.shape):
            raise QuernError(f"parameter {name}: expected {size or 'no such name'}, got size {tuple(tensor.shape)}")
        dtype = dtype or tensor.dtype
        stored = tensor.to(dtype).contiguous()
        if held and sum(t.nbytes for t in held.values()) + stored.nbytes > max_shard_bytes:
            flush()
        held[hf_name(name)] = stored
        total, parameters = total + stored.nbytes, parameters + stored.numel()
        del tensor, stored
    if missing:
        raise QuernError(f"parameter {next(iter(missing))}: missing, and {len(missing) - 1} more")
    flush()
    count = len(shards)
    files = [SINGLE_FILE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for number, file in enumerate(files, 1):
        os.rename(os.path.join(folder, f".shard{number}"), os.path.join(folder, file))
    if count > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total, "total_parameters": parameters}, "weight_map": places}
        with open(os.path.join(folder, INDEX_FILE), "w", encoding="utf-8") as file_:
            json.dump(index, file_, indent=2, sort_keys=True)
    assert dtype is not None
    return dtype


class HFWeights(Mapping[str, torch.Tensor]):
    """The tensors of a folder by our names, each read when it is looked up; names and sizes are checked on opening.

    Raises:
        InputError: pickled weights, a tensor that is missing, unknown, of another size or no float; a damaged file.
    """

    def __init__(self, folder: str, shape: ModelShape) -> None:
        self._open = ExitStack()
        try:
            self._find(folder, shape)
        except BaseException:
            self._open.close()
            raise

    def _find(self, folder: str, shape: ModelShape) -> None:
        self.dtypes: set[str] = set()
        """As ``safetensors`` calls them: ``F32``, ``BF16``, …"""
        self._places: dict[str, tuple[str, Any]] = {}
        files, promised = _weight_files(folder)
        sizes = expected_tensors(shape)
        names = {hf_name(name): name for name in sizes}
        for file in files:
            path = os.path.join(folder, file)
            try:
                handle = self._open.enter_context(safe_open(path, framework="pt"))
                keys = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: cannot be read as safetensors ({error})") from None
            for key in keys:
                if _DERIVED.fullmatch(key):
                    continue
                if key not in names:
                    why = " (the config ties it to the embedding)" if key == "lm_head.weight" else ""
                    raise InputError(f"{path}: {key}: expected no such tensor in this model{why}")
                part, expected = handle.get_slice(key), sizes[names[key]]
                if tuple(part.get_shape()) != expected:
                    raise InputError(f"{path}: {key}: expected size {list(expected)}, got {part.get_shape()}")
                if part.get_dtype() not in _FLOATS:
                    raise InputError(
                        f"{path}: {key}: expected one of {', '.join(sorted(_FLOATS))}, got {part.get_dtype()}"
                    )
                if names[key] in self._places:
                    raise InputError(f"{path}: {key}: expected once, is also in {self._places[names[key]][0]}")
                self._places[names[key]] = (path, handle)
                self.dtypes.add(part.get_dtype())
        for key, name in names.items():
            if name not in self._places:
                path = os.path.join(folder, promised.get(key, files[0] if len(files) == 1 else INDEX_FILE))
                raise InputError(f"{path}: {key}: missing; expected a tensor of size {list(sizes[name])}")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._places[name][1].get_tensor(hf_name(name))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.close()


def _weight_files(folder: str) -> tuple[list[str], dict[str, str]]:
    """The safetensors files of a folder, and the file of each tensor where an index says so."""
    index = os.path.join(folder, INDEX_FILE)
    if os.path.isfile(index):
        content = storage.read_json(index)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not places:
            raise InputError(f"{index}: weight_map: expected an object of tensor names and files")
        for tensor, file in places.items():
            if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
                raise InputError(f"{index}: weight_map.{tensor}: expected a .safetensors file beside it, got {file!r}")
        return sorted(set(places.values())), places
    if os.path.isfile(os.path.join(folder, SINGLE_FILE)):
        return [SINGLE_FILE], {}
    pickles = sorted(name for name in os.listdir(folder) if name.endswith(_PICKLES))
    if pickles:
        raise InputError(
            f"{os.path.join(folder, pickles[0])}: a pickle, which runs code when it is read; "
            f"expected {SINGLE_FILE} or {INDEX_FILE}"
        )
    raise InputError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE} in it")
