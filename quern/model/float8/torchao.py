"""torchao's FP8 layer as an alternative to ours, for comparison.

Its ``Float8Linear`` is a module that owns its weight; what that module multiplies with takes any weight, so that names
and parameters, and with them checkpoints, optimizer and FSDP2, stay what they are. Neither is a public interface of
torchao; both are as 0.18 has them (``torchao/float8/float8_linear.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quern.errors import InputError
from quern.model.float8.recipe import Recipe

__all__ = ["Torchao"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Torchao(Recipe):
    """A recipe with what computes by it; equal to itself alone."""

    function: Any
    """An autograd function of input, weight [K, O] and one of the two below."""
    kernels: tuple[Any, Any]
    emulation: tuple[Any, Any]
    """On the CPU: sums in float32."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    @classmethod
    def of(cls, recipe: Recipe) -> Torchao:
        """Raises :class:`InputError` where torchao is not installed, or is another than this was written for."""
        try:
            from torchao.float8 import Float8LinearConfig
            from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
        except ImportError as error:
            raise InputError(
                f"float8.implementation: torchao is not installed ({error}); expected quern, or "
                f"pip install 'torchao>=0.18,<0.19'"
            ) from None
        kernels = Float8LinearConfig.from_recipe_name(recipe.scaling)
        settings = []
        for config in (kernels, replace(kernels, emulate=True)):
            with torch.device("meta"):  # for its settings alone
                settings.append((Float8Linear(16, 16, bias=False, config=config).linear_mm_config, config))
        return cls(
            recipe.scaling, recipe.gradients, implementation="torchao",
            function=matmul_with_hp_or_float8_args, kernels=settings[0], emulation=settings[1],
        )  # fmt: skip

    def linear(self, x: Tensor, weight_OK: Tensor) -> Tensor:
        """``x Wᵀ`` [..., O] of ``x`` [..., K]; the weight is rounded to the dtype of ``x`` first."""
        settings = self.emulation if x.device.type == "cpu" else self.kernels
        out: Tensor = self.function.apply(x, weight_OK.to(x.dtype).t(), *settings)
        return out
