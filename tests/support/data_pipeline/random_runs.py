"""Random runs for duplicate removal, given as shingle sets and signatures; ``dedup_oracle`` decides them.

Signatures are made up: what a run's documents share is planted band by band, and says nothing of their shingles. So
proposals and similarities are independent, and every combination of them occurs.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from dedup_oracle import Doc

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.page.document import SIGNATURE_SCHEMA, verdict_schema

NUM_PERM, BANDS, ROWS = 12, 5, 2


def config(rng: random.Random) -> DuplicatesConfig:
    apart = random.Random(repr(rng.getstate()))  # what is drawn here changes nothing that the callers draw
    exact, url, near = rng.random() < 0.9, rng.random() < 0.9, rng.random() < 0.95
    return DuplicatesConfig(
        exact=exact,
        url=url,
        near=near,
        url_threshold=apart.choice([0.0, 0.0, 0.2, 0.9]) if url and near else 0.0,
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
