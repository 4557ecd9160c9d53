"""Sizes and switches of layers with experts. Imports no torch."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from quern.config import Section

__all__ = ["MoEConfig", "MoEShape"]

Size = Annotated[int, Field(ge=1, le=2**28)]
#: Bounded: a foreign file has a name for every expert.
Experts = Annotated[int, Field(ge=1, le=4096)]
Score = Literal["softmax", "sigmoid"]
Drop = Literal["position", "score"]
Positive = Annotated[float, Field(gt=0)]


class MoEShape(Section):
    """The layers with experts of a model, resolved: part of :class:`quern.model.config.ModelShape`."""

    num_experts: Experts
    top_k: Experts
    ffn_dim: Size
    score: Score = "softmax"
    normalize: bool = False
    scale: Positive = 1.0
    bias: bool = False
    shared_ffn_dim: Annotated[int, Field(ge=0, le=2**28)] = 0
    shared_gate: bool = False
    first_dense: Annotated[int, Field(ge=0)] = 0
    every: Annotated[int, Field(ge=1)] = 1
    groups: Experts = 1
    top_groups: Experts = 1
    capacity: Positive | None = None
    drop: Drop = "position"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: expected at most num_experts ({self.num_experts}), got {self.top_k}")
        if self.num_experts % self.groups:
            raise ValueError(f"groups: expected a divisor of num_experts ({self.num_experts}), got {self.groups}")
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups: expected at most groups ({self.groups}), got {self.top_groups}")
        if self.top_groups * self.group_size < self.top_k:
            raise ValueError(
                f"top_groups: expected {ceil(self.top_k / self.group_size)} or more, so that top_k ({self.top_k}) "
                f"experts are in them ({self.group_size} in each), got {self.top_groups}"
            )
        if self.shared_gate and not self.shared_ffn_dim:
            raise ValueError("shared_gate: gates the shared experts; expected shared_ffn_dim ≥ 1 with it, got 0")
        if self.drop == "score" and self.capacity is None:
            raise ValueError("drop: changes nothing where nothing is dropped; expected capacity with it, or position")
        return self

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.groups

    def is_sparse(self, layer: int) -> bool:
        """Whether that layer, counted from 0, has experts."""
        return layer >= self.first_dense and (layer - self.first_dense + 1) % self.every == 0

    @property
    def limit(self) -> tuple[int, int] | None:
        """Numerator and denominator of the assignments a token that an expert takes at most (Switch Transformers,
        Fedus et al. 2021, section 2.2), to be rounded up for all tokens of a call; None = takes all."""
        if self.capacity is None:
            return None
        # of the decimal number: 1.1 times 10 is 11, and not a little more
        return (Fraction(str(self.capacity)) * self.top_k / self.num_experts).as_integer_ratio()

    def num_parameters(self, dim: int, *, active: bool = False) -> int:
        """Parameters of one such layer of a model of width ``dim``; ``active``: those that a token is multiplied by."""
        experts = self.top_k if active else self.num_experts
        return dim * (self.num_experts + 3 * experts * self.ffn_dim + 3 * self.shared_ffn_dim + self.shared_gate)


class MoEConfig(Section):
    """Experts in place of the SwiGLU (Shazeer et al. 2017). Null means the preset's value."""

    num_experts: Experts | None = None
    """[experts] In each layer that has them. Example: 64"""
    top_k: Experts | None = None
    """[experts] That each token is given to. Example: 8"""
    ffn_dim: Size | None = None
    """[values] Width of an expert's SwiGLU; null without a preset = the model's ``ffn_dim``. Example: 1024"""
    score: Score | None = None
    """Of an expert for a token: softmax over all experts' logits, or the sigmoid of its own (DeepSeek-V3); null =
    softmax. Example: sigmoid"""
    normalize: bool | None = None
    """Whether the weights of a token's experts are divided by their sum; null = false. Example: true"""
    scale: Positive | None = None
    """[factor] Of the weights, after that; null = 1. Example: 2.5"""
    bias: bool | None = None
    """Whether a bias of each expert is added to its score for the choice alone, never for the weight (Wang et al. 2024,
    DeepSeek-V3); null = false. Example: true"""
    shared_ffn_dim: Annotated[int, Field(ge=0, le=2**28)] | None = None
    """[values] Width of all shared experts together, which every token is given to; null = 0, none. Example: 2048"""
    shared_gate: bool | None = None
    """Whether a sigmoid of the token scales what shared experts give (Qwen2-MoE); null = false. Example: true"""
    first_dense: Annotated[int, Field(ge=0)] | None = None
    """[layers] At the start that have no experts; null = 0. Example: 3"""
    every: Annotated[int, Field(ge=1)] | None = None
    """[layers] Of those after, every n-th has experts; null = 1. Example: 2"""
    groups: Experts | None = None
    """[groups] Of experts, of which a token's are taken from ``top_groups`` (DeepSeek-V3): those whose two best scores
    have the greatest sums; null = 1. Example: 8"""
    top_groups: Experts | None = None
    """[groups] See ``groups``; null = 1. Example: 4"""
    capacity: Positive | None = None
    """[factor] An expert takes at most this times its even share of a micro-batch's assignments on a rank; the others
    add nothing; null = all. Example: 1.25"""
    drop: Drop | None = None
    """Which assignments an expert that is full leaves out: those of later tokens, or of lower weights; null =
    position. Example: score"""

    def shape(self, preset: dict[str, Any]) -> MoEShape:
        """The resolved keys; ``preset``: those that are not given here."""
        own = preset | {name: value for name, value in self.model_dump().items() if value is not None}
        for name in ("num_experts", "top_k"):
            if name not in own:
                raise ValueError(f"moe.{name}: missing; expected it, or a preset that has experts")
        try:
            return MoEShape(**own)
        except ValidationError as error:
            raise ValueError(f"moe.{error.errors()[0]['ctx']['error']}") from None
