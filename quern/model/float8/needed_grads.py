"""Determines which gradients a backward pass needs, since a pipeline with a split backward calls each function twice,
once for the input and once for the weights: gradients that are not needed are not computed."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["needed_grads"]


def needed_grads(ctx: Any, first_weight: int) -> list[bool]:
    """Which gradients are needed: of the input, then of each weight.

    A compiled graph has one backward pass, which computes what the inputs need. ``first_weight``: the weights' place
    among the arguments; the engine counts tensors only.
    """
    if torch.compiler.is_compiling():
        return [ctx.needs_input_grad[0], *ctx.needs_input_grad[first_weight:]]
    return [_runs(node) for node, _ in ctx.next_functions]


def _runs(node: Any) -> bool:
    if node is None:
        return False
    try:  # private, and the only way to ask; torch.autograd.graph uses it for the same purpose
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad was asked for
        return True
