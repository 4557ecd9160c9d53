"""Decisions of duplicate removal by brute force: for the tests, and for the planted corpora of ``dedup_scale.py``.

Shares no code with what it judges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash


@dataclass(frozen=True, slots=True)
class Doc:
    doc_id: bytes
    source: str
    partition: str
    text: bytes
    """Its hash."""
    url: str | None
    fetched: float | None
    words: int
    signature: Sequence[int] | None
    shingles: Collection[int]
    """Each once."""
    kept: bool = True


def shingle_hash(shingle: bytes) -> int:
    """The 64-bit hash of one shingle: normalised words as UTF-8, one space between them."""
    mixed = 0
    for word in shingle.split(b" "):
        mixed = (mixed * 0x9E3779B97F4A7C15 + xxhash.xxh3_64_intdigest(word)) % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ mixed >> 33) * factor % 2**64
    return mixed ^ mixed >> 33


def minhash_hash(shingle: bytes) -> int:
    """The ``hashfunc`` with which datasketch makes the same signatures: the low 32 bits of :func:`shingle_hash`.

    ``MinHash(num_perm, seed, hashfunc=minhash_hash, scheme="affine32")``, updated with every shingle.
    """
    return shingle_hash(shingle) % 2**32


class BruteForce:
    """Decisions by the words of the contract: plain loops over lists, sets and tuples.

    A document held as arrays costs 2.5 KB; of its pairs and band values only those shared with others are kept.
    """

    def __init__(self, docs: Sequence[Doc], config: Any, priorities: dict[str, int]) -> None:
        self.config = config
        self.order = sorted(
            (doc for doc in docs if doc.kept),
            key=lambda d: (-priorities.get(d.source, 0), -d.words, d.fetched is None, d.fetched or 0, d.doc_id),
        )
        self.rows: dict[bytes, tuple[Any, ...]] = {}
        """doc_id → (kind, duplicate_of, similarity, band)."""
        self._together: dict[bytes, list[bytes]] = {}
        self.num_candidates = self.num_verified = 0
        self.band_sizes: list[int] = []
        if config.exact:
            self._equal("exact", lambda d: d.text, lambda d: 0)
        if config.url:
            latest = config.url_keep == "latest"
            self._equal("url", lambda d: d.url, lambda d: (d.fetched is None, -(d.fetched or 0)) if latest else 0)
        if config.near:
            self._near()
        named = ((min(members), members) for members in {id(m): m for m in self._together.values()}.values())
        self.clusters = {member: name for name, members in named for member in members}

    def _join(self, a: bytes, b: bytes) -> None:
        """Of one cluster from here on, with all that are of theirs."""
        few, many = sorted((self._together.setdefault(a, [a]), self._together.setdefault(b, [b])), key=len)
        if few is not many:
            many += few
            self._together.update(dict.fromkeys(few, many))

    def _scope(self, doc: Doc) -> str:
        return doc.source if self.config.scope == "source" else ""

    def _similarity(self, kind: str, a: Doc, b: Doc) -> float | None:
        if kind == "exact":
            return 1.0
        one, other = set(a.shingles), set(b.shingles)
        return len(one & other) / len(one | other) if self.config.near and one | other else None

    def _equal(self, kind: str, key: Any, first: Any) -> None:
        groups: dict[Any, list[Doc]] = defaultdict(list)
        for doc in self.order:
            if doc.doc_id not in self.rows and key(doc) is not None:
                groups[key(doc), self._scope(doc)].append(doc)
        for group in groups.values():
            kept = min(group, key=first)  # of equals the first, and groups are in survivor order
            for doc in group:
                if doc is not kept:
                    similarity = self._similarity(kind, doc, kept)
                    if kind == "url" and 0 < self.config.url_threshold > (similarity or 0.0):
                        continue
                    self.rows[doc.doc_id] = (kind, kept.doc_id, similarity, None)
                    self._join(doc.doc_id, kept.doc_id)

    def _near(self) -> None:
        rows, most = self.config.rows, self.config.max_band_members
        shared: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        """Rank → the bands whose value it shares, each with the ranks of all who do, in order."""
        for band in range(self.config.bands):
            groups: dict[Any, list[int]] = defaultdict(list)
            for rank, doc in enumerate(self.order):
                if doc.doc_id not in self.rows and doc.signature is not None:
                    groups[tuple(doc.signature[band * rows : (band + 1) * rows]), self._scope(doc)].append(rank)
            for members in groups.values():
                if len(members) > 1:
                    self.band_sizes.append(len(members))
                    for rank in members:
                        shared[rank].append((band, members))
        for high in sorted(shared):
            candidates: dict[int, int] = {}
            """Rank → the first band in which both have one value."""
            for band, members in shared.pop(high):
                for low in members[:most]:
                    if low >= high:
                        break
                    candidates.setdefault(low, band)
            own, best = set(self.order[high].shingles), None
            self.num_candidates += len(candidates)
            for low in sorted(candidates):
                other = self.order[low]
                common = len(own.intersection(other.shingles))
                similarity = common / (len(own) + len(other.shingles) - common)
                if similarity < self.config.threshold:
                    continue
                self.num_verified += 1
                self._join(other.doc_id, self.order[high].doc_id)
                if other.doc_id not in self.rows and (best is None or similarity > best[0]):
                    best = similarity, low
            if best is not None:
                similarity, low = best
                self.rows[self.order[high].doc_id] = ("near", self.order[low].doc_id, similarity, candidates[low])
