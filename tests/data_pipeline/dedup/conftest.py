"""Small runs as the pages phase leaves them, and plain versions of what duplicate removal computes."""

from __future__ import annotations

import datetime as dt
import os
import random
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.passes.run import DuplicatesReport, run
from quern.data_pipeline.dedup.signature import Signature
from quern.data_pipeline.page.document import SIGNATURE_SCHEMA, Page, content_hash, verdict_schema

MEASURES = Signature(DuplicatesConfig()).measures


@dataclass
class Doc:
    """A page as the chain leaves it."""

    text: str
    source: str = "web"
    partition: str = "p0"
    url: str | None = None
    fetched: int | None = None
    """Seconds since 1970."""
    position: int = 0
    stage: str | None = None

    @property
    def doc_id(self) -> bytes:
        return self.page().doc_id

    def page(self) -> Page:
        page = Page(source=self.source, source_file="f", relative_path="f", position=self.position, text=self.text)
        page.canonical_url = self.url
        if self.fetched is not None:
            page.fetched_at = dt.datetime.fromtimestamp(self.fetched, dt.UTC)
        return page


class Shuffled:
    """An engine that runs tasks in an order of its own."""

    num_workers = 1

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.calls: list[tuple[str, int]] = []

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, label: str, on_death: Any = None
    ) -> Iterator[tuple[int, Any]]:
        self.calls.append((label, len(tasks)))
        for index in self.random.sample(range(len(tasks)), len(tasks)):
            yield index, function(*tasks[index])


@dataclass
class Result:
    report: DuplicatesReport
    decisions: list[dict[str, Any]]
    clusters: dict[bytes, bytes]
    files: tuple[bytes, bytes]
    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def removed(self) -> dict[bytes, tuple[str, bytes]]:
        return {row["doc_id"]: (row["kind"], row["duplicate_of"]) for row in self.decisions}


def write_run(folder: Path, docs: Sequence[Doc], config: DuplicatesConfig) -> list[tuple[str, str]]:
    """The verdicts and signatures of ``docs``; returns (source, partition) in an arbitrary order."""
    stage = Signature(config)
    partitions: dict[tuple[str, str], list[Doc]] = {}
    for doc in docs:
        partitions.setdefault((doc.source, doc.partition), []).append(doc)
    schema = verdict_schema(MEASURES)
    for (source, name), members in partitions.items():
        pages = [stage(doc.page()) for doc in members]
        verdicts = [
            {
                "doc_id": page.doc_id,
                "source": source,
                "source_file": "f",
                "canonical_url": page.canonical_url,
                "fetched_at": page.fetched_at,
                "post_filter_hash": content_hash(doc.text),
                "stage": doc.stage,
                **page.measures,
            }
            for page, doc in zip(pages, members, strict=True)
        ]
        rows = [
            {"doc_id": page.doc_id, "signature": page.signature, "shingles": page.shingles}
            for page, doc in zip(pages, members, strict=True)
            if doc.stage is None
        ]
        random.Random(name).shuffle(rows)
        for kind, table in (
            ("verdicts", pa.Table.from_pylist(verdicts, schema)),
            ("signatures", pa.Table.from_pylist(rows, SIGNATURE_SCHEMA)),
        ):
            path = folder / kind / source / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path)
    return list(partitions)


def deduplicate(
    docs: Sequence[Doc], config: DuplicatesConfig, priorities: dict[str, int] | None = None, **options: Any
) -> Result:
    """Write ``docs`` as a run, find its duplicates, read the tables."""
    engine = options.pop("engine", None) or Shuffled()
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as name:
        folder = Path(name)
        partitions = write_run(folder, docs, config)
        random.Random(len(docs)).shuffle(partitions)
        report = run(name, partitions, priorities or {}, config, engine, str(folder / ".work"), **options)
        paths = [folder / "duplicates" / f"{table}.parquet" for table in ("decisions", "clusters")]
        decisions, clusters = (pq.read_table(path).to_pylist() for path in paths)
        return Result(
            report,
            decisions,
            {row["doc_id"]: row["cluster_id"] for row in clusters},
            (paths[0].read_bytes(), paths[1].read_bytes()),
            getattr(engine, "calls", []),
        )


def plain_words(text: str) -> list[str]:
    """The documented normalisation, a character at a time."""
    words: list[str] = []
    word = ""
    for character in re.sub(r"\d+([.,]\d+)*", "0", text.lower()):
        for part in unicodedata.normalize("NFD", character):
            category = unicodedata.category(part)
            if category == "Mn":
                continue
            if category[0] not in "LNM":
                words.append(word)
                word = ""
            elif without_spaces(part):
                words += [word, part]
                word = ""
            else:
                word += part
    return [word for word in [*words, word] if word]


def without_spaces(character: str) -> bool:
    """Whether text in this character's script has no spaces between words, by the character's name."""
    name = unicodedata.name(character, "")
    return name.startswith(("CJK UNIFIED", "CJK COMPATIBILITY IDEO", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER"))


def plain_shingles(text: str, ngram: int) -> set[tuple[str, ...]]:
    words = plain_words(text)
    return {tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)}


def plain_jaccard(a: set[Any], b: set[Any]) -> float:
    return float(Fraction(len(a & b), len(a | b))) if a | b else 0.0


class Oracle:
    """Who goes and who belongs together, by brute force over all pairs and Python sets."""

    def __init__(self, docs: Sequence[Doc], config: DuplicatesConfig, priorities: dict[str, int] | None = None) -> None:
        self.config = config
        priorities = priorities or {}
        self.docs = sorted(
            docs,
            key=lambda d: (
                -priorities.get(d.source, 0),
                -len(plain_words(d.text)),
                d.fetched is None,
                d.fetched or 0,
                d.doc_id,
            ),
        )
        self.removed: dict[bytes, tuple[str, bytes]] = {}
        self.edges: list[tuple[bytes, bytes]] = []
        if config.exact:
            self._equal("exact", lambda d: d.text)
        if config.url:
            self._equal("url", lambda d: d.url)
        if config.near:
            self._near()
        self.clusters = self._clusters()

    def _left(self) -> list[Doc]:
        return [doc for doc in self.docs if doc.doc_id not in self.removed]

    def _apart(self, a: Doc, b: Doc) -> bool:
        return self.config.scope == "source" and a.source != b.source

    def _equal(self, kind: str, key: Callable[[Doc], str | None]) -> None:
        left = self._left()
        if kind == "url" and self.config.url_keep == "latest":
            left.sort(key=lambda d: (d.fetched is None, -(d.fetched or 0)))
        ngram, threshold = self.config.ngram, self.config.url_threshold if kind == "url" else 0.0
        for i, doc in enumerate(left):
            for other in left[:i]:
                if key(doc) is not None and key(doc) == key(other) and not self._apart(doc, other):
                    texts = (plain_shingles(one.text, ngram) for one in (doc, other))
                    if threshold == 0 or plain_jaccard(*texts) >= threshold:
                        self.removed[doc.doc_id] = (kind, other.doc_id)
                        self.edges.append((doc.doc_id, other.doc_id))
                    break

    def _near(self) -> None:
        left = self._left()
        shingles = {doc.doc_id: plain_shingles(doc.text, self.config.ngram) for doc in left}
        for i, doc in enumerate(left):
            best: tuple[float, bytes] | None = None
            for other in left[:i]:
                similarity = plain_jaccard(shingles[doc.doc_id], shingles[other.doc_id])
                if similarity < self.config.threshold or self._apart(doc, other):
                    continue
                self.edges.append((doc.doc_id, other.doc_id))
                if other.doc_id not in self.removed and (best is None or similarity > best[0]):
                    best = similarity, other.doc_id
            if best is not None:
                self.removed[doc.doc_id] = ("near", best[1])

    def _clusters(self) -> dict[bytes, bytes]:
        cluster = {end: {end} for edge in self.edges for end in edge}
        for a, b in self.edges:
            if cluster[a] is not cluster[b]:
                cluster[a] |= cluster[b]
                for member in cluster[b]:
                    cluster[member] = cluster[a]
        return {member: min(members) for member, members in cluster.items()}


@pytest.fixture(scope="session")
def plain() -> Any:
    """The tools of this file, for tests that cannot import it."""
    import sys

    return sys.modules[__name__]
