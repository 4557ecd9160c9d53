"""Attention of a shard's queries over the keys of all shards, as one operation and its gradient.

It is an operation of its own so that a compiled block has it whole, and selective checkpointing keeps what it gave. For
backward a rank keeps its own keys alone; those of the others are sent again. Gradients of keys and values are summed
over ranks in at least float32.

Shapes: B rows, a tokens of the shard, T = B·a, A shards, N query heads, K key heads, H head dim, U keys of stretches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from quern.parallel.context import kernels
from quern.parallel.context.kernels import Stretches

__all__ = ["PARTS", "context_attention", "group_of"]

PARTS = 5
"""Tensors by which stretches are told: rows of the queries (int64 [T], [0] = all), their offsets, rows of the keys
(int64 [U]), their offsets, all with a few more at the end; and on the host the queries of the longest stretch, the keys
of the longest, causal, and the four lengths."""


@torch.library.custom_op("quern::context_attention", mutates_args=())
def context_attention(
    q_BaNH: Tensor, k_BaKH: Tensor, v_BaKH: Tensor, told: list[Tensor], group: str, ring: bool
) -> tuple[Tensor, Tensor]:
    """``(out_BaNH, lse_NT)``. ``told``: :data:`PARTS` tensors for the keys of all shards end to end, or with ``ring``
    for those of this shard, of the one before it, and so on. ``group``: the name of the process group of the shards, in
    their order. Collective, as its gradient is.
    """
    q_TNH = q_BaNH.flatten(0, 1).contiguous()
    mine = _stacked(k_BaKH, v_BaKH)
    if not ring:
        _, keys_U, by = _of(told)
        out_TNH, lse_NT = kernels.forward(q_TNH, *_taken(_gathered(mine, group), keys_U), by)
        return out_TNH.view(q_BaNH.shape), lse_NT
    wide = torch.promote_types(q_BaNH.dtype, torch.float32)
    out_TNH = q_TNH.new_zeros(q_TNH.shape, dtype=wide)
    lse_TN1 = q_TNH.new_full((*q_TNH.shape[:2], 1), float("-inf"), dtype=wide)
    for there, part in _around(mine, group, told):
        at, keys_U, by = _of(part)
        if len(keys_U):
            part_TNH, part_NT = kernels.forward(q_TNH[at], *_taken(there[None], keys_U), by)
            part_TN1 = part_NT.T[..., None].to(wide)
            both_TN1 = torch.logaddexp(lse_TN1[at], part_TN1)
            out_TNH[at] = out_TNH[at] * (lse_TN1[at] - both_TN1).exp() + part_TNH * (part_TN1 - both_TN1).exp()
            lse_TN1[at] = both_TN1
    return out_TNH.to(q_BaNH.dtype).view(q_BaNH.shape), lse_TN1[..., 0].T.contiguous()


@torch.library.custom_op("quern::context_attention_backward", mutates_args=())
def _backward(
    dout_BaNH: Tensor, q_BaNH: Tensor, k_BaKH: Tensor, v_BaKH: Tensor, out_BaNH: Tensor, lse_NT: Tensor,
    told: list[Tensor], group: str, ring: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of the queries, and [2, B, a, K, H] of keys and values."""
    dout_TNH, q_TNH, out_TNH = (own.flatten(0, 1).contiguous() for own in (dout_BaNH, q_BaNH, out_BaNH))
    mine, wide = _stacked(k_BaKH, v_BaKH), torch.promote_types(q_BaNH.dtype, torch.float32)
    if not ring:
        _, keys_U, by = _of(told)
        there = _gathered(mine, group)
        dq_TNH, *dkv = kernels.backward(dout_TNH, q_TNH, *_taken(there, keys_U), out_TNH, lse_NT, by)
        total = torch.zeros_like(there, dtype=wide)
        _add(total, keys_U, dkv)
        size = there.shape[0]
        scattered: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(total.flatten(0, 1), "sum", size, group)
        dkv_2TKH: Tensor = torch.ops._c10d_functional.wait_tensor(scattered)
    else:
        dq_TNH = q_TNH.new_zeros(q_TNH.shape, dtype=wide)
        dkv_2TKH = torch.zeros_like(mine, dtype=wide)
        for there, part in _around(mine, group, told):
            at, keys_U, by = _of(part)
            if len(keys_U):
                own = (dout_TNH[at], q_TNH[at], *_taken(there[None], keys_U), out_TNH[at], lse_NT[:, at].contiguous())
                part_TNH, *dkv = kernels.backward(*own, by)
                dq_TNH[at] += part_TNH
                _add(dkv_2TKH[None], keys_U, dkv)
            dkv_2TKH = _arrived(_pass(dkv_2TKH, group))  # after the last, what comes is of this rank's keys
    dq_BaNH = dq_TNH.to(q_BaNH.dtype).view(q_BaNH.shape)
    return dq_BaNH, dkv_2TKH.to(k_BaKH.dtype).view(2, *k_BaKH.shape)


@context_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, told: list[Tensor], group: str, ring: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[2], q.shape[0] * q.shape[1]), dtype=wide)


@_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, told: list[Tensor], group: str, ring: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty((2, *k.shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, told, ctx.group, ctx.ring = inputs
    ctx.save_for_backward(q, k, v, *output, *told)


def _gradients(ctx: Any, dout_BaNH: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, *told = ctx.saved_tensors
    dq, dkv = torch.ops.quern.context_attention_backward(dout_BaNH, q, k, v, out, lse, told, ctx.group, ctx.ring)
    return (dq, *dkv, [None] * len(told), None, None)


context_attention.register_autograd(_gradients, setup_context=_keep)


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name, which is what operations in a compiled graph know it by."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def _of(told: Sequence[Tensor]) -> tuple[Tensor | slice, Tensor, Stretches]:
    """Where the queries are, rows of the keys, and the stretches."""
    *padded, sizes = told
    longest_q, longest_k, causal, *lengths = sizes.tolist()
    queries_T, cu_queries, keys_U, cu_keys = (own[:size] for own, size in zip(padded, lengths, strict=True))
    by = Stretches(cu_queries, cu_keys, (longest_q, longest_k), bool(causal))
    return queries_T if len(queries_T) else slice(None), keys_U, by


def _stacked(k_BaKH: Tensor, v_BaKH: Tensor) -> Tensor:
    """[2, T, K, H]."""
    return torch.stack((k_BaKH.flatten(0, 1), v_BaKH.flatten(0, 1)))


def _gathered(mine: Tensor, group: str) -> Tensor:
    """[A, 2, T, K, H] of all shards."""
    size = dist.get_world_size(group_of(group))
    started: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(mine, size, group)
    found: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return found.unflatten(0, (size, 2))


def _rows(there: Tensor, keys_U: Tensor) -> tuple[Tensor, Tensor]:
    """Of keys and of values in ``there`` [A, 2, T, K, H], laid end to end; ``keys_U``: of keys in [A, T]."""
    tokens = there.shape[2]
    rows_U = keys_U + keys_U // tokens * tokens
    return rows_U, rows_U + tokens


def _taken(there: Tensor, keys_U: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the stretches, [U, K, H] each, of ``there`` [A, 2, T, K, H]."""
    flat, (rows_U, values_U) = there.flatten(0, 2), _rows(there, keys_U)
    return flat.index_select(0, rows_U), flat.index_select(0, values_U)


def _add(total: Tensor, keys_U: Tensor, gradients: Sequence[Tensor]) -> None:
    """To ``total`` [A, 2, T, K, H], in place, those of the stretches' keys and values."""
    flat = total.view(-1, *total.shape[3:])
    for rows_U, own in zip(_rows(total, keys_U), gradients, strict=True):
        flat.index_add_(0, rows_U, own.to(total.dtype))


def _around(mine: Tensor, group: str, told: Sequence[Tensor]) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """The keys of this shard, of the one before, and so on, each with what is told of it; the next are on their way
    while one is used."""
    there, steps = mine, len(told) // PARTS
    for step in range(steps):
        coming = _pass(there, group) if step + 1 < steps else None
        yield there, told[step * PARTS : (step + 1) * PARTS]
        if coming is not None:
            there = _arrived(coming)


def _pass(tensor: Tensor, group: str) -> tuple[Tensor, list[dist.Work]]:
    """To the next shard; what comes is from the one before."""
    own = group_of(group)
    size, rank, coming = dist.get_world_size(own), dist.get_rank(own), torch.empty_like(tensor)
    calls = [
        dist.P2POp(dist.isend, tensor, group=own, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, coming, group=own, group_peer=(rank - 1) % size),
    ]
    return coming, dist.batch_isend_irecv(calls)


def _arrived(coming: tuple[Tensor, list[dist.Work]]) -> Tensor:
    for work in coming[1]:
        work.wait()
    return coming[0]
