"""Plans which ranks measure their link at one time: each rank is in one pair of a round at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import TypeVar

__all__ = ["Round", "planned_rounds"]

T = TypeVar("T")

Round = tuple[str, list[tuple[int, ...]]]
"""The kind of a :class:`~quern.doctor.readings.Link`, and the ranks of each."""


def planned_rounds(places: Mapping[int, tuple[str, int]], most: int) -> Iterator[Round]:
    """Pairs inside nodes, pairs of nodes (all local ranks at once, each with its like), one ring of all. Of pairs
    ``most`` rounds of each kind, so that as many partners a rank. ``places``: node and local rank of each rank."""
    nodes: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, (node, local_rank) in sorted(places.items()):
        nodes[node][local_rank] = rank
    inside = zip_longest(*(_tournament([*ranks.values()]) for ranks in nodes.values()), fillvalue=[])
    for rounds in islice(inside, most):
        yield "local pair", [pair for pairs in rounds for pair in pairs]
    between = _tournament([*nodes])
    for number in range(min(most, len(between))):
        pairs = between[number * max(len(between), most) // most]  # spread over all that there are
        yield (
            "pair",
            [
                (min(a, b), max(a, b))
                for one, other in pairs
                for a, b in ((nodes[one][n], nodes[other][n]) for n in sorted(nodes[one].keys() & nodes[other]))
            ],
        )
    if len(places) > 2:
        yield "ring", [tuple(sorted(places))]


def _tournament(players: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Rounds in which everybody meets everybody once (circle method); one of an odd number pauses."""
    turning: list[T | None] = [*players, *([None] if len(players) % 2 else [])]
    rounds, half = [], len(turning) // 2
    for _ in range(len(turning) - 1):
        pairs = zip(turning[:half], reversed(turning[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        turning.insert(1, turning.pop())
    return rounds
