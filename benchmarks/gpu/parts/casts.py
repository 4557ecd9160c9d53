"""Casts of activations to FP8, compiled and alone."""

from __future__ import annotations

from typing import Any

import torch

from parts.common import gpu, greatest, seconds_of, shape_of, sized
from quern.model.float8 import quantise
from quern.torch_versions import divide_exactly

#: How often each reads its numbers at least: a scale for all of them needs them twice.
READS = {"tensorwise": 2, "rowwise": 1, "blocks_1x128": 1, "blocks_128x128": 1}


def casts(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Time and bytes a second: two bytes in for each reading, one out. ``differs``: the greatest difference of compiled
    and eager FP8 values, of values of 448 at most."""
    shape, device = shape_of(spec), gpu(spec)
    divide_exactly()  # as a run that compiles FP8
    x_TK = torch.randn(spec["tokens"], shape.dim, device=device, dtype=torch.bfloat16)
    found = []
    for name in READS:
        eager = getattr(quantise, name)
        compiled = torch.compile(eager, backend=spec["backend"])
        differs = greatest(compiled(x_TK).data_RS.float(), eager(x_TK).data_RS.float())
        seconds = seconds_of(lambda cast=compiled: cast(x_TK), device)
        found.append({"cast": name, "numbers": x_TK.numel(), "MB": moved(name, x_TK.numel()) / 1e6,
                      **sized(seconds, moved=moved(name, x_TK.numel())), "differs": differs})  # fmt: skip
    return found


def moved(name: str, numbers: int) -> int:
    """Bytes, from BF16 to FP8; scales are left out."""
    return numbers * (2 * READS[name] + 1)
