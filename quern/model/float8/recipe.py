"""FP8 recipes: which parts of a matrix share a scale, and the format of gradients. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BLOCK", "TORCHAO_GRADIENTS", "Gradients", "Recipe", "Scaling"]

Scaling = Literal["tensorwise", "rowwise", "blockwise"]
Gradients = Literal["e4m3", "e5m2"]

BLOCK = 128
"""Width of a block of ``blockwise`` (DeepSeek-V3, section 3.3.2)."""

TORCHAO_GRADIENTS: dict[Scaling, Gradients] = {"tensorwise": "e5m2", "rowwise": "e4m3"}
"""torchao's recipes of the same name, each with its format of gradients (``torchao/float8/config.py``, 0.18)."""


@dataclass(frozen=True)
class Recipe:
    """How the three products of a linear layer are computed in FP8.

    * ``tensorwise``: a scale a matrix.
    * ``rowwise``: a scale a row of either factor, along what is summed over.
    * ``blockwise``: activations and gradients 1×128 along what is summed over, weights 128×128.
    """

    scaling: Scaling
    gradients: Gradients = "e4m3"
    """Format of the gradient of the output; everything else is E4M3."""
    delayed: bool = False
    """Of ``tensorwise``: scales from the steps before (:mod:`quern.model.float8.delayed`)."""
    implementation: Literal["quern", "torchao"] = "quern"
    """Whose products (:mod:`quern.model.float8.torchao`)."""

    def __post_init__(self) -> None:
        if self.delayed and self.scaling != "tensorwise":
            raise ValueError(f"delayed scaling is of tensorwise, not of {self.scaling}")

    @property
    def multiple(self) -> int:
        """What both sizes of a weight must be multiples of: a kernel's alignment of 16 bytes, or a block."""
        return BLOCK if self.scaling == "blockwise" else 16
