"""Plans which links between ranks are measured, and judges them by each other.

Of slow links a node is named where the median of the links of each of its ranks is too low, then a rank of those that
are left, then single pairs between ends that nobody has named: one bad cable accuses one pair, a bad adapter not each
of its partners. Too low is more than :data:`Z` standard deviations below the median of all, of which two must agree:
that of these values, estimated by the median absolute deviation, and the one that sound ones have at least, since the
estimate from a few may be far too small. For the normal distribution one value in 17 million lies so low.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.words import counted

__all__ = ["FEWEST", "LINK_SPREAD", "NORMAL", "below", "medians", "nodes_of", "planned_rounds", "slow_links"]

Z = 5.3  # standard deviations below the median; of the normal distribution 6e-8 lies lower
FEWEST = 4  # below so many values there is no fleet: of two that differ, neither is the slow one
LINK_SPREAD = 0.05  # relative standard deviation of links in order
NORMAL = 1.4826  # standard deviation of the normal distribution over its median absolute deviation
_MEDIAN_OF_MANY = 1.2533  # standard deviation of a median over that of a mean
_LEAST = 0.08 / Z  # however many links a node has, one less than 8 % below the others is not named
_FEWEST_LINKS = 3  # with fewer links of an end, an end and a link cannot be told apart


def medians(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Of each row; they may differ in length, and none is empty."""
    return np.array([statistics.median(row) for row in rows])


def below(values: NDArray[np.float64], spread: float | NDArray[np.float64]) -> tuple[float, NDArray[np.bool_]]:
    """The median of values [N], and which lie too low; ``spread``, of each value or of all, is relative to it."""
    middle = float(np.median(values))
    own = NORMAL * float(np.median(np.abs(values - middle)))
    return middle, values < middle - Z * np.maximum(own, np.asarray(spread) * middle)


def planned_rounds(places: Mapping[int, tuple[str, int]], most: int) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Pairs inside nodes, pairs of nodes (all local ranks at once, each with its like), one ring of all. Of pairs
    ``most`` rounds of each kind, so that as many partners a rank. ``places``: node and local rank of each rank."""
    nodes: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, (node, local_rank) in sorted(places.items()):
        nodes[node][local_rank] = rank
    inside = zip_longest(*(_tournament([*ranks.values()]) for ranks in nodes.values()), fillvalue=[])
    for rounds in islice(inside, most):
        yield "local pair", [(min(pair), max(pair)) for pairs in rounds for pair in pairs]
    between = _tournament([*nodes])
    for number in range(min(most, len(between))):
        pairs = between[number * max(len(between), most) // most]  # spread over all that there are
        rails = [(nodes[a][n], nodes[b][n]) for a, b in pairs for n in sorted(nodes[a].keys() & nodes[b])]
        yield "pair", [(min(rail), max(rail)) for rail in rails]
    if len(places) > 2:
        yield "ring", [tuple(sorted(places))]


def _tournament(players: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
    """Rounds in which everybody meets everybody once (circle method); one of an odd number pauses."""
    turning = [*players, *([None] if len(players) % 2 else [])]
    rounds, half = [], len(turning) // 2
    for _ in range(len(turning) - 1):
        pairs = zip(turning[:half], reversed(turning[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        turning.insert(1, turning.pop())
    return rounds


def nodes_of(ranks: Iterable[int], places: Mapping[int, str]) -> list[str]:
    """The nodes of these ranks, each once, in their order."""
    return list(dict.fromkeys(places[rank] for rank in ranks))


def slow_links(
    kind: str, speeds: dict[tuple[int, ...], float], broken: Mapping[tuple[int, ...], str], places: Mapping[int, str]
) -> Iterator[tuple[str, Sequence[str], str, str]]:
    """What is slow: a code (``slow-links`` of nodes, ``slow-rank``, ``slow-pair``, ``broken-link``), nodes, where, and
    a text; first nodes, then ranks, then pairs, each without the links of those that were named before.

    ``speeds``: bytes a second by pair of ranks. ``kind`` names them in texts. ``broken``: pairs without one, and why.
    ``places``: each rank's node.
    """
    of_node: dict[str, list[int]] = defaultdict(list)
    for rank in sorted({rank for ranks in speeds for rank in ranks}):
        of_node[places[rank]].append(rank)
    for code in ("slow-links", "slow-rank", "slow-pair"):
        if code == "slow-rank" and max(map(len, of_node.values())) == 1:  # a node is a rank
            continue
        best = {ranks: (speed, 1) for ranks, speed in speeds.items() if code == "slow-pair"}
        own: dict[int, list[float]] = defaultdict(list)
        for rank, speed in ((rank, speed) for ranks, speed in speeds.items() for rank in ranks if code != "slow-pair"):
            own[rank].append(speed)
        own = {rank: rows for rank, rows in own.items() if len(rows) >= _FEWEST_LINKS}
        for rank, middle in zip(own, medians([*own.values()]), strict=True):
            end = tuple(of_node[places[rank]]) if code == "slow-links" else (rank,)
            best[end] = max(best.get(end, (0.0, 0)), (middle, len(own[rank])))  # a node is as good as its best rank
        if not best:
            continue
        values, counts = np.array([*best.values()]).T
        spread = LINK_SPREAD * np.where(counts > 1, _MEDIAN_OF_MANY / np.sqrt(counts), 1)
        middle, low = below(values, np.maximum(spread, _LEAST))
        named: set[int] = set()
        for (end, (speed, count)), is_low in zip(best.items(), low, strict=True):
            where = "" if code == "slow-links" else f"rank{'s' * (len(end) > 1)} {' and '.join(map(str, end))}"
            if code == "slow-pair" and end in broken:
                yield "broken-link", nodes_of(end, places), where, broken[end]
            elif is_low and len(best) >= FEWEST:
                named |= set(end)
                text = f"{speed / middle - 1:+.0%} against the median ({counted(count, kind + ' link')})"
                yield code, nodes_of(end, places), where, text
        speeds = {ranks: speed for ranks, speed in speeds.items() if not named & set(ranks)}
