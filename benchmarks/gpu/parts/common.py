"""What several parts need: sizes, time on the device's clock, distance from an exact result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quern.model.config import ModelConfig, ModelShape

__all__ = ["distance", "gpu", "greatest", "seconds_of", "shape_of", "sized"]


def shape_of(spec: dict[str, Any]) -> ModelShape:
    """Of ``model``, a section of a training config, with ``vocab_size`` ids."""
    return ModelConfig.model_validate(spec["model"]).shape(spec["vocab_size"])


def gpu(spec: dict[str, Any]) -> torch.device:
    return torch.device(spec["device"])


def distance(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is exact."""
    found, exact = found.double(), exact.double()
    return float((found - exact).norm() / exact.norm())


def greatest(found: Tensor, exact: Tensor) -> float:
    """Greatest difference of two numbers."""
    return float((found.double() - exact.double()).abs().max())


def sized(seconds: float, *, flops: float | None = None, moved: float | None = None) -> dict[str, Any]:
    """Of a measure: milliseconds, and what was done in them."""
    rates = {"TFLOP/s": None if flops is None else flops / seconds / 1e12,
             "GB/s": None if moved is None else moved / seconds / 1e9}  # fmt: skip
    return {"ms": 1e3 * seconds, **{name: rate for name, rate in rates.items() if rate is not None}}


def seconds_of(call: Callable[[], object], device: torch.device, seconds: float = 0.5) -> float:
    """The median of calls in turn, by the device's clock."""
    for _ in range(3):
        call()
    began, times = time.perf_counter(), []
    while len(times) < 5 or (time.perf_counter() - began < seconds and len(times) < 200):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)
