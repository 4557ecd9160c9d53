"""Attention of stretches of queries, each over keys of its own: out and log-sum-exp, and the gradients by blocks.

On CUDA in BF16 and FP16 the flash kernels of torch run it, whose causal mask is aligned to the last query and the last
key as it must be here (**unverified on GPU**). Elsewhere, and in other dtypes, products of blocks do, of at most
:data:`BLOCK` queries and keys, in at least float32, so that no mask and no scores are larger than a block.

Shapes: T queries, U keys, N query heads, K key heads (N a multiple of K), G = N/K, H head dim, S stretches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "Stretches", "backward", "forward"]

BLOCK = 1024


@dataclass(frozen=True)
class Stretches:
    """:class:`quern.parallel.planning.segments.Segments` for a kernel: the keys are those of the stretches in turn."""

    cu_queries: Tensor
    """int32 [S + 1], on the device; likewise ``cu_keys``."""
    cu_keys: Tensor
    longest: tuple[int, int]
    """Queries and keys of the longest stretches."""
    causal: bool


def forward(q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, by: Stretches) -> tuple[Tensor, Tensor]:
    """``(out_TNH, lse_NT)``; the latter in at least float32, in nats of scaled scores."""
    if _flash(q_TNH):
        out_TNH, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
            q_TNH, k_UKH, v_UKH, by.cu_queries, by.cu_keys, *by.longest, 0.0, by.causal, False
        )
        return out_TNH, lse_NT
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    lse_NT = q_TNH.new_empty(q_TNH.shape[1], q_TNH.shape[0], dtype=_wide(q_TNH))
    for queries, keys in _stretches(by):
        q_KGTH = _grouped(q_TNH[queries], k_UKH.shape[1])
        k_KUH, v_KUH = _heads_first(k_UKH[keys]), _heads_first(v_UKH[keys])
        for rows, columns_of in _blocks(q_KGTH.shape[2], k_KUH.shape[1], by.causal):
            out, lse = q_KGTH.new_zeros(()), q_KGTH.new_tensor(float("-inf"))
            for columns, mask in columns_of:
                scores = _scores(q_KGTH[:, :, rows], k_KUH[:, columns], mask)
                part_lse = scores.logsumexp(-1, keepdim=True)
                both = torch.logaddexp(lse, part_lse)  # never of two that are -inf: the first block has a key for all
                out = out * (lse - both).exp() + (scores - both).exp() @ v_KUH[:, None, columns]
                lse = both
            at = slice(queries.start + rows.start, queries.start + rows.stop)
            out_TNH[at] = _ungrouped(out).to(q_TNH.dtype)
            lse_NT[:, at] = lse[..., 0].flatten(0, 1)
    return out_TNH, lse_NT


def backward(
    dout_TNH: Tensor, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, out_TNH: Tensor, lse_NT: Tensor, by: Stretches
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. ``out_TNH`` and ``lse_NT`` are over all keys of a query; those here may be
    a part of them."""
    if _flash(q_TNH):
        state = q_TNH.new_zeros(2, dtype=torch.uint64)
        dq_TNH, dk_UKH, dv_UKH = torch.ops.aten._flash_attention_backward(
            dout_TNH.contiguous(), q_TNH, k_UKH, v_UKH, out_TNH, lse_NT, by.cu_queries, by.cu_keys, *by.longest, 0.0,
            by.causal, state, q_TNH.new_empty(0),
        )  # fmt: skip
        return dq_TNH, dk_UKH, dv_UKH
    heads, wide = k_UKH.shape[1], _wide(q_TNH)
    dq_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    dk_UKH, dv_UKH = (torch.empty_like(own, memory_format=torch.contiguous_format) for own in (k_UKH, v_UKH))
    for queries, keys in _stretches(by):
        q_KGTH, dout_KGTH, out_KGTH = (_grouped(own[queries], heads) for own in (q_TNH, dout_TNH, out_TNH))
        lse_KGT1 = lse_NT[:, queries].unflatten(0, (heads, -1))[..., None].to(wide)
        delta_KGT1 = (dout_KGTH * out_KGTH).sum(-1, keepdim=True)
        k_KUH, v_KUH = _heads_first(k_UKH[keys]), _heads_first(v_UKH[keys])
        dq_KGTH, dk_KUH, dv_KUH = (torch.zeros_like(own) for own in (q_KGTH, k_KUH, v_KUH))
        scale = q_KGTH.shape[-1] ** -0.5
        for rows, columns_of in _blocks(q_KGTH.shape[2], k_KUH.shape[1], by.causal):
            q, dout = q_KGTH[:, :, rows], dout_KGTH[:, :, rows]
            for columns, mask in columns_of:
                p_KGTU = (_scores(q, k_KUH[:, columns], mask) - lse_KGT1[:, :, rows]).exp()
                dv_KUH[:, columns] += p_KGTU.flatten(1, 2).mT @ dout.flatten(1, 2)
                ds_KGTU = p_KGTU * (dout @ v_KUH[:, None, columns].mT - delta_KGT1[:, :, rows]) * scale
                dq_KGTH[:, :, rows] += ds_KGTU @ k_KUH[:, None, columns]
                dk_KUH[:, columns] += ds_KGTU.flatten(1, 2).mT @ q.flatten(1, 2)
        dq_TNH[queries] = _ungrouped(dq_KGTH).to(q_TNH.dtype)
        dk_UKH[keys], dv_UKH[keys] = (own.transpose(0, 1).to(k_UKH.dtype) for own in (dk_KUH, dv_KUH))
    return dq_TNH, dk_UKH, dv_UKH


def _flash(q_TNH: Tensor) -> bool:
    return q_TNH.device.type == "cuda" and q_TNH.dtype in (torch.bfloat16, torch.float16)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _stretches(by: Stretches) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each."""
    queries, keys = by.cu_queries.tolist(), by.cu_keys.tolist()
    for s in range(len(queries) - 1):
        yield slice(queries[s], queries[s + 1]), slice(keys[s], keys[s + 1])


def _blocks(
    queries: int, keys: int, causal: bool
) -> Iterator[tuple[slice, list[tuple[slice, tuple[int, int] | None]]]]:
    """Rows of queries, each with the columns of its blocks that are not masked whole, from the first key on; where a
    part of one is masked, the last key of its first row, and its first key."""
    before = keys - queries  # that the first query attends to, besides its own
    for row in range(0, queries, BLOCK):
        rows = slice(row, min(row + BLOCK, queries))
        seen = before + rows.stop if causal else keys
        columns = [slice(column, min(column + BLOCK, seen)) for column in range(0, seen, BLOCK)]
        last = before + row
        yield rows, [(own, (last, own.start) if causal and own.stop > last + 1 else None) for own in columns]


def _scores(q_KGTH: Tensor, k_KUH: Tensor, mask: tuple[int, int] | None) -> Tensor:
    scores_KGTU = (q_KGTH * q_KGTH.shape[-1] ** -0.5) @ k_KUH[:, None].mT
    if mask is not None:
        last, first = mask
        seen_TU = torch.ones(scores_KGTU.shape[-2:], dtype=torch.bool, device=q_KGTH.device).tril(last - first)
        scores_KGTU = scores_KGTU.masked_fill(~seen_TU, float("-inf"))
    return scores_KGTU


def _grouped(x_TNH: Tensor, heads: int) -> Tensor:
    """[K, G, T, H] in at least float32: query heads of one key head side by side."""
    return x_TNH.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).to(_wide(x_TNH))


def _ungrouped(x_KGTH: Tensor) -> Tensor:
    return x_KGTH.flatten(0, 1).transpose(0, 1)


def _heads_first(x_UKH: Tensor) -> Tensor:
    return x_UKH.transpose(0, 1).to(_wide(x_UKH))
