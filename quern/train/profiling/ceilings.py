"""Measures this machine's best speed for one product or one copy at a time.

A ceiling is the median of calls that repeat for a moment on random numbers (a GPU multiplies zeros faster than what
training has). Operands that fit into a cache stay there, and a GPU has not grown hot yet, so that a step, which has
neither advantage, stays below.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from quern.model.float8.product import available, multiply
from quern.model.float8.quantise import Quantised, blocks_1x128, blocks_128x128, rowwise, tensorwise
from quern.model.float8.recipe import Recipe

__all__ = ["copy_ceiling", "float8_ceiling", "gemm_ceiling", "median_s"]

#: Kernels shorter than this are captured many at a time: the host needs as long to start one.
_SHORT_S = 5e-5


def gemm_ceiling(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, seconds: float = 0.2) -> float:
    """FLOP/s of ``a bᵀ`` with ``a`` [m, k] and ``b`` [n, k], as a linear layer's forward has them."""
    a_MK, b_NK = _random(m, k, dtype, device), _random(n, k, dtype, device)
    return 2 * m * n * k / median_s(lambda: a_MK @ b_NK.T, device, seconds)


def float8_ceiling(
    m: int, n: int, k: int, recipe: Recipe, device: torch.device, *, seconds: float = 0.2
) -> float | None:
    """FLOP/s of the same by a recipe's FP8 kernel, activations times weights, to BF16; the casts before it are not in
    the time. None: the machine has no kernel for this recipe, or not of this size."""
    a_MK, b_NK = (_random(rows, k, torch.bfloat16, device) for rows in (m, n))
    if any(size % recipe.multiple for size in (n, k)) or not available(recipe, device, torch.bfloat16):
        return None
    a, b = _factors(a_MK, b_NK, recipe)
    return 2 * m * n * k / median_s(lambda: multiply(a, b, torch.bfloat16, fast=True), device, seconds)


def copy_ceiling(device: torch.device, *, size: int = 2**28, seconds: float = 0.2) -> float:
    """Bytes a second of a copy of ``size`` bytes inside the device's memory, read and written."""
    source, target = (torch.ones(size // 4, dtype=torch.int32, device=device) for _ in range(2))
    return 2 * 4 * source.numel() / median_s(lambda: target.copy_(source), device, seconds)


def _factors(a_MK: Tensor, b_NK: Tensor, recipe: Recipe) -> tuple[Quantised, Quantised]:
    if recipe.scaling == "blockwise":
        return blocks_1x128(a_MK), blocks_128x128(b_NK)
    cast = tensorwise if recipe.scaling == "tensorwise" else rowwise
    return cast(a_MK), cast(b_NK)


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows * 1_000_003 + columns)
    return torch.randn(rows, columns, dtype=torch.float32, device=device, generator=generator).to(dtype)


def median_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of one call: the median of those that fit into ``seconds``, and of three at least."""
    for _ in range(3):  # libraries choose and load their kernels
        call()
    times = _on_cuda(call, seconds) if device.type == "cuda" else _on_host(call, seconds)
    return statistics.median(times)


def _on_host(call: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def _on_cuda(call: Callable[[], object], seconds: float) -> list[float]:
    """By the device's own clock, all calls queued before any is awaited."""
    one = _queued_s(call, 5)[-1]
    if one >= _SHORT_S:
        return _queued_s(call, max(3, int(seconds / one)))
    graph, count = torch.cuda.CUDAGraph(), 64
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    graph.replay()
    one = _queued_s(graph.replay, 5)[-1]
    return [time / count for time in _queued_s(graph.replay, max(3, int(seconds / one)))]


def _queued_s(call: Callable[[], object], count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
