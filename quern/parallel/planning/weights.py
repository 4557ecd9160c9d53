"""Lists the weights of a model stage, and how much of each one rank holds. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from quern.model.config import ModelShape
from quern.parallel.planning.mesh import MeshPlan

__all__ = ["STREAM", "Weight", "alike", "block_units", "block_weights", "dealt_along", "end_weights"]

STREAM = {"w1": 2, "w2": 1, "w3": 2}
"""The dimension of an expert's weight that is the model's width."""


def dealt_along(size: Sequence[int], stream: int | None, ranks: int) -> int:
    """The dimension along which FSDP2 deals out a weight: its first; of experts, whose number the ranks may not divide,
    ``stream`` where they divide that."""
    return 0 if stream is None or size[0] % ranks == 0 or size[stream] % ranks else stream


@dataclass(frozen=True)
class Weight:
    """A parameter as one rank of ``tp`` and ``ep`` holds it, before FSDP2 deals it out."""

    shape: tuple[int, ...]
    split: bool
    """Whether ``tp`` splits it; else every rank of ``tp`` holds it whole."""
    router: bool = False
    """Whether it is a router's or a gate's, which compute in at least float32."""
    stream: int | None = None
    """Of experts' weights: see :data:`STREAM`."""

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    def shards(self, plan: MeshPlan) -> int:
        """The ranks over which FSDP2 deals it out."""
        return plan.shards if self.stream is None else plan.expert_shards

    def padded(self, plan: MeshPlan) -> int:
        """Elements when every one of them has as many as the first: what FSDP2 sends."""
        ranks = self.shards(plan)
        length = self.shape[dealt_along(self.shape, self.stream, ranks)]
        return -(-length // ranks) * ranks * self.size // length

    def share(self, plan: MeshPlan, shard: int) -> int:
        """Elements that the rank with that place among ``plan.shards`` really holds; the first has the most."""
        ranks = self.shards(plan)
        place, length = shard * ranks // plan.shards, self.shape[dealt_along(self.shape, self.stream, ranks)]
        most = -(-length // ranks)
        return max(0, min(most, length - place * most)) * self.size // length


def block_weights(shape: ModelShape, tp: int, layer: int = 0, ep: int = 1) -> Sequence[Weight]:
    """Of one layer, in the order of the model."""
    return _block(shape, tp, shape.is_sparse(layer), ep)


@lru_cache(maxsize=64)
def _block(shape: ModelShape, tp: int, sparse: bool, ep: int) -> tuple[Weight, ...]:
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    dealt = shape.num_kv_heads % tp == 0  # else several ranks share a head, and each holds all of them
    keys = Weight((key // tp if dealt else key, shape.dim), dealt)
    head_norms = [Weight((width,), False) for width in shape.qk_norm_widths if width]
    return (
        Weight((shape.dim,), False),
        *(Weight((query // tp, shape.dim), True), keys, keys, Weight((shape.dim, query // tp), True), *head_norms),
        Weight((shape.dim,), False),
        *(_experts(shape, tp, ep) if sparse else _swiglu(shape.dim, shape.ffn_dim, tp)),
    )


def block_units(shape: ModelShape, plan: MeshPlan, layer: int) -> list[list[Weight]]:
    """The same as FSDP2's units, of which the second are experts that other ranks share than the rest."""
    block = block_weights(shape, plan.tp, layer, plan.ep)
    experts = [weight for weight in block if weight.stream is not None and plan.ep > 1]
    return [[weight for weight in block if weight not in experts], *([experts] if experts else [])]


def _swiglu(dim: int, width: int, tp: int) -> list[Weight]:
    wide = Weight((width // tp, dim), True)
    return [wide, Weight((dim, width // tp), True), wide]


def _experts(shape: ModelShape, tp: int, ep: int) -> list[Weight]:
    moe, dim = shape.moe, shape.dim
    assert moe is not None
    own, width = moe.num_experts // ep, moe.ffn_dim // tp
    sizes = {"w1": (own, width, dim), "w2": (own, dim, width), "w3": (own, width, dim)}
    return [
        Weight((moe.num_experts, dim), False, router=True),
        *(Weight(size, tp > 1, stream=STREAM[name]) for name, size in sizes.items()),
        *(_swiglu(dim, moe.shared_ffn_dim, tp) if moe.shared_ffn_dim else []),
        *([Weight((1, dim), False, router=True)] if moe.shared_gate else []),
    ]


@lru_cache(maxsize=1024)
def alike(shape: ModelShape, layers: range) -> Sequence[tuple[int, int]]:
    """Of layers that have the same weights the first, and how many they are; one or two kinds."""
    kinds = [[layer for layer in layers if shape.is_sparse(layer) == sparse] for sparse in (False, True)]
    return [(kind[0], len(kind)) for kind in kinds if kind]


def end_weights(shape: ModelShape, tp: int, *, first: bool, last: bool) -> list[Weight]:
    """What a stage has besides blocks: the embedding at the start, the last norm and the head at the end, which is a
    copy of the embedding where the two are tied and the start is another stage's."""
    table = Weight((shape.padded_vocab_size // tp, shape.dim), True)
    tables = int(first) + int(last and not (first and shape.tied_embeddings))
    return [table] * tables + [Weight((shape.dim,), False)] * last
