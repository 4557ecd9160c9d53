"""Samples text from a model token by token, with a key-value cache.

Shapes: B batch, L prompt, S capacity (prompt and new tokens), K key/value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import hashlib
from typing import cast

import torch
from torch import Tensor

from quern.model.attention import attend
from quern.model.rope import rotation
from quern.model.transformer import Block, Transformer

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    eot_id: int | None = None,
) -> Tensor:
    """Continue ``tokens``, int64 [B, L] with L ≥ 1; returns int64 [B, L + new], the prompt included.

    ``temperature`` 0 takes the likeliest token; ``top_k`` keeps the k likeliest. A row that drew ``eot_id`` is filled
    up with it; when all rows have, generation ends early. Row b depends on (seed, b) and its own prompt only.

    Raises ValueError for a setting out of range or a token outside the vocabulary.
    """
    _check(model, tokens, max_new_tokens, temperature, top_k)
    batch, length = tokens.shape
    shape, capacity = model.shape, length + max_new_tokens
    dtype = model.compute_dtype or next(model.parameters()).dtype
    kv_size = (shape.num_layers, 2, batch, capacity, shape.num_kv_heads, shape.head_dim)
    kv = torch.empty(kv_size, dtype=dtype, device=tokens.device)
    chance_BS = torch.stack([_uniform(seed, row, max_new_tokens) for row in range(batch)]).to(tokens.device)
    ended_B = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    fresh_BL = tokens
    for index in range(max_new_tokens):
        logits_BV = _advance(model, fresh_BL, tokens.shape[1] - fresh_BL.shape[1], kv)
        next_B = _choose(logits_BV, chance_BS[:, index], temperature, top_k)
        if eot_id is not None:
            next_B = next_B.masked_fill(ended_B, eot_id)
            ended_B |= next_B == eot_id
        fresh_BL = next_B[:, None]
        tokens = torch.cat([tokens, fresh_BL], dim=1)
        if eot_id is not None and bool(ended_B.all()):
            break
    return tokens


def _advance(model: Transformer, fresh_BL: Tensor, start: int, kv: Tensor) -> Tensor:
    """Logits [B, V] after the last of ``fresh_BL``, the tokens from place ``start`` on; adds their keys and values.

    ``kv`` is [layers, 2, B, S, K, H], filled up to ``start``.
    """
    stop = start + fresh_BL.shape[1]
    x_BLD = model.embed_tokens(fresh_BL)
    place_1L = torch.arange(start, stop, device=kv.device)[None]
    turn = rotation(model.shape, kv.shape[3], dtype=kv.dtype, device=kv.device, positions_BL=place_1L)
    before_11LS = None  # the whole prompt: plain causal attention
    if start:
        before_11LS = (torch.arange(stop, device=kv.device) <= place_1L.T)[None, None]
    for module, (k_BSKH, v_BSKH) in zip(model.blocks.values(), kv, strict=True):
        block = cast(Block, module)
        attention = block.attention
        q_BLNH, k_BSKH[:, start:stop], v_BSKH[:, start:stop] = attention.project(block.attention_norm(x_BLD), turn)
        out_BLNH = attend(q_BLNH, k_BSKH[:, :stop], v_BSKH[:, :stop], before_11LS)
        x_BLD = x_BLD + attention.wo(out_BLNH.flatten(2))
        x_BLD = x_BLD + block.ffn(block.ffn_norm(x_BLD))
    assert model.norm is not None, "text comes from a whole model"
    return model.logits(model.norm(x_BLD[:, -1:]))[:, 0]


def _choose(logits_BV: Tensor, chance_B: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """The token at ``chance_B`` in [0, 1) of the cumulative distribution, likeliest tokens first."""
    if temperature == 0:
        return logits_BV.argmax(dim=1)
    p_BV, id_BV = (logits_BV.double() / temperature).softmax(dim=1).sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        p_BV = p_BV[:, :top_k]
    upto_BV = p_BV.cumsum(dim=1)
    # right=True: a token of probability 0 is never chosen, not even at chance 0
    rank_B1 = torch.searchsorted(upto_BV, chance_B[:, None] * upto_BV[:, -1:], right=True)
    num_kept_B1 = (p_BV > 0).sum(dim=1, keepdim=True)
    return id_BV.gather(1, rank_B1.minimum(num_kept_B1 - 1))[:, 0]


def _uniform(seed: int, row: int, count: int) -> Tensor:
    key = hashlib.blake2b(f"{seed}\0generate\0{row}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _check(
    model: Transformer,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
) -> None:
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens: expected [batch, length], both ≥ 1, got {list(tokens.shape)}")
    if tokens.min() < 0 or tokens.max() >= model.shape.vocab_size:
        raise ValueError(f"tokens: expected ids in [0, {model.shape.vocab_size})")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected an integer ≥ 0, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature: expected a number ≥ 0, got {temperature:g}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected an integer ≥ 1, got {top_k}")
