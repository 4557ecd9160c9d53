"""Lists the weights of a model stage, and how much of each one rank holds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from quern.model.config import ModelShape

__all__ = ["Weight", "alike", "block_weights", "end_weights"]


@dataclass(frozen=True)
class Weight:
    """A parameter as one rank of ``tp`` holds it, before FSDP2 deals out its rows."""

    shape: tuple[int, ...]
    split: bool
    """Whether ``tp`` splits it; else every rank of ``tp`` holds it whole."""
    router: bool = False
    """Whether it is a router's or a gate's, which compute in at least float32."""

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    def padded(self, ranks: int) -> int:
        """Elements when every rank of ``dp_shard`` has as many rows as the first: what FSDP2 sends."""
        return -(-self.shape[0] // ranks) * ranks * prod(self.shape[1:])

    def share(self, ranks: int, rank: int) -> int:
        """Elements that a rank of ``dp_shard`` really holds; the first has the most."""
        rows = -(-self.shape[0] // ranks)
        return max(0, min(rows, self.shape[0] - rank * rows)) * prod(self.shape[1:])


def block_weights(shape: ModelShape, tp: int, layer: int = 0) -> list[Weight]:
    """Of one layer, in the order of the model."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    dealt = shape.num_kv_heads % tp == 0  # else several ranks share a head, and each holds all of them
    keys = Weight((key // tp if dealt else key, shape.dim), dealt)
    head_norms = [Weight((width,), False) for width in shape.qk_norm_widths if width]
    return [
        Weight((shape.dim,), False),
        *(Weight((query // tp, shape.dim), True), keys, keys, Weight((shape.dim, query // tp), True), *head_norms),
        Weight((shape.dim,), False),
        *(_experts(shape, tp) if shape.is_sparse(layer) else _swiglu(shape.dim, shape.ffn_dim, tp)),
    ]


def _swiglu(dim: int, width: int, tp: int) -> list[Weight]:
    wide = Weight((width // tp, dim), True)
    return [wide, Weight((dim, width // tp), True), wide]


def _experts(shape: ModelShape, tp: int) -> list[Weight]:
    moe, dim = shape.moe, shape.dim
    assert moe is not None
    width, split = moe.ffn_dim // tp, tp > 1
    wide = Weight((moe.num_experts, width, dim), split)
    return [
        Weight((moe.num_experts, dim), False, router=True),
        *(wide, Weight((moe.num_experts, dim, width), split), wide),
        *(_swiglu(dim, moe.shared_ffn_dim, tp) if moe.shared_ffn_dim else []),
        *([Weight((1, dim), False, router=True)] if moe.shared_gate else []),
    ]


def alike(shape: ModelShape, layers: range) -> list[tuple[int, int]]:
    """Of layers that have the same weights the first, and how many they are; one or two kinds."""
    kinds = [[layer for layer in layers if shape.is_sparse(layer) == sparse] for sparse in (False, True)]
    return [(kind[0], len(kind)) for kind in kinds if kind]


def end_weights(shape: ModelShape, tp: int, *, first: bool, last: bool) -> list[Weight]:
    """What a stage has besides blocks: the embedding at the start, the last norm and the head at the end, which is a
    copy of the embedding where the two are tied and the start is another stage's."""
    table = Weight((shape.padded_vocab_size // tp, shape.dim), True)
    tables = int(first) + int(last and not (first and shape.tied_embeddings))
    return [table] * tables + [Weight((shape.dim,), False)] * last
