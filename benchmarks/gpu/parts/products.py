"""Limits of this machine: a copy, and products of BF16 and FP8 alone, at the sizes of a block."""

from __future__ import annotations

from typing import Any, get_args

import torch

from parts.common import gpu, shape_of
from quern.model.config import ModelShape
from quern.model.float8.recipe import Recipe, Scaling
from quern.train.profiling.ceilings import copy_ceiling, float8_ceiling, gemm_ceiling


def sizes(shape: ModelShape, tokens: int) -> dict[str, tuple[int, int, int]]:
    """(M, N, K) of the products of a block, by matrix; those of weights' gradients at the end."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "wq, wo": (tokens, query, shape.dim),
        "wk, wv": (tokens, key, shape.dim),
        "w1, w3": (tokens, shape.ffn_dim, shape.dim),
        "w2": (tokens, shape.dim, shape.ffn_dim),
        "dW of w1, w3": (shape.ffn_dim, shape.dim, tokens),
    }


def copy(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Bytes read and written a second."""
    return [{"what": f"{spec['bytes']:,} bytes", "GB/s": copy_ceiling(gpu(spec), size=spec["bytes"]) / 1e9}]


def ceilings(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """FLOPs a second of one product at a time; None where there is no FP8 kernel."""
    device, square = gpu(spec), spec["square"]
    found = []
    for name, (m, n, k) in {**sizes(shape_of(spec), spec["tokens"]), "square": (square, square, square)}.items():
        bf16 = gemm_ceiling(m, n, k, torch.bfloat16, device)
        row: dict[str, Any] = {"what": name, "M": m, "N": n, "K": k, "BF16 TFLOP/s": bf16 / 1e12}
        for scaling in get_args(Scaling):
            speed = float8_ceiling(m, n, k, Recipe(scaling), device)
            row |= {f"{scaling} TFLOP/s": speed and speed / 1e12, f"/ BF16 ({scaling})": speed and speed / bf16}
        found.append(row)
    return found
