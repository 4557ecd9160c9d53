"""Decisions of duplicate removal by brute force: for the tests, and for the planted corpora of ``dedup_scale.py``.

Shares no code with what it judges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Doc:
    doc_id: bytes
    source: str
    partition: str
    text: bytes
    """Its hash."""
    url: str | None
    fetched: float | None
    words: int
    signature: tuple[int, ...] | None
    shingles: frozenset[int]
    kept: bool = True


class BruteForce:
    """Decisions by the words of the contract: plain loops over lists, sets and tuples."""

    def __init__(self, docs: Sequence[Doc], config: Any, priorities: dict[str, int]) -> None:
        self.config = config
        self.order = sorted(
            (doc for doc in docs if doc.kept),
            key=lambda d: (-priorities.get(d.source, 0), -d.words, d.fetched is None, d.fetched or 0, d.doc_id),
        )
        self.rows: dict[bytes, tuple[Any, ...]] = {}
        """doc_id → (kind, duplicate_of, similarity, band)."""
        self.edges: list[tuple[bytes, bytes]] = []
        self.num_candidates = self.num_verified = 0
        self.band_sizes: list[int] = []
        if config.exact:
            self._equal("exact", lambda d: d.text, lambda d: 0, 1.0)
        if config.url:
            latest = config.url_keep == "latest"
            self._equal("url", lambda d: d.url, lambda d: (d.fetched is None, -(d.fetched or 0)) if latest else 0, None)
        if config.near:
            self._near()
        self.clusters = self._clusters()

    def _scope(self, doc: Doc) -> str:
        return doc.source if self.config.scope == "source" else ""

    def _equal(self, kind: str, key: Any, first: Any, similarity: float | None) -> None:
        groups: dict[Any, list[Doc]] = defaultdict(list)
        for doc in self.order:
            if doc.doc_id not in self.rows and key(doc) is not None:
                groups[key(doc), self._scope(doc)].append(doc)
        for group in groups.values():
            kept = min(group, key=first)  # of equals the first, and groups are in survivor order
            for doc in group:
                if doc is not kept:
                    self.rows[doc.doc_id] = (kind, kept.doc_id, similarity, None)
                    self.edges.append((doc.doc_id, kept.doc_id))

    def _near(self) -> None:
        rows, most = self.config.rows, self.config.max_band_members
        groups: dict[Any, list[int]] = defaultdict(list)
        for rank, doc in enumerate(self.order):
            if doc.doc_id not in self.rows and doc.signature is not None:
                for band in range(self.config.bands):
                    groups[band, doc.signature[band * rows : (band + 1) * rows], self._scope(doc)].append(rank)
        self.band_sizes = [len(members) for members in groups.values() if len(members) > 1]
        candidates: dict[int, dict[int, int]] = defaultdict(dict)
        for (band, _, _), members in groups.items():
            for place, high in enumerate(members):
                of_high = candidates[high]
                for low in members[: min(place, most)]:
                    of_high[low] = min(band, of_high.get(low, band))
        for high in sorted(candidates):
            own, best = self.order[high].shingles, None
            self.num_candidates += len(candidates[high])
            for low in sorted(candidates[high]):
                other = self.order[low].shingles
                common = len(own & other)
                similarity = common / (len(own) + len(other) - common)
                if similarity < self.config.threshold:
                    continue
                self.num_verified += 1
                self.edges.append((self.order[low].doc_id, self.order[high].doc_id))
                if self.order[low].doc_id not in self.rows and (best is None or similarity > best[0]):
                    best = similarity, low
            if best is not None:
                similarity, low = best
                band = candidates[high][low]
                self.rows[self.order[high].doc_id] = ("near", self.order[low].doc_id, similarity, band)

    def _clusters(self) -> dict[bytes, bytes]:
        beside: dict[bytes, list[bytes]] = defaultdict(list)
        for a, b in self.edges:
            beside[a].append(b)
            beside[b].append(a)
        names: dict[bytes, bytes] = {}
        for start in beside:
            if start not in names:
                reached, todo = {start}, [start]
                while todo:
                    for other in beside[todo.pop()]:
                        if other not in reached:
                            reached.add(other)
                            todo.append(other)
                names |= dict.fromkeys(reached, min(reached))
        return names
