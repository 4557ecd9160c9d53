"""Describes an optimizer step as far as its traffic goes by it, and one kind of what is sent. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from quern.model.config import ModelShape
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan

__all__ = ["Step", "Transfer"]

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True)
class Transfer:
    """One kind of collective of one rank in one step."""

    axis: str
    """Along which the ranks lie that talk."""
    what: str
    collective: Collective
    ranks: int
    """How many talk to each other."""
    calls: int
    payload: int
    """Bytes of the whole tensor, summed over the calls: M."""
    away: int | None = None
    """Of an all-to-all whose parts differ, the bytes of it that go to other ranks; None = the parts are equal."""

    @property
    def sent(self) -> int:
        """Bytes that this rank puts on the wire; rounded up."""
        if self.away is not None:
            return self.away
        rest = Fraction(self.ranks - 1, self.ranks)
        share = {"all_reduce": 2 * rest, "send": Fraction(1)}
        return -int(-share.get(self.collective, rest) * self.payload // 1)


@dataclass(frozen=True)
class Step:
    """The properties of an optimizer step that determine its traffic."""

    shape: ModelShape
    layout: Layout
    num_micro_batches: int
    compute_bytes: int
    """Of an element of activations, and of weights where they are used."""
    reduce_bytes: int
    """Of an element of what is summed in the dtype of the masters: scales, the loss, and gradients by default."""
    loss_chunk: int = 4096

    @property
    def gradient_bytes(self) -> int:
        """Of an element of gradients when they are summed, and until the update."""
        return 2 if self.layout.bf16_gradients else self.reduce_bytes

    @property
    def plan(self) -> MeshPlan:
        """The sizes of the mesh."""
        return self.layout.plan

    @property
    def tokens(self) -> int:
        """Of a micro-batch, those that a rank computes, or those of ``tp`` together."""
        return self.layout.micro_batch * self.layout.tokens
