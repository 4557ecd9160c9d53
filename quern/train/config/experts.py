"""The config's section ``experts``, and the sections of ``optimizer`` for experts and routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from quern.config import Section
from quern.model.moe.config import MoEShape
from quern.parallel.planning.balancing import Balancing, Over
from quern.train.config.numbers import Count, Weight

__all__ = ["ExpertsConfig", "OwnUpdateConfig"]


class OwnUpdateConfig(Section):
    """How some weights of a model with experts (``model.moe``) are updated otherwise than the rest."""

    lr_factor: Weight = 1.0
    """[factor] Of the learning rate, at every step; 0 = these weights stay as they are. ``lr`` in the metrics is
    without it. Example: 0.5"""
    weight_decay: Weight | None = None
    """Decoupled weight decay of these weights; null = ``optimizer.weight_decay``. Example: 0.0"""


class ExpertsConfig(Section):
    """How the loads of experts are kept even, in a model that has some (``model.moe``)."""

    later: ClassVar[Mapping[str, Any]] = {"place_interval": None}
    balance_loss: Weight = 0.0
    """Weight of the balance loss of each layer with experts in what is minimised (Switch: 0.01): E Σ f P of the shares
    of assignments and the mean scores, which is 1 where loads are even, as a mean over sequences; ``loss`` in the
    metrics is the cross-entropy alone."""
    balance_over: Over = "sequence"
    """Whose shares these are: of a ``sequence`` (DeepSeek-V3), of a ``micro_batch`` on a data-parallel rank, which
    another layout cuts otherwise, or ``global``: of the last step's global batch."""
    z_loss: Weight = 0.0
    """Weight of log²Z of each router's logits (ST-MoE: 0.001), as a mean over tokens."""
    bias_rate: Weight = 0.0
    """With ``model.moe.bias``: after each step an expert's bias rises by so much if the global batch gave it less than
    the mean of its layer, and falls if more (Wang et al. 2024: 0.001)."""
    center_bias: bool = False
    """Subtract the mean of a layer's biases after each update, which changes no choice; the paper does not."""
    place_interval: Count | None = None
    """[steps] With ``parallel.ep``: after every so many, experts are placed anew, so that ranks have even loads by what
    these steps gave each: experts get other numbers, which the ledger tells, and the model stays what it is. Null =
    never. Example: 1000"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.balance_over != "sequence" and not self.balance_loss:
            raise ValueError("balance_over: expected balance_loss above 0 with it")
        if self.center_bias and not self.bias_rate:
            raise ValueError("center_bias: expected bias_rate above 0 with it")
        return self

    @property
    def balancing(self) -> Balancing:
        """For a layout."""
        return Balancing(**self.model_dump())

    def check(self, moe: MoEShape | None) -> str | None:
        """Why these settings do not fit a model with such experts; None if they do."""
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if given and moe is None:
            return f"experts.{given[0]}: expected model.moe with it: the model has no experts"
        if moe is not None and moe.bias != bool(self.bias_rate):
            expected = f"{'more than 0' if moe.bias else '0'} with model.moe.bias {moe.bias}"
            return f"experts.bias_rate: expected {expected}, got {self.bias_rate:g}"
        return None
