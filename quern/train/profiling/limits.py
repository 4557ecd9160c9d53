"""Ceilings of a traced run: for its own shapes, for the best product, and for memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quern.model.float8.recipe import Recipe, Scaling
from quern.train.profiling.ceilings import copy_ceiling, float8_ceiling, gemm_ceiling
from quern.train.profiling.losses import Limits
from quern.train.profiling.products import Shape

__all__ = ["measure"]

#: Sizes of the square product whose speed stands for the machine's best.
_BEST = {"cuda": 8192, "cpu": 1024}

_SCALINGS: dict[str, Scaling] = {name: name for name in ("tensorwise", "rowwise", "blockwise")}


def measure(shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device) -> Limits:
    """Of each of ``shapes`` that is a single product, of a large square one in ``dtype``, and of a copy."""
    alone = {shape: speed for shape in shapes if (speed := _alone(shape, device)) is not None}
    size = _BEST.get(device.type, 1024)
    name = str(dtype).removeprefix("torch.")
    of_dtype = [speed for shape, speed in alone.items() if shape.dtype == name]
    best = max(gemm_ceiling(size, size, size, dtype, device), *of_dtype, 0.0)
    return Limits(alone, best, copy_ceiling(device))


def _alone(shape: Shape, device: torch.device) -> float | None:
    dtype = getattr(torch, shape.dtype, None)
    if shape.batch > 1 or shape.flops == 0 or not isinstance(dtype, torch.dtype):
        return None
    if shape.scaling in _SCALINGS:
        return float8_ceiling(shape.m, shape.n, shape.k, Recipe(_SCALINGS[shape.scaling]), device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return gemm_ceiling(shape.m, shape.n, shape.k, dtype, device)
    return None
