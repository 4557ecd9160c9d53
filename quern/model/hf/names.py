"""Names and sizes of parameters, ours and those that ``transformers`` gives them.

The tensors are the same numbers under other names: both layouts hold a projection as [out, in], rotate the halves of a
head against each other, and norm queries and keys before the rotation. What experts have is one tensor here, and one
for each expert there.
"""

from __future__ import annotations

import re

from quern.errors import QuernError
from quern.model.config import ModelShape

__all__ = ["expected_tensors", "hf_names"]

_OUTSIDE = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
            "head.weight": "lm_head.weight"}  # fmt: skip
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm",
    "attention.wq.weight": "self_attn.q_proj",
    "attention.wk.weight": "self_attn.k_proj",
    "attention.wv.weight": "self_attn.v_proj",
    "attention.wo.weight": "self_attn.o_proj",
    "attention.q_norm.weight": "self_attn.q_norm",
    "attention.k_norm.weight": "self_attn.k_norm",
    "ffn_norm.weight": "post_attention_layernorm",
    "ffn.w1.weight": "mlp.gate_proj",
    "ffn.w2.weight": "mlp.down_proj",
    "ffn.w3.weight": "mlp.up_proj",
    "ffn.router.weight": "mlp.gate",
    "ffn.experts.w1": "mlp.experts.*.gate_proj",
    "ffn.experts.w2": "mlp.experts.*.down_proj",
    "ffn.experts.w3": "mlp.experts.*.up_proj",
}
_IN_MIXTRAL = {
    "ffn.router.weight": "block_sparse_moe.gate",
    "ffn.experts.w1": "block_sparse_moe.experts.*.w1",
    "ffn.experts.w2": "block_sparse_moe.experts.*.w2",
    "ffn.experts.w3": "block_sparse_moe.experts.*.w3",
}
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")


def hf_names(name: str, shape: ModelShape) -> list[str]:
    """The name in ``transformers`` of the parameter ``name``; of one of all experts, that of each."""
    if name in _OUTSIDE:
        return [_OUTSIDE[name]]
    found, moe = _BLOCK_NAME.fullmatch(name), shape.moe
    known = _IN_BLOCK if moe is None or shape.qk_norm else _IN_BLOCK | _IN_MIXTRAL
    if not found or found[2] not in known:
        raise QuernError(f"parameter {name!r} has no counterpart in transformers")
    pattern = f"model.layers.{found[1]}.{known[found[2]]}.weight"
    if "*" not in pattern:
        return [pattern]
    return [pattern.replace("*", str(expert)) for expert in range(0 if moe is None else moe.num_experts)]


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Our name → unpadded size, for every parameter of a model of this ``shape``, and the bias of experts."""
    dim, ffn = shape.dim, shape.ffn_dim
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (dim,),
        "attention.wq.weight": (queries, dim),
        "attention.wk.weight": (keys, dim),
        "attention.wv.weight": (keys, dim),
        "attention.wo.weight": (dim, queries),
        "ffn_norm.weight": (dim,),
    }
    if shape.qk_norm:
        query_norm, key_norm = shape.qk_norm_widths
        block |= {"attention.q_norm.weight": (query_norm,), "attention.k_norm.weight": (key_norm,)}
    dense, sparse = block | _swiglu("ffn", dim, ffn), block | _experts(shape)
    sizes: dict[str, tuple[int, ...]] = {"embed.weight": (shape.vocab_size, dim)}
    for layer in range(shape.num_layers):
        own = sparse if shape.is_sparse(layer) else dense
        sizes |= {f"blocks.{layer}.{part}": size for part, size in own.items()}
    sizes["norm.weight"] = (dim,)
    if not shape.tied_embeddings:
        sizes["head.weight"] = (shape.vocab_size, dim)
    return sizes


def _swiglu(name: str, dim: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.w1.weight": (width, dim), f"{name}.w2.weight": (dim, width), f"{name}.w3.weight": (width, dim)}


def _experts(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    moe, dim = shape.moe, shape.dim
    if moe is None:
        return {}
    experts, width = moe.num_experts, moe.ffn_dim
    found: dict[str, tuple[int, ...]] = {
        "ffn.router.weight": (experts, dim),
        "ffn.experts.w1": (experts, width, dim),
        "ffn.experts.w2": (experts, dim, width),
        "ffn.experts.w3": (experts, width, dim),
    }
    found |= _swiglu("ffn.shared", dim, moe.shared_ffn_dim) if moe.shared_ffn_dim else {}
    found |= {"ffn.shared_gate.weight": (1, dim)} if moe.shared_gate else {}
    return found | ({"ffn.bias": (experts,)} if moe.bias else {})
