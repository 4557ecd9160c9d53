"""Sizes of the models of the parity matrix, and what they have for experts."""

from __future__ import annotations

from typing import Any

__all__ = ["CAPACITY", "EXPERTS", "SIZES", "split_sizes"]

#: Nothing divides by the number of ranks that does not have to. ``slim`` leaves ranks without a row of some weights.
SIZES: dict[str, dict[str, Any]] = {
    "six": {"num_layers": 2, "dim": 30, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10, "ffn_dim": 61},
    "norm": {
        "num_layers": 2, "dim": 31, "num_heads": 6, "num_kv_heads": 2, "head_dim": 6, "ffn_dim": 45, "qk_norm": True,
    },
    "slim": {
        "num_layers": 1, "dim": 13, "num_heads": 5, "num_kv_heads": 1, "head_dim": 2, "ffn_dim": 7, "qk_norm": True,
    },
    "blocks": {"num_layers": 4, "dim": 128, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "ffn_dim": 256},
}  # fmt: skip


#: Keys of ``model.moe``, and of ``experts``. Experts divide by no number of ranks, but for ``eight``, ``empty`` (which
#: has more of them than a call has tokens), ``places`` and ``broad``; two ranks divide their widths.
#: What is dropped goes by position: equal tokens have equal scores but for rounding, and a tie falls as that does.
#: ``wide`` and ``broad`` ones have a whole block of FP8 on each of two ranks.
EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss": (
        {"num_experts": 5, "top_k": 2, "ffn_dim": 22, "normalize": True},
        {"balance_loss": 0.3, "z_loss": 0.02},
    ),
    "global": (
        {"num_experts": 7, "top_k": 3, "ffn_dim": 10, "shared_ffn_dim": 6},
        {"balance_loss": 0.5, "balance_over": "global"},
    ),
    "bias": (
        {"num_experts": 6, "top_k": 2, "ffn_dim": 14, "score": "sigmoid", "normalize": True, "scale": 1.7, "bias": True,
         "groups": 3, "top_groups": 2, "first_dense": 1, "shared_ffn_dim": 10, "shared_gate": True},
        {"bias_rate": 0.01, "center_bias": True},
    ),
    "capacity": (
        {"num_experts": 5, "top_k": 2, "ffn_dim": 11, "capacity": 0.8},
        {"balance_loss": 0.3, "balance_over": "micro_batch"},
    ),
    "eight": (
        {"num_experts": 8, "top_k": 3, "ffn_dim": 10, "normalize": True, "bias": True, "groups": 4, "top_groups": 2,
         "shared_ffn_dim": 6},
        {"bias_rate": 0.01, "balance_loss": 0.3, "z_loss": 0.02},
    ),
    "empty": (
        {"num_experts": 24, "top_k": 1, "ffn_dim": 6, "score": "sigmoid"},
        {"balance_loss": 0.5, "balance_over": "global"},
    ),
    "places": (
        {"num_experts": 8, "top_k": 2, "ffn_dim": 10, "capacity": 0.8},
        {"balance_loss": 0.3, "balance_over": "micro_batch"},
    ),
    "wide": (
        {"num_experts": 5, "top_k": 2, "ffn_dim": 256, "normalize": True, "bias": True, "first_dense": 1,
         "shared_ffn_dim": 256},
        {"bias_rate": 0.01, "balance_loss": 0.3},
    ),
    "broad": (
        {"num_experts": 6, "top_k": 2, "ffn_dim": 256, "normalize": True, "bias": True, "first_dense": 1,
         "shared_ffn_dim": 256},
        {"bias_rate": 0.01, "balance_loss": 0.3},
    ),
}  # fmt: skip

#: Those whose result goes by micro-batches.
CAPACITY = ("capacity", "places")


def split_sizes(name: str, tp: int) -> dict[str, Any]:
    """The same three for ``tp`` ranks that split tensors: key and value heads as many as ranks, half as many, one."""
    if name == "six":
        return {"dim": 31, "num_heads": 3 * tp, "num_kv_heads": tp, "head_dim": 6, "ffn_dim": 23 * tp}
    if name == "norm":
        widths = {"dim": 30, "num_heads": 2 * tp, "num_kv_heads": max(tp // 2, 1), "head_dim": 4, "ffn_dim": 15 * tp}
    else:
        widths = {"dim": 13, "num_heads": tp, "num_kv_heads": 1, "head_dim": 2, "ffn_dim": 3 * tp}
    return {**widths, "qk_norm": True}
