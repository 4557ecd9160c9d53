"""Differences between devices in what their kernels keep for a backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

__all__ = ["CPU", "CUDA", "Kernels"]


@dataclass(frozen=True)
class Kernels:
    """How a device computes, as far as memory goes by it."""

    fused_norm: bool
    """RMSNorm is one kernel, which keeps its input; else the product of input and scale is kept besides."""
    repeats_keys: bool
    """Attention copies keys and values for each query head of a group and keeps the copies, as ``varlen`` does where
    :data:`quern.torch_versions.VARLEN_TAKES_GQA` is false."""
    joins_products: bool
    """With ``tp`` queries, keys and values leave their product as one tensor, which values keep alive as a whole: see
    :data:`quern.torch_versions.SPLIT_GRADIENTS_JOINED`."""
    adds_products: bool
    """A product can be added to a sum in float32 without being written."""
    accumulates_queries: bool
    """Attention's backward sums gradients of queries in float32, in memory."""


_OLD = tuple(map(int, version("torch").split(".")[:2])) < (2, 13)

CPU = Kernels(fused_norm=False, repeats_keys=False, joins_products=_OLD, adds_products=False, accumulates_queries=False)
CUDA = Kernels(fused_norm=True, repeats_keys=_OLD, joins_products=_OLD, adds_products=True, accumulates_queries=True)
