"""Random runs for duplicate removal, given as shingle sets and signatures, and their decisions by brute force.

Signatures are made up: what a run's documents share is planted band by band, and says nothing of their shingles. So
proposals and similarities are independent, and every combination of them occurs.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quern.data_pipeline.dedup import DuplicatesConfig
from quern.data_pipeline.document import SIGNATURE_SCHEMA, verdict_schema

NUM_PERM, BANDS, ROWS = 12, 5, 2


@dataclass(frozen=True)
class Doc:
    doc_id: bytes
    source: str
    partition: str
    text: bytes
    """Its hash."""
    url: str | None
    fetched: int | None
    words: int
    signature: tuple[int, ...] | None
    shingles: frozenset[int]
    kept: bool = True


def config(rng: random.Random) -> DuplicatesConfig:
    return DuplicatesConfig(
        exact=rng.random() < 0.9,
        url=rng.random() < 0.9,
        near=rng.random() < 0.95,
        num_perm=NUM_PERM,
        bands=BANDS,
        rows=ROWS,
        threshold=rng.choice([0.3, 0.5, 0.8, 1.0]),
        scope=rng.choice(["run", "run", "source"]),
        url_keep=rng.choice(["best", "latest"]),
        max_band_members=rng.choice([1, 2, 5, 32]),
    )


def corpus(rng: random.Random, num_docs: int) -> list[Doc]:
    """Cliques, chains, stars, a band that a tenth share, copies, shared URLs, short texts and dropped pages, mixed."""
    docs: list[Doc] = []
    shared = [tuple(rng.getrandbits(32) for _ in range(ROWS)) for _ in range(3)]

    def signature() -> list[int]:
        return [rng.getrandbits(32) for _ in range(NUM_PERM)]

    def add(shingles: set[int], values: list[int] | None, **given: Any) -> None:
        if values is not None and rng.random() < 0.1:
            band = rng.randrange(BANDS)
            values = [*values]
            values[band * ROWS : (band + 1) * ROWS] = shared[min(band, 2)]
        made = Doc(
            rng.randbytes(16),
            rng.choice("abc"),
            rng.choice("pqr"),
            rng.randbytes(16),
            rng.choice([None, f"u{rng.randrange(num_docs)}"]),
            rng.choice([None, -5, 0, rng.randrange(9)]),
            rng.choice([30, 30, 31, rng.randrange(40)]),
            tuple(values) if values else None,
            frozenset(shingles),
            rng.random() > 0.03,
        )
        docs.append(replace(made, **given))

    while len(docs) < num_docs:
        kind = rng.choice(["alone", "clique", "chain", "star", "copies", "short", "loose"])
        pool = [rng.getrandbits(64) for _ in range(40)]
        size = rng.choice([2, 2, 3, 5, 9, rng.randrange(2, 60)])
        if kind == "alone":
            add(set(pool[: rng.randrange(1, 40)]), signature())
        elif kind == "clique":
            values = signature()
            for _ in range(size):
                add(set(rng.sample(pool, 40 - rng.randrange(6))), values)
        elif kind == "chain":
            values = signature()
            window = [rng.getrandbits(64) for _ in range(20 + 2 * size)]
            for step in range(size):
                values = [*values]
                band = rng.randrange(BANDS)
                values[band * ROWS : (band + 1) * ROWS] = [rng.getrandbits(32) for _ in range(ROWS)]
                add(set(window[2 * step : 2 * step + 20]), values)
        elif kind == "star":
            values = signature()
            for _ in range(size):
                own = signature()
                band = rng.randrange(BANDS)
                own[band * ROWS : (band + 1) * ROWS] = values[band * ROWS : (band + 1) * ROWS]
                add({*pool[:30], *(rng.getrandbits(64) for _ in range(rng.randrange(4)))}, own)
            add(set(pool[:30]), values, words=rng.choice([0, 50]))
        elif kind == "copies":
            values, text, url = signature(), rng.randbytes(16), f"u{rng.randrange(num_docs)}"
            for _ in range(size):
                add(set(pool[:30]), values, text=text, url=rng.choice([None, url]))
        elif kind == "short":
            text = rng.randbytes(16)
            for _ in range(rng.randrange(1, 4)):
                add(set(), None, text=text, words=3)
        else:
            values = signature()
            for _ in range(size):
                add(set(rng.sample(pool, rng.randrange(5, 40))), values)
    rng.shuffle(docs)
    return docs[:num_docs]


def write(folder: Path, docs: Sequence[Doc], *, shuffled: bool = False) -> list[tuple[str, str]]:
    """The verdicts and signatures of ``docs``; returns (source, partition)."""
    partitions: dict[tuple[str, str], list[Doc]] = defaultdict(list)
    for doc in docs:
        partitions[doc.source, doc.partition].append(doc)
    schema = verdict_schema(["text.num_words"])
    for (source, name), members in partitions.items():
        verdicts = [
            {
                "doc_id": doc.doc_id,
                "source": source,
                "source_file": "f",
                "canonical_url": doc.url,
                "fetched_at": None if doc.fetched is None else doc.fetched * 10**6,
                "post_filter_hash": doc.text,
                "stage": None if doc.kept else "quality",
                "text.num_words": float(doc.words),
            }
            for doc in members
        ]
        rows = [
            {
                "doc_id": doc.doc_id,
                "signature": doc.signature,
                "shingles": None if doc.signature is None else sorted(doc.shingles),
            }
            for doc in members
            if doc.kept
        ]
        if shuffled:
            random.Random(name).shuffle(rows)
        for kind, table in (
            ("verdicts", pa.Table.from_pylist(verdicts, schema)),
            ("signatures", pa.Table.from_pylist(rows, SIGNATURE_SCHEMA)),
        ):
            path = folder / kind / source / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path, row_group_size=100)
    return list(partitions)


def tables(folder: Path) -> tuple[bytes, bytes]:
    """The bytes of both tables of decisions."""
    first, second = ((folder / "duplicates" / f"{name}.parquet").read_bytes() for name in ("decisions", "clusters"))
    return first, second


class BruteForce:
    """Decisions by the words of the contract: plain loops over lists, sets and tuples."""

    def __init__(self, docs: Sequence[Doc], config: DuplicatesConfig, priorities: dict[str, int]) -> None:
        self.config = config
        self.order = sorted(
            (doc for doc in docs if doc.kept),
            key=lambda d: (-priorities.get(d.source, 0), -d.words, d.fetched is None, d.fetched or 0, d.doc_id),
        )
        self.rows: dict[bytes, tuple[Any, ...]] = {}
        """doc_id → (kind, duplicate_of, similarity, band)."""
        self.edges: list[tuple[bytes, bytes]] = []
        self.candidates: dict[tuple[int, int], int] = {}
        self.verified: dict[tuple[int, int], float] = {}
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
        for (band, _, _), members in groups.items():
            for place, high in enumerate(members):
                for low in members[: min(place, most)]:
                    self.candidates[low, high] = min(band, self.candidates.get((low, high), band))
        below: dict[int, list[int]] = defaultdict(list)
        for low, high in self.candidates:
            a, b = self.order[low].shingles, self.order[high].shingles
            similarity = len(a & b) / len(a | b)
            if similarity >= self.config.threshold:
                self.verified[low, high] = similarity
                self.edges.append((self.order[low].doc_id, self.order[high].doc_id))
                below[high].append(low)
        for high in sorted(below):
            to_kept = [(-self.verified[k, high], k) for k in below[high] if self.order[k].doc_id not in self.rows]
            if to_kept:
                similarity, low = min(to_kept)
                band = self.candidates[low, high]
                self.rows[self.order[high].doc_id] = ("near", self.order[low].doc_id, -similarity, band)

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


def planted() -> Any:
    """The module that plants the benchmark's corpora."""
    name = "dedup_corpus"
    if name not in sys.modules:
        path = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
