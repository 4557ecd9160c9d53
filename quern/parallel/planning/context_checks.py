"""Rejects layouts whose ranks of ``cp`` cannot share a sequence: heads or tokens that do not divide."""

from __future__ import annotations

from math import lcm

from quern.errors import InputError
from quern.model.config import ModelShape
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import choices, divisors

__all__ = ["check_context"]


def check_context(shape: ModelShape, layout: Layout) -> None:
    """Raise :class:`InputError`: the key, what it is and what would fit."""
    cp, method = layout.plan.cp, layout.context.method
    if cp == 1:
        return
    _heads(shape, layout)
    unit = lcm(layout.context.unit, cp * layout.plan.tp)
    if layout.seq_len % unit:
        below, above = layout.seq_len // unit * unit, (layout.seq_len // unit + 1) * unit
        beside = f" beside tp {layout.plan.tp}" if layout.plan.tp > 1 else ""
        raise InputError(
            f"seq_len: expected a multiple of {unit} for cp {cp} with {method}{beside}, got {layout.seq_len}; "
            f"{f'{below} or {above}' if below else above} would fit"
        )


def _heads(shape: ModelShape, layout: Layout) -> None:
    """Each rank of the exchange gets as many, and whole groups of query heads with their key head."""
    tp, ranks = layout.plan.tp, layout.context.heads
    query, key = shape.num_heads // tp, max(shape.num_kv_heads // tp, 1)

    def fits(size: int) -> bool:
        return query % size == 0 and (key % size == 0 or size % key == 0)

    if fits(ranks):
        return
    name = "ulysses" if layout.context.method == "usp" else "cp"
    of = "" if tp == 1 else f" of a rank of tp {tp}"
    others = "allgather or ring" if layout.context.method == "ulysses" else "allgather"
    raise InputError(
        f"parallel.{name}: {ranks} ranks exchange heads; expected a divisor of the {query} query heads{of} that is a "
        f"divisor or a multiple of the {key} key heads: {choices([size for size in divisors(query) if fits(size)])}; "
        f"or cp_method {others}"
    )
