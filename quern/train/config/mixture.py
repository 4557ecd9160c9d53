"""The sections ``data`` and ``phases`` of the trainer's config: sources, and changes of recipe or batch size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from quern.config import Section
from quern.train.config.numbers import Count, Weight

__all__ = ["DataConfig", "DoReMiConfig", "PhaseConfig", "check_sources", "placed"]


class DataConfig(Section):
    """One source of the mixture."""

    later: ClassVar[Mapping[str, Any]] = {"where": None}

    path: str
    """``RUN/tokens/<source>`` of a data run. Example: runs/first/tokens/web"""
    where: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """A condition on the columns of a document's verdict, in SQL: only documents that fulfil it are read, laid end to
    end; null = all of them. The same path may be given more than once, with conditions of which a document fulfils one
    at most. Example: language = 'de' and language_score >= 0.9 and cluster_size < 100"""
    weight: Weight = 1.0
    """[relative] Share of tokens, relative to the other sources' weights."""
    max_epochs: Annotated[float, Field(gt=0)] = 4.0
    """[epochs] A plan that would read the source more often is refused (Muennighoff et al. 2023: 4 epochs cost
    little)."""
    accept_version: Count | None = None
    """The corpus version with which a run may be resumed when it is not the one it began with; starts a phase. Example:
    2"""


class PhaseConfig(Section):
    """A change of recipe or batch size at a data step, given by ``first_step`` or ``first_tokens``."""

    first_step: Count | None = None
    """[steps] Data step from which the phase holds (data steps and model steps differ only by skipped data). Example:
    20000"""
    first_tokens: Annotated[float, Field(gt=0)] | None = None
    """[tokens] The phase holds from the first data step before which so many tokens have been read. Example: 2e9"""
    weights: tuple[Weight, ...] | None = None
    """[relative] A weight for each entry of ``data``; null = unchanged. Example: [0.7, 0.3]"""
    global_batch: Count | None = None
    """[sequences] Sequences per step; null = unchanged. Example: 1024"""

    @model_serializer(mode="wrap")
    def _without_later(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With what was given of the two, so that older runs are known by the same digests."""
        plain: dict[str, Any] = handler(self)
        plain.pop("first_step" if self.first_tokens else "first_tokens", None)
        return plain

    @property
    def start(self) -> int:
        """``first_step``, which a checked config has of every phase."""
        assert self.first_step is not None
        return self.first_step


class DoReMiConfig(Section):
    """DoReMi (Xie et al. 2023): the run is a proxy that learns weights for its sources, for a larger run; ``quern mix
    doremi`` writes it."""

    reference: str | None = None
    """A checkpoint of a model of the same shape that was trained on the same sources, or its training run: the newest.
    Null = no weights are learned; what is read goes by ``data`` in either case. Example: runs/reference"""
    step_size: Annotated[float, Field(gt=0)] = 1.0
    """[1/nat] How fast weights follow the excess loss: in a step, a weight grows by exp of this times it."""
    smoothing: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """[share] The part of each step's weights that is the same for all sources: a weight of 0 would stay 0."""


def placed(phases: Sequence[PhaseConfig], global_batch: int, seq_len: int, num_sources: int) -> Iterator[PhaseConfig]:
    """The phases, with the first step of each. ``global_batch``: of the steps before the first.

    Raises ValueError where phases do not ascend, or have not a weight for each source."""
    step, tokens, batch = 0, 0, global_batch  # tokens read before the step, of so many sequences from it on
    for number, phase in enumerate(phases):
        first = phase.first_step
        if phase.first_tokens is not None:
            left = math.ceil(phase.first_tokens) - tokens
            found = step + max(0, -(-left // (batch * seq_len)))
            if first not in (None, found):
                told = f"first_tokens {phase.first_tokens:,.0f} is data step {found}"
                raise ValueError(f"phases.{number}: {told}, and first_step {first}; expected one of the two")
            first = found
        if first is None:
            raise ValueError(f"phases.{number}: expected first_step or first_tokens, got neither")
        if first <= step:
            raise ValueError(f"phases.{number}.first_step: expected more than {step}, got {first}")
        if phase.weights is not None and len(phase.weights) != num_sources:
            got, wanted = len(phase.weights), num_sources
            raise ValueError(f"phases.{number}.weights: expected {wanted} weights, one a source, got {got}")
        tokens, step = tokens + (first - step) * batch * seq_len, first
        batch = phase.global_batch or batch
        yield phase.model_copy(update={"first_step": first})


def check_sources(data: Sequence[DataConfig]) -> None:
    """Raises ValueError where a path is given twice and no conditions tell them apart, or no source has weight."""
    for path in {source.path.rstrip("/") for source in data}:
        wheres = [source.where for source in data if source.path.rstrip("/") == path]
        if len(wheres) > 1 and (None in wheres or len(set(wheres)) < len(wheres)):
            raise ValueError(f"data: {path!r} is given twice; expected one entry a source, or in each another where")
    if not any(source.weight > 0 for source in data):
        raise ValueError("data: expected a weight above 0")
