"""Computes the figures of a row from the times of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quern.model.config import ModelShape

__all__ = ["figures", "interval"]

RESAMPLES = 2000


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """The interval that contains the median with probability ``share``, by bootstrap (Efron 1979, percentiles)."""
    drawn = np.random.default_rng(0).choice(np.asarray(values, float), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), ((1 - share) / 2, (1 + share) / 2))
    return float(low), float(high)


def figures(
    shape: ModelShape,
    step_times_s: Sequence[float],
    *,
    tokens: int,
    seq_len: int,
    world: int,
    peak: float | None,
) -> dict[str, Any]:
    """Of measured steps of ``tokens`` tokens each, on ``world`` devices with a dense ``peak`` in FLOP/s.

    Speeds are those of the median step. ``tflops_…`` are achieved by one device; ``…_full`` counts the whole attention
    matrix, ``…_causal`` the half of it, ``…_without_head`` no output projection; recomputation never counts. MFU is
    None where the peak is not known.
    """
    median = float(np.median(step_times_s))
    low, high = interval(step_times_s)
    speed = tokens / median
    found: dict[str, Any] = {
        "step_time_s": median,
        "step_time_low_s": low,
        "step_time_high_s": high,
        "step_time_min_s": min(step_times_s),
        "step_time_max_s": max(step_times_s),
        "step_times_s": list(step_times_s),
        "tokens_per_s": speed,
        "tokens_per_s_low": tokens / high,
        "tokens_per_s_high": tokens / low,
        "tokens_per_s_per_device": speed / world,
        "peak_tflops": None if peak is None else peak / 1e12,
    }
    for convention, causal in (("full", False), ("causal", True)):
        for suffix, head in (("", True), ("_without_head", False)):
            achieved = speed / world * shape.flops_per_token(seq_len, causal=causal, head=head)
            found[f"tflops_{convention}{suffix}"] = achieved / 1e12
            found[f"mfu_{convention}{suffix}"] = None if peak is None else achieved / peak
    return found
