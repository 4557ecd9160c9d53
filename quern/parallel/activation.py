"""Activation checkpointing: recomputes a block's activations in backward instead of storing them.

``full`` keeps a block's input alone. ``selective`` keeps also what its matrix products, its attention and the sums
over ranks gave (of a sum, not what went into it), and computes only the cheap rest again (norms, rotations, SwiGLU's
product, residuals; and gathers the sequence again where tensors are split, which products that are kept no longer
need). Parameter names do not change: ``block.forward`` is replaced, no module is wrapped around it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from quern.parallel.tensors.collectives import KEEPING, SUMS_KEPT

__all__ = ["checkpoint_blocks", "kept_operations"]

MATMULS = (
    "aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_grouped_mm",
    "quern::blockwise_scaled_mm", "quern::multiply_experts",
)  # fmt: skip
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "torch_attn::_varlen_attn",
    "quern::context_attention",
)  # fmt: skip
SUMS = ("_c10d_functional::reduce_scatter_tensor",)


@functools.cache
def kept_operations() -> frozenset[Any]:
    """The operators whose outputs ``selective`` keeps, as far as this torch has them.

    ``bmm`` is not one: scaled-dot-product attention without a fused kernel runs on it, and would keep L × L scores.
    """
    for module in ("flex_attention", "varlen"):  # importing them registers their operators
        importlib.import_module(f"torch.nn.attention.{module}")
    kept: set[Any] = set()
    for name in (*MATMULS, *ATTENTION, *SUMS):
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            kept |= {getattr(packet, overload) for overload in packet.overloads() if overload != "out"}
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    return frozenset(kept if flex is None else kept | {flex})


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept_operations() else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    forward, again = create_selective_checkpoint_contexts(_policy)
    if torch.compiler.is_compiling():  # a graph is not run twice
        return forward, again
    forward.__class__, again.__class__ = _Saves, _Reads
    return _while(KEEPING, forward), _while(SUMS_KEPT, again)


class _Saves(_CachingTorchDispatchMode):
    """Sees what is kept alone: what FSDP2 does for experts within a block differs when it is computed again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in kept_operations():
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Reads(_CachedTorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in kept_operations():
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def _while(variable: ContextVar[bool], context: Any) -> Iterator[None]:
    token = variable.set(True)
    try:
        with context:
            yield
    finally:
        variable.reset(token)


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: str) -> None:
    """Makes every block recompute in backward: ``none``, ``full`` or ``selective``. In place."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # blocks draw no random numbers
    if mode == "selective":
        options["context_fn"] = _selective_contexts
    elif mode != "full":
        raise ValueError(f"activation_checkpointing: expected none, full or selective, got {mode!r}")
    for block in blocks:
        block.forward = _recomputing(block.forward, options)


def _recomputing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed
