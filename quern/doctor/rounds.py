"""Plans which ranks measure their link at one time: each rank is in one pair of a round at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

__all__ = ["Round", "planned_rounds"]

T = TypeVar("T")

Round = tuple[str, list[tuple[int, ...]]]
"""The kind of a :class:`~quern.doctor.readings.Link`, and the ranks of each."""


def planned_rounds(places: Mapping[int, tuple[str, int]], most: int) -> Iterator[Round]:
    """Pairs inside nodes, pairs of nodes (all local ranks at once, each with its like), rings inside nodes, one ring of
    all. Of pairs ``most`` rounds of each kind, so that as many partners a rank. ``places``: node and local rank of each
    rank."""
    nodes: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, (node, local_rank) in sorted(places.items()):
        nodes[node][local_rank] = rank
    inside = [list(_tournament([*ranks.values()])) for ranks in nodes.values()]
    for number in range(min(most, max((len(rounds) for rounds in inside), default=0))):
        yield "local pair", [pair for rounds in inside if number < len(rounds) for pair in rounds[number]]
    between = list(_tournament([*nodes]))
    for pairs in [between[place * len(between) // most] for place in range(most)] if len(between) > most else between:
        yield (
            "pair",
            [
                _sorted(nodes[a][local], nodes[b][local])
                for a, b in pairs
                for local in sorted(nodes[a].keys() & nodes[b])
            ],
        )
    rings = [tuple(sorted(ranks.values())) for ranks in nodes.values() if len(ranks) > 2]
    if rings and len(nodes) > 1:
        yield "local ring", rings
    if len(places) > 2:
        yield "ring", [tuple(sorted(places))]


def _tournament(players: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Rounds in which everybody meets everybody once (circle method); one of an odd number pauses."""
    turning: list[T | None] = [*players, *([None] if len(players) % 2 else [])]
    for _ in range(len(turning) - 1):
        half = len(turning) // 2
        pairs = zip(turning[:half], reversed(turning[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        turning.insert(1, turning.pop())


def _sorted(a: int, b: int) -> tuple[int, ...]:
    return (min(a, b), max(a, b))
