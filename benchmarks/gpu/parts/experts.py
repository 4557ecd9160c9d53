"""A layer with experts, piece by piece, beside a SwiGLU of the width that a token uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from parts.common import gpu, seconds_of, shape_of
from quern.model.moe import products
from quern.model.moe.layer import MoE
from quern.model.transformer import FeedForward

__all__ = ["calls", "pieces"]


def calls(spec: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Forward and backward of the whole layer, of the layer with a loop over experts in place of grouped products, of
    its router alone, of its experts' three products alone on rows that are sorted already, and of the SwiGLU."""
    device, dtype, tokens = gpu(spec), getattr(torch, spec["dtype"]), spec["tokens"]
    shape = shape_of(spec)
    moe = shape.moe
    assert moe is not None
    with device:
        torch.manual_seed(0)
        layer, dense = MoE(moe, shape.dim), FeedForward(shape.dim, moe.top_k * moe.ffn_dim)
        for weight in (*layer.parameters(), *dense.parameters()):
            nn.init.normal_(weight, std=0.02)
        layer, dense = layer.to(dtype), dense.to(dtype)
        x_BLD = torch.randn(1, tokens, shape.dim, dtype=dtype, requires_grad=True)
        gradient_BLD = torch.randn(1, tokens, shape.dim, dtype=dtype)
        rows_SD = torch.randn(tokens * moe.top_k, shape.dim, dtype=dtype, requires_grad=True)
        rows_SF = torch.randn(tokens * moe.top_k, moe.ffn_dim, dtype=dtype, requires_grad=True)
    found = layer.route(x_BLD.flatten(0, 1))
    ends_E = found.sent_TK.flatten().bincount(minlength=moe.num_experts).cumsum(0).to(torch.int32)
    weights_gradient = torch.ones_like(found.weights_TK)

    def whole(module: nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(module(x_BLD), [x_BLD, *module.parameters()], gradient_BLD)

    def loop() -> object:
        with patch.object(products, "_grouped", lambda *_: False):
            return whole(layer)()

    def router() -> object:
        weights_TK = layer.route(x_BLD.flatten(0, 1)).weights_TK
        return torch.autograd.grad(weights_TK, [x_BLD, layer.router.weight], weights_gradient)

    def multiplied() -> object:
        experts = layer.experts
        made = [products.multiply(x, weight, ends_E) for x, weight in
                ((rows_SD, experts.w1), (rows_SD, experts.w3), (rows_SF, experts.w2))]  # fmt: skip
        inputs = [rows_SD, rows_SF, experts.w1, experts.w2, experts.w3]
        return torch.autograd.grad(made, inputs, [rows_SF.detach(), rows_SF.detach(), rows_SD.detach()])

    return {"layer": whole(layer), "loop": loop, "router": router, "products": multiplied, "dense": whole(dense)}


def pieces(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds of each, and as a share of the layer; the rest of it is the sort, the two permutations, SiLU and the
    weighted sum."""
    device = gpu(spec)
    seconds = {name: seconds_of(call, device) for name, call in calls(spec).items()}
    seconds["rest"] = seconds["layer"] - seconds["router"] - seconds["products"]
    flops = 3 * 2 * 3 * _active(spec) * spec["tokens"]
    return [
        {"what": name, "ms": 1e3 * own, "% of the layer": 100 * own / seconds["layer"],
         "TFLOP/s": flops / own / 1e12 if name in ("layer", "loop", "products", "dense") else None}
        for name, own in seconds.items()
    ]  # fmt: skip


def _active(spec: dict[str, Any]) -> int:
    shape = shape_of(spec)
    assert shape.moe is not None
    return shape.dim * shape.moe.top_k * shape.moe.ffn_dim
