"""A small data run of one source, with verdicts and clusters, whose rows are known."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quern.data_pipeline.page.document import verdict_schema
from quern.tokenize.selection.chosen import Chosen
from quern.tokenize.selection.where import choose
from quern.tokenize.shards import ShardReader
from support.train.corpora import Doc, write_run

STREAM = "r1/web/1"
Row = dict[str, Any]


@dataclass(frozen=True)
class Site:
    run: Path
    path: str
    rows: list[Row]
    """In the order of the stream, with ``tokens``, ``start`` and ``cluster_size``."""

    def choose(self, where: str, folder: Path) -> Chosen:
        return choose(ShardReader(self.path), STREAM, where, str(folder))

    def spans(self, fulfils: Callable[[Row], object]) -> list[int]:
        """The tokens of the source that are of documents that fulfil it."""
        return [at for row in self.rows if fulfils(row) for at in range(row["start"], row["start"] + row["tokens"])]


def write_site(folder: Path, held_out: tuple[int, ...] = ()) -> Site:
    """``held_out``: tokens of each held-out document; they have no language."""
    draw = random.Random(5)
    shards = [[Doc(tuple(draw.choices(range(250), k=draw.randint(1, 12)))) for _ in range(count)]
              for count in (30, 1, 40)]  # fmt: skip
    val = {"web.val": [[Doc((7,) * length) for length in held_out]]} if held_out else {}
    path = write_run(folder / "run", {"web": shards, **val})[0]
    rows, start = [], 0
    for number, shard in enumerate(shards):
        for index, doc in enumerate(shard):
            rows.append({
                "doc_id": hashlib.md5(f"web.{number}.{index}".encode()).digest(), "source": "web",
                "source_file": f"file {number}", "record_offset": index, "host": draw.choice(["a.org", "b.org", None]),
                "language": draw.choice(["de", "en", None]), "language_score": draw.choice([0.2, 0.7, 0.95, None]),
                "failed_rules": [], "words": float(draw.randint(1, 50)), "stage": None,
                "start": start, "tokens": len(doc.tokens), "cluster_size": 1,
            })  # fmt: skip
            start += len(doc.tokens)
    verdicts = folder / "run" / "verdicts" / "web"
    verdicts.mkdir(parents=True)
    (folder / "run" / "duplicates").mkdir()
    shuffled = draw.sample(rows, len(rows))
    dropped = [dict.fromkeys(rows[0]) | {"doc_id": bytes([n]) * 16, "source": "web", "source_file": "file 9",
               "stage": "quality", "failed_rules": ["words"], "language": "de", "language_score": 0.99}
               for n in range(5)]  # fmt: skip
    half = len(rows) // 2
    for name, part in (("one", [*shuffled[:half], *dropped]), ("two", shuffled[half:])):
        schema = verdict_schema(["words"] if name == "one" else [])  # a column that not every file has
        pq.write_table(pa.Table.from_pylist(part, schema), verdicts / f"{name}.parquet")
    if held_out:
        told = [{"doc_id": hashlib.md5(f"web.val.0.{n}".encode()).digest(), "source": "web", "source_file": "v",
                 "failed_rules": []} for n in range(len(held_out))]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(told, verdict_schema([])), verdicts / "three.parquet")
    clusters = [(rows[3], b"A"), (rows[4], b"B"), (rows[9], b"B"), (rows[8], b"A"), (rows[20], b"A")]
    sizes = {b"A": 3 + 2, b"B": 2}
    for row, cluster in clusters:
        row["cluster_size"] = sizes[cluster]
    members = [{"doc_id": row["doc_id"], "cluster_id": cluster * 16} for row, cluster in clusters]
    members += [{"doc_id": bytes([n]) * 16, "cluster_id": b"A" * 16} for n in (1, 2)]  # removed as duplicates
    schema = pa.schema([("doc_id", pa.binary(16)), ("cluster_id", pa.binary(16))])
    pq.write_table(pa.Table.from_pylist(members, schema), folder / "run" / "duplicates" / "clusters.parquet")
    for row in shuffled[half:]:
        row["words"] = None
    return Site(folder / "run", path, rows)
