"""Deals experts out so that ranks of ``ep`` have even loads. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from quern.model.moe.config import MoEShape

__all__ = ["placing"]


def placing(counts: Sequence[int], moe: MoEShape, ep: int) -> list[int]:
    """For each place in turn the number of the expert that goes there, by the tokens that each was given: the one with
    the most first, to the rank that has the least so far and a place left (longest processing time first, Graham 1969).

    Experts stay in their group where a token's are taken from some groups only. All stay where they are if the greatest
    load of a rank would fall by less than a fiftieth.
    """
    each, order = moe.num_experts // ep, list(range(moe.num_experts))
    load = [0] * ep
    size = moe.group_size if moe.top_groups < moe.groups else moe.num_experts
    for first in range(0, moe.num_experts, size):
        places: dict[int, list[int]] = {}
        for place in range(first, first + size):
            places.setdefault(place // each, []).append(place)
        room = {rank: len(own) for rank, own in places.items()}
        given: dict[int, list[int]] = {rank: [] for rank in places}
        for expert in sorted(range(first, first + size), key=lambda expert: -counts[expert]):
            rank = min((rank for rank in room if room[rank]), key=load.__getitem__)
            given[rank].append(expert)
            load[rank] += counts[expert]
            room[rank] -= 1
        for rank, own in places.items():
            for place, expert in zip(own, sorted(given[rank]), strict=True):
                order[place] = expert
    before = max(sum(counts[rank * each : (rank + 1) * each]) for rank in range(ep))
    return order if 50 * max(load) <= 49 * before else list(range(moe.num_experts))
