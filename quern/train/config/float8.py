"""The section ``float8`` of a training config. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from quern.config import Section
from quern.model.float8.recipe import TORCHAO_GRADIENTS, Recipe, Scaling

__all__ = ["Float8Config"]


class Float8Config(Section):
    """FP8 for the products of the blocks' matrices, of experts too, where their sizes on a rank are multiples of 16
    (blockwise: of 128); embedding, head, routers and norms are not in FP8, and neither are masters and moments."""

    recipe: Scaling | None = None
    """Which values share a scale: tensorwise a matrix, rowwise a row, blockwise 1×128 of activations and gradients and
    128×128 of weights (DeepSeek-V3, section 3.3). Null = no FP8. Example: tensorwise"""
    gradients: Literal["e4m3", "e5m2"] | None = None
    """Format of the gradients of outputs; null = e4m3, and for torchao's tensorwise e5m2. Example: e5m2"""
    delayed: bool = False
    """Tensorwise only: scales from the largest values of the 16 steps before, the same on every rank; else from each
    matrix itself."""
    all_gather: bool = False
    """FSDP2 gathers in FP8 what these products take, half the bytes of bf16 (tensorwise and blockwise). The bits are
    the same."""
    implementation: Literal["quern", "torchao"] = "quern"
    """Whose products: torchao's, where it is installed, are a peer to compare with (tensorwise and rowwise, without
    ``tp``, ``delayed`` and ``all_gather``)."""

    @model_validator(mode="after")
    def _of_a_recipe(self) -> Self:
        if self.recipe is None:
            given = {
                "gradients": self.gradients, "delayed": self.delayed, "all_gather": self.all_gather,
                "implementation": self.implementation != "quern",
            }  # fmt: skip
            for name, value in given.items():
                if value:
                    raise ValueError(
                        f"{name}: changes nothing without recipe, which is null; expected a recipe with it"
                    )
        if self.implementation == "torchao":
            self._of_torchao()
        if self.delayed and self.recipe != "tensorwise":
            raise ValueError(f"delayed: is of recipe tensorwise; expected false with {self.recipe}")
        if self.delayed and self.all_gather:
            raise ValueError("all_gather: takes scales from the weights themselves; expected false with delayed")
        if self.all_gather and self.recipe == "rowwise":
            raise ValueError(
                "all_gather: rowwise quantises a weight along its rows for forward and along its columns for backward, "
                "and one gather brings one of them; expected false, or recipe tensorwise or blockwise"
            )
        return self

    def _of_torchao(self) -> None:
        if self.recipe not in TORCHAO_GRADIENTS:
            raise ValueError(
                f"implementation: torchao has {' and '.join(TORCHAO_GRADIENTS)}; expected one of these recipes with "
                f"it, or quern, got {self.recipe}"
            )
        fixed = TORCHAO_GRADIENTS[self.recipe]
        if self.gradients not in (None, fixed):
            raise ValueError(
                f"gradients: torchao's {self.recipe} has {fixed}; expected that or null, or implementation quern, got "
                f"{self.gradients}"
            )
        for name, value in {"delayed": self.delayed, "all_gather": self.all_gather}.items():
            if value:
                raise ValueError(f"{name}: is quern's own; expected false with implementation torchao")

    @property
    def products(self) -> Recipe | None:
        """How the products are computed; None = not in FP8."""
        if self.recipe is None:
            return None
        default = TORCHAO_GRADIENTS[self.recipe] if self.implementation == "torchao" else "e4m3"
        return Recipe(self.recipe, self.gradients or default, self.delayed, self.implementation)
