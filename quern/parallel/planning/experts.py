"""Counts how tokens travel to experts that other ranks hold (``parallel.ep``). Imports no torch.

A token travels once to each rank that has one of its experts. Which have is known when routers have chosen; planned is
with what is expected where each choice of experts is as likely as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import comb

from quern.model.float8.recipe import BLOCK
from quern.model.moe.config import MoEShape
from quern.parallel.planning.step import Step, Transfer

__all__ = ["Rows", "exchange", "exchange_stages", "expected_rows", "expert_rows", "kept_bytes", "ranks_of_a_token"]


@dataclass(frozen=True)
class Rows:
    """Of one rank, in one layer and one stage of the exchange, in the forward passes of a step."""

    leaving: int
    """Those that stay are among them."""
    away: int
    """Of these, to other ranks."""
    arriving: int
    from_others: int


def exchange_stages(step: Step) -> list[tuple[str, int]]:
    """In which tokens travel, each with its axis and how many ranks there are; none where each rank has all experts."""
    ep, node = step.plan.ep, step.layout.ep_node
    stages = [("ep", ep)] if node is None else [("ep nodes", ep // node), ("ep in a node", node)]
    return [] if ep == 1 else stages


def ranks_of_a_token(moe: MoEShape, ranks: int) -> Fraction:
    """How many of so many ranks, or nodes, with equal parts of the experts have one of a token's, expected."""
    held, inside = moe.num_experts // ranks, moe.top_groups * moe.group_size
    total = Fraction(0)
    of_ranks = Counter(
        tuple(Counter(expert // moe.group_size for expert in range(rank * held, (rank + 1) * held)).values())
        for rank in range(ranks)
    )
    for parts, number in of_ranks.items():
        missed = sum(
            ways * comb(inside - within, moe.top_k) for within, ways in _ways(parts, moe.groups, moe.top_groups).items()
        )
        total += number * (1 - Fraction(missed, comb(moe.groups, moe.top_groups) * comb(inside, moe.top_k)))
    return total


@cache
def _ways(parts: tuple[int, ...], groups: int, chosen: int) -> dict[int, int]:
    """In how many ways groups can be chosen, by how many experts of a rank are then in them; ``parts``: how many it has
    in each group where it has any."""
    by: Counter[tuple[int, int]] = Counter({(0, 0): 1})  # groups chosen of those seen, experts in them
    for part in parts:
        by.update({(number + 1, within + part): ways for (number, within), ways in by.copy().items()})
    found: Counter[int] = Counter()
    for (number, within), ways in by.items():
        if number <= chosen:
            found[within] += ways * comb(groups - len(parts), chosen - number)
    return found


def expected_rows(step: Step) -> tuple[Rows, ...]:
    """By stage of the exchange, of any layer; exact with a capacity, whose places travel filled or not."""
    moe, stages = step.shape.moe, exchange_stages(step)
    if moe is None or not stages:
        return ()
    found, parts = [], 1
    for _, ranks in stages:
        parts *= ranks
        leaving = step.tokens * ranks_of_a_token(moe, parts)
        if moe.limit is not None:
            leaving = Fraction(moe.num_experts * -(-step.tokens * moe.limit[0] // moe.limit[1]))
        leaving *= step.num_micro_batches
        away = round(leaving * (ranks - 1) / ranks)
        found.append(Rows(round(leaving), away, round(leaving), away))
    return tuple(found)


def kept_bytes(step: Step) -> dict[str, int]:
    """That products of experts keep of a layer and micro-batch for backward, where it is not recomputed: ``expected``,
    and at ``most``, where all tokens of all ranks want those of one. Of the rows that travel nothing is kept."""
    assert step.shape.moe is not None
    # what goes into the first two products and comes of the last; gate, its SiLU, the other, and their product
    of_one = (2 * step.shape.dim + 4 * step.shape.moe.ffn_dim // step.plan.tp) * step.compute_bytes
    return {name: rows * of_one for name, rows in expert_rows(step).items()}


def expert_rows(step: Step) -> dict[str, int]:
    """Rows of a layer and micro-batch that a rank's experts multiply, likewise."""
    moe, ep = step.shape.moe, step.plan.ep
    assert moe is not None
    even, most = step.tokens * moe.top_k, step.tokens * ep * min(moe.top_k, moe.num_experts // ep)
    if moe.limit is not None:
        even = most = moe.num_experts * -(-step.tokens * moe.limit[0] // moe.limit[1])
    return {"expected": even, "most": most}


def exchange(
    step: Step, parts: Sequence[range], rows: Mapping[int, Sequence[Rows]] | None = None
) -> Iterator[Transfer]:
    """Of a rank with these stretches of layers; ``rows``: of each layer, by stage of the exchange; None = expected.

    Tokens go out and what experts gave comes back; a backward sends gradients of the latter out, and those of the
    former back. Numbers and weights of experts go with the tokens, and gradients of both come back. Checkpointing
    repeats the forward: nothing of the exchange is kept. With ``ep_float8`` tokens go out in a byte a value, in blocks
    that each have a scale; gradients do not.
    """
    moe = step.shape.moe
    assert moe is not None or step.plan.ep == 1
    usual = expected_rows(step)
    width, wide, number = step.shape.dim * step.compute_bytes, max(step.compute_bytes, 4), step.num_micro_batches
    blocks = -(-step.shape.dim // BLOCK)
    there = blocks * (BLOCK + wide) if step.layout.ep_float8 else width  # bytes of a token: values, scales
    for place, (axis, ranks) in enumerate(exchange_stages(step)):
        assert moe is not None
        of_choices = 2 * moe.top_k * wide
        forwards = both = 0
        out, back, told = ([0, 0] for _ in range(3))  # bytes, and those of them to other ranks
        for layers in parts:
            again = layers[: step.layout.recomputed(len(layers))]
            for layer in filter(moe.is_sparse, layers):
                own, forward = (usual if rows is None else rows[layer])[place], 1 + (layer in again)
                forwards, both = forwards + forward * number, both + (forward + 1) * number
                for of, (leaving, arriving) in enumerate(((own.leaving, own.arriving), (own.away, own.from_others))):
                    out[of] += (forward * there + width) * leaving
                    back[of] += (forward + 1) * width * arriving
                    told[of] += (forward * leaving + arriving) * of_choices
        yield Transfer(axis, "tokens to experts", "all_to_all", ranks, both, *out)
        yield Transfer(axis, "tokens back", "all_to_all", ranks, both, *back)
        if moe.limit is None:  # of the counts two int64 to each, for which the host waits
            yield Transfer(axis, "choices of tokens", "all_to_all", ranks, both, *told)
            yield Transfer(axis, "counts of rows", "all_to_all", ranks, forwards, forwards * ranks * 16)
