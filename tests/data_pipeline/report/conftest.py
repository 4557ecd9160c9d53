"""A small made-up run directory, as a finished data run leaves it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.execution.commits import publish_commit
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, HASH, make_doc_id, verdict_schema
from quern.data_pipeline.report import stats as report

MEASURES = ("gopher.num_words", "gopher.mean_word_length", "repetition.dup_line_frac", "pii.emails")
ROAD = [
    (None, None),
    ("url", "url.blocked_host"),
    ("language", "language.pre_skip"),
    ("extract", "extract.empty"),
    ("language", "language.not_wanted"),
    ("quality", "gopher.short_doc"),
    ("quality", "repetition.dup_line_frac"),
    ("toxicity", "toxicity.lexicon"),
]
SHARES = [34, 2, 36, 3, 6, 11, 7, 1]
STOCK = "the miller sets a stone upon another and the grain between them opens slowly so that flour may run warm"
WORDS = STOCK.split(" ")
DECISIONS = pa.schema(
    {"doc_id": HASH, "kind": pa.string(), "duplicate_of": HASH, "cluster_id": HASH}
    | {"similarity": pa.float64(), "band": pa.int16()}
)


def prose(rng: random.Random, num_words: int) -> str:
    sentences, left = [], num_words
    while left > 0:
        words = rng.choices(WORDS, k=min(left, rng.randint(5, 14)))
        left -= len(words)
        sentences.append(" ".join(words).capitalize() + ".")
    return "\n".join(" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5))


@dataclass
class Made:
    """A run directory and what its builder knows about it."""

    path: Path
    duplicates: dict[str, Any]
    tokens: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def stats(self) -> dict[str, Any]:
        return report.build_stats(str(self.path), self.duplicates, self.tokens)


def make_run(
    path: Path, *, pages: int = 60, partitions: tuple[str, ...] = ("part-0", "part-1"), seed: int = 0, **first: str
) -> Made:
    """``pages`` a partition in sources ``crawl`` and ``wet``; ``first`` overrides text, url, host of the first page."""
    rng = random.Random(seed)
    parts = [(source, name) for source in ("crawl", "wet") for name in partitions]
    rows = [_row(rng, source, name, position) for source, name in parts for position in range(pages)]
    if first:
        rows[0].update({"stage": None, "reason": None, "failed_rules": [], "text": "short", **first})
    kept = [row for row in rows if row["stage"] is None]
    decisions = []
    for start in range(1, len(kept) - 9, 9):  # clusters of 2, 3, 4 and now and then 9 documents, the first one stays
        size = (2, 2, 3, 2, 4, 2, 9)[start % 7]
        for other in kept[start + 1 : start + size]:
            decisions.append(_plant(rng, kept[start], other, min(row["doc_id"] for row in kept[start : start + size])))
    members = {row[key]: row["cluster_id"] for row in decisions for key in ("doc_id", "duplicate_of")}
    for source, name in parts:
        _write_partition(path, source, name, [row for row in rows if (row["source"], row["part"]) == (source, name)])
    folder = path / "duplicates"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(decisions, DECISIONS), folder / "decisions.parquet")
    ids = [pa.array(column, HASH) for column in (list(members), list(members.values()))]
    pq.write_table(pa.table(ids, names=["doc_id", "cluster_id"]), folder / "clusters.parquet")
    source_of = {row["doc_id"]: row["source"] for row in rows}
    removed: dict[str, Counter[str]] = {"crawl": Counter(), "wet": Counter()}
    for row in decisions:
        removed[source_of[row["doc_id"]]][row["kind"]] += 1
    documents = Counter(row["source"] for row in kept)
    unique = {source: documents[source] - removed[source].total() for source in removed}
    tokens = {
        source: {
            "train": {"documents": num - num // 9, "tokens": 120 * num, "shards": 1},
            "val": {"documents": num // 9, "tokens": 14 * num, "shards": 1},
        }
        for source, num in unique.items()
    }
    run = {"id": "f00d", "config": {"run_dir": str(path), "duplicates": {"threshold": 0.8, "bands": 16, "rows": 8}}}
    (path / "run.json").write_text(json.dumps({**run, "config_hash": "beef", "versions": {"quern": "0.1.0"}}))
    duplicates = {
        "documents": dict(documents),
        "removed": {source: dict(kinds) for source, kinds in removed.items()},
        "alarms": ["source wet lost 61 % of its documents as duplicates"],
        "notes": [],
        "recall": [(s / 20, 1 - (1 - (s / 20) ** 8) ** 16) for s in range(21)],
        "candidate_pairs": 2 * len(decisions),
        "verified_pairs": len(decisions),
    }
    return Made(path, duplicates, tokens, rows)


def _plant(rng: random.Random, first: dict[str, Any], other: dict[str, Any], cluster_id: bytes) -> dict[str, Any]:
    """Make ``other`` a duplicate of ``first``: the decision's row."""
    kind = rng.choice(["near", "near", "exact", "url"])
    words = first["text"].split(" ")
    if kind == "near":
        words[len(words) // 2] = "millstone"
        words.append("Anew.")
    other["text"] = " ".join(words)
    near = {"similarity": 0.8 + rng.random() / 5, "band": rng.randrange(16)} if kind == "near" else {}
    ids = {"doc_id": other["doc_id"], "duplicate_of": first["doc_id"], "cluster_id": cluster_id}
    return {"kind": kind, **ids, **near}


def _row(rng: random.Random, source: str, name: str, position: int) -> dict[str, Any]:
    stage, reason = rng.choices(ROAD, SHARES)[0]
    words = max(3, int(rng.lognormvariate(3.2 if stage == "quality" else 5.3, 0.8)))
    text = prose(rng, words) if stage in (None, "quality", "toxicity") else None
    host = f"{rng.choice(WORDS)}-{rng.choice(WORDS[:6])}.example"
    return {
        "doc_id": make_doc_id(source, name, position), "source": source, "part": name, "url": f"https://{host}/{position}?a=1&b=2",
        "host": host, "source_file": f"/data/{name}.warc.gz", "record_offset": position * 4096, "text": text,
        "language": None if stage == "url" else "en" if reason != "language.not_wanted" else rng.choice(["de", "pl"]),
        "language_score": None if stage == "url" else 0.9, "stage": stage, "reason": reason,
        "failed_rules": [reason, "c4.few_sentences"] if stage == "quality" else [reason] if reason else [],
        **({m: rng.random() for m in MEASURES} if text is not None else {}),
    }  # fmt: skip


def _write_partition(path: Path, source: str, name: str, rows: list[dict[str, Any]]) -> None:
    verdicts, documents = (path / kind / source for kind in ("verdicts", "documents"))
    for folder in (verdicts, documents):
        folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, verdict_schema(MEASURES)), verdicts / f"{name}.parquet", row_group_size=7)
    texts = [
        {"doc_id": row["doc_id"], "text": row["text"], "kept": row["stage"] is None}
        for row in rows
        if row["text"] is not None
    ]
    pq.write_table(pa.Table.from_pylist(texts, DOCUMENT_SCHEMA), documents / f"{name}.parquet", row_group_size=5)
    dropped = [(row["stage"], row["reason"]) for row in rows if row["stage"]]
    kept = [row["text"] for row in rows if row["stage"] is None]
    counts = {
        "pages": len(rows), "kept": len(kept), "by_stage": dict(Counter(stage for stage, _ in dropped)),
        "by_reason": dict(Counter(f"{stage}:{reason}" for stage, reason in dropped)),
        "by_language": dict(Counter(row["language"] for row in rows if row["language"])),
        "other_records": {"request": len(rows), "warcinfo": 1}, "text_chars": sum(map(len, kept)),
        "text_bytes_kept": sum(len(text.encode()) for text in kept),
        "pre_skip": sum(reason == "language.pre_skip" for _, reason in dropped),
        "stage_seconds": {"extract": 0.5, "quality": 0.25}, "cpu_seconds": 1.25,
        "damage": [{"file": f"{name}.warc.gz", "offset": 17, "why": "gzip member is damaged"}],
    }  # fmt: skip
    publish_commit(str(path), "pages", source, name, inputs={}, config="c", outputs={}, counts=counts)


@pytest.fixture(scope="session")
def make() -> Callable[..., Made]:
    """The builder, for runs of another size or with another first page."""
    return make_run


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_run(tmp_path / "run")
