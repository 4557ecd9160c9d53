"""Describes what keeps the loads of experts even, as a config gives it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Balancing", "Over"]

Over = Literal["micro_batch", "sequence", "global"]
"""Of which tokens' loads a balance loss is: those of a micro-batch on a data-parallel rank, of a sequence, or of the
last step's global batch."""


@dataclass(frozen=True)
class Balancing:
    """See the config's section ``experts``."""

    balance_loss: float = 0.0
    balance_over: Over = "sequence"
    z_loss: float = 0.0
    bias_rate: float = 0.0
    center_bias: bool = False
    place_interval: int | None = None
