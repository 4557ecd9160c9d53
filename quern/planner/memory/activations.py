"""Counts what a block keeps from its forward pass for its backward pass, tensor by tensor. Imports no torch.

The list follows the modules of :mod:`quern.model.transformer` in the order in which they run, and the layouts that
replace their seams; a test counts every tensor that is alive after a forward pass and compares. Dtypes are those of
eager execution: norms compute in at least float32 and keep their input so. A compiled block keeps the residual stream
and what goes into products, and computes the rest again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from quern.parallel.planning.experts import expert_rows
from quern.parallel.planning.step import Step
from quern.planner.memory.kernels import Kernels

__all__ = ["UNEVEN", "Kept", "block", "block_input", "last"]


UNEVEN = 1.25
"""By how much the rank of ``ep`` that gets the most rows is taken to get more than its share; an assumption, as trained
routers are not even."""


@dataclass(frozen=True)
class Kept:
    """One tensor, or several alike, of a rank's micro-batch in one block."""

    what: str
    size: int
    """[bytes]"""
    product: bool = False
    """A matrix product's, attention's or a sum over ranks gave it: selective checkpointing keeps it."""
    compiled: int | None = None
    """[bytes] What of it a compiled block keeps, which computes the rest again; None = all."""
    spare: bool = False
    """No backward needs it: selective checkpointing keeps it because a product gave it."""


def block_input(step: Step) -> int:
    """Bytes of the residual stream, which a block that recomputes keeps: a share of it with ``tp``."""
    return step.tokens // step.plan.tp * step.shape.dim * step.compute_bytes


def block(step: Step, layer: int, kernels: Kernels, checkpointing: str | None = None) -> Sequence[Kept]:
    """What a block keeps with a policy of checkpointing: ``none``, ``selective`` or ``full``; None = the layout's.

    Of experts what is expected where tokens go to all alike, over ranks :data:`UNEVEN` times that; not the most.
    """
    policy = step.layout.activation_checkpointing if checkpointing is None else checkpointing
    return _block(step, step.shape.is_sparse(layer), kernels, policy)


@lru_cache(maxsize=64)  # every place of a pipeline asks for the same
def _block(step: Step, sparse: bool, kernels: Kernels, policy: str) -> Sequence[Kept]:
    stream = Kept("the block's input", block_input(step))
    if policy == "full":
        return [stream]
    found = list(_tensors(step, sparse, kernels))
    if policy == "selective":
        return [stream, *(kept for kept in found if kept.product)]
    kept = [kept for kept in found if not kept.spare]
    if step.layout.compile_backend is None:
        return kept
    compiled = [replace(one, size=one.size if one.compiled is None else one.compiled) for one in kept]
    return [Kept("residual stream", 2 * stream.size), *(one for one in compiled if one.size)]


def last(step: Step, kernels: Kernels) -> list[Kept]:
    """Of the last norm and the loss, whose gradients are formed in forward."""
    shape, wide = step.shape, max(step.compute_bytes, 4)
    rows = shape.padded_vocab_size // step.plan.tp
    return [
        *_norm("last norm", step, kernels, output=False),
        Kept("gradient of the last hidden state", step.tokens * shape.dim * step.compute_bytes),
        Kept("gradient of the output projection", rows * shape.dim * wide),
    ]


def _tensors(step: Step, sparse: bool, kernels: Kernels) -> Iterator[Kept]:
    yield from _norm("attention norm", step, kernels)
    yield from _attention(step, kernels)
    if not sparse:
        yield from _norm("ffn norm", step, kernels)
        yield from _swiglu(step, step.shape.ffn_dim, "ffn")
        return
    moe = step.shape.moe
    assert moe is not None
    # experts take copies of it, the router one in float32
    yield from _norm("ffn norm", step, kernels, output=step.compute_bytes < 4 and moe.shared_ffn_dim > 0)
    yield from _experts(step)


def _norm(name: str, step: Step, kernels: Kernels, *, output: bool = True) -> Iterator[Kept]:
    """Of the stream, which ``tp`` splits."""
    tokens, dim, wide = step.tokens // step.plan.tp, step.shape.dim, max(step.compute_bytes, 4)
    yield Kept(f"{name}: input", tokens * dim * wide, compiled=0)
    yield Kept(f"{name}: scale of each token", tokens * wide)
    if not kernels.fused_norm:
        yield Kept(f"{name}: scaled input", tokens * dim * wide, compiled=0)
    if output:
        # in FP8 what products take is kept as that, or rounded again
        yield Kept(
            f"{name}: output", tokens * dim * step.compute_bytes, compiled=_compiled(step, tokens * dim, taken=True)
        )


def _attention(step: Step, kernels: Kernels) -> Iterator[Kept]:
    shape, context, size, tokens = step.shape, step.layout.context, step.compute_bytes, step.tokens
    tp, wide = step.plan.tp, max(step.compute_bytes, 4)
    queries, keys = shape.num_heads // tp, max(shape.num_kv_heads // tp, 1)
    width = tokens * shape.head_dim * size  # bytes of one head
    yield Kept("queries, keys and values before rotation", (queries + 2 * keys) * width, product=True, spare=True)
    if kernels.joins_products and tp > 1:
        yield Kept("queries and keys beside values", (queries + keys) * width)
    if any(shape.qk_norm_widths):
        scales = 2 if shape.qk_norm == "whole" else queries + keys
        yield Kept("norms of queries and keys", tokens * scales * wide)
        copies = 1 if kernels.fused_norm else 2  # input, and that scaled
        heads = (queries + keys) * width
        yield Kept("norms of queries and keys: inputs", copies * heads // size * wide, compiled=heads)
    held = max(keys, context.heads) if context.heads > 1 else keys
    yield Kept("queries", queries * width)
    yield Kept("keys and values", 2 * (queries if kernels.repeats_keys and context.shards == 1 else held) * width)
    yield Kept("attention", queries * width, product=True)
    yield Kept("attention: denominators", queries * tokens * wide, product=True)
    if context.heads > 1:
        yield Kept("attention, of own tokens", queries * width)
    yield Kept("attention's projection", block_input(step), product=True, spare=True)


def _compiled(step: Step, values: int, *, taken: bool) -> int:
    """Bytes of what goes into products, ``values`` of it, that a compiled block keeps. In FP8 it keeps those that are
    ``taken`` from a norm as they were rounded; by blocks besides what they were, as either side has other blocks."""
    recipe = step.layout.float8
    own = values * step.compute_bytes if recipe is None or recipe.scaling == "blockwise" else 0
    return own + values * (recipe is not None and taken)


def _swiglu(step: Step, width: int, name: str) -> Iterator[Kept]:
    size = step.tokens * (width // step.plan.tp) * step.compute_bytes
    yield Kept(f"{name}: gate and up", 2 * size, product=True)
    yield Kept(f"{name}: gate's SiLU", size, compiled=0)
    yield Kept(f"{name}: product", size, compiled=_compiled(step, size // step.compute_bytes, taken=False))
    yield Kept(f"{name}: output", block_input(step), product=True, spare=True)


def _experts(step: Step) -> Iterator[Kept]:
    moe, wide = step.shape.moe, max(step.compute_bytes, 4)
    assert moe is not None
    own, size = step.tokens // step.plan.tp, step.compute_bytes
    yield Kept("router: input", own * step.shape.dim * wide)
    yield Kept("router: logits", own * moe.num_experts * wide, product=True, spare=True)
    yield Kept("router: scores", own * (moe.num_experts + (3 if moe.normalize else 1) * moe.top_k) * wide)
    yield Kept("router: places", step.tokens * moe.top_k * 3 * 8)
    rows, width = expert_rows(step)["expected"], moe.ffn_dim // step.plan.tp
    travels = step.plan.ep > 1
    if travels and moe.limit is None:
        rows = int(rows * UNEVEN)
    yield Kept("experts: copies of tokens", rows * step.shape.dim * size)
    yield Kept("experts: gate and up", rows * 2 * width * size, product=True)
    yield Kept("experts: gate's SiLU", rows * width * size, compiled=None if travels else 0)  # not compiled there
    yield Kept("experts: product", rows * width * size)
    yield Kept("experts: output", rows * step.shape.dim * size, product=True)
    if step.plan.tp > 1:
        yield Kept("experts: sum over ranks of tp", block_input(step), product=True, spare=True)
    if size < wide and not step.plan.by_fsdp:
        held = moe.num_experts // step.plan.ep * 3 * step.shape.dim * width
        yield Kept("experts: weights, cast", held * size)
    if moe.shared_ffn_dim:
        yield from _swiglu(step, moe.shared_ffn_dim, "shared experts")
