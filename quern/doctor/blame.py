"""Finds out of slow links which node, rank or pair is to blame.

A node is named where the median of the links of each of its ranks is too low, then a rank of those that are left, then
single pairs between ends that nobody has named: one bad cable accuses one pair, a bad adapter not each of its partners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from statistics import median

import numpy as np

from quern.doctor.readings import Link
from quern.doctor.robust import FEWEST, Z, below, medians

__all__ = ["LINK_SPREAD", "blame"]

LINK_SPREAD = 0.05
"""Relative standard deviation of links in order, at least."""

_MEDIAN_OF_MANY = 1.2533
"""Standard deviation of a median over that of a mean."""
_LEAST = 0.08 / Z
"""However many links a node has, one less than 8 % below the others is not named."""
_FEWEST_LINKS = 3
"""With fewer links of an end, an end and a link cannot be told apart."""

Blamed = tuple[str, list[str], str, str]
"""Code, nodes, where, text."""


def blame(links: Iterable[Link], places: Mapping[int, str]) -> Iterator[Blamed]:
    """Who is to blame for slow and broken links. ``places``: the node of each rank. A link that could not be measured
    counts as one without speed."""
    by_kind: dict[str, dict[tuple[int, ...], Link]] = defaultdict(dict)
    for link in links:
        known = by_kind[link.kind].get(tuple(link.ranks))
        if set(link.ranks) <= places.keys() and (known is None or link.problem):  # both ends tell; one may have failed
            by_kind[link.kind][tuple(link.ranks)] = link
    for kind, found in by_kind.items():
        if "ring" in kind:
            yield from _rings(kind, found, places)
        else:
            yield from _pairs(kind, found, places)


def _pairs(kind: str, found: Mapping[tuple[int, ...], Link], places: Mapping[int, str]) -> Iterator[Blamed]:
    values = medians([[] if link.problem else link.speeds for link in found.values()])
    speeds = dict(zip(found, values.tolist(), strict=True))
    if len(speeds) > 1 and not any(speeds.values()):
        nodes = list(dict.fromkeys(places[rank] for ranks in speeds for rank in ranks))
        why = next(iter(found.values())).problem or "no answer"
        yield "broken-link", nodes, f"all {len(speeds)} links ({kind})", why
        return
    named: set[int] = set()
    several = len({places[rank] for ranks in speeds for rank in ranks}) < len({r for ranks in speeds for r in ranks})
    for code, of in (("slow-links", places), ("slow-rank", {rank: f"rank {rank}" for rank in places})):
        if code == "slow-rank" and not several:
            continue
        for end, ratio, count in _slow_ends(speeds, of, named):
            here = [rank for rank in places if of[rank] == end]
            named |= set(here)
            node = places[here[0]]
            text = f"the median of {count} links ({kind}) is {ratio - 1:+.0%} against the fleet's"
            yield code, [node], "" if end == node else end, text
    left = {ranks: speed for ranks, speed in speeds.items() if not named & set(ranks)}
    if not left:
        return
    values = np.array([*left.values()])
    middle, low = below(values, LINK_SPREAD)
    for ranks, value, is_low in zip(left, values, low, strict=True):
        nodes = list(dict.fromkeys(places[rank] for rank in ranks))
        where = f"ranks {' and '.join(map(str, ranks))}"
        if value == 0:
            yield "broken-link", nodes, where, found[ranks].problem or "no answer"
        elif is_low and len(left) >= FEWEST:
            text = f"{value / middle - 1:+.0%} against the median of {len(left)} links ({kind})"
            yield "slow-pair", nodes, where, text


def _slow_ends(
    speeds: Mapping[tuple[int, ...], float], of: Mapping[int, str], named: Collection[int]
) -> list[tuple[str, float, int]]:
    """Ends, nodes or ranks, that are slow: the median of their links over the fleet's, and how many these are."""
    of_ranks: dict[int, list[float]] = defaultdict(list)
    for ranks, speed in speeds.items():
        if not set(ranks) & set(named):
            for rank in ranks:
                of_ranks[rank].append(speed)
    ends: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for rank, own in of_ranks.items():
        if len(own) >= _FEWEST_LINKS:
            ends[of[rank]].append((median(own), len(own)))
    if len(ends) < FEWEST:
        return []
    values, counts = np.array([max(ranks) for ranks in ends.values()]).T  # a node is as good as its best rank
    spread = np.maximum(LINK_SPREAD * _MEDIAN_OF_MANY / np.sqrt(counts), _LEAST)
    middle, low = below(values, spread)
    return [
        (end, value / middle, int(count))
        for end, value, count, is_low in zip(ends, values, counts, low, strict=True)
        if is_low and middle
    ]


def _rings(kind: str, found: Mapping[tuple[int, ...], Link], places: Mapping[int, str]) -> Iterator[Blamed]:
    """A ring that does not close is broken; rings inside nodes are compared with each other."""
    for ranks, link in found.items():
        if link.problem:
            yield "broken-link", list(dict.fromkeys(places[rank] for rank in ranks)), kind, link.problem
    whole = {ranks: median(link.speeds) for ranks, link in found.items() if link.speeds and not link.problem}
    if kind != "local ring" or len(whole) < FEWEST:
        return
    values = np.array([*whole.values()])
    middle, low = below(values, LINK_SPREAD)
    for ranks, value, is_low in zip(whole, values, low, strict=True):
        if is_low:
            text = f"all-reduce inside the node {value / middle - 1:+.0%} against the other nodes'"
            yield "slow-links", [places[ranks[0]]], "", text
