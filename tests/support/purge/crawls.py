"""Small crawls with planted duplicates, and what a run of the whole data road keeps of them."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from support.data_pipeline.in_process import run_config
from support.lineage import scenario

NOUNS = ["river", "lantern", "harbour", "orchard", "mirror", "saddle", "copper", "window", "garden", "thunder",
         "ribbon", "kettle", "meadow", "anchor", "village", "miller", "winter", "bridge", "letter"]  # fmt: skip
VERBS = ["watches", "follows", "gathers", "forgets", "borrows", "mends", "carries", "measures", "answers", "hides"]


@dataclass(frozen=True)
class Crawled:
    """A page, as it is served."""

    url: str
    text: str
    day: int = 1
    """Of the month in which it was fetched."""


def prose(draw: random.Random, sentences: int = 20) -> str:
    """Sentences of words that occur in few others."""

    def sentence() -> str:
        a, b = draw.sample(NOUNS, 2)
        own = "".join(draw.choices("bcdfghjklmnprstvwz", k=7))
        return f"The {a} of {own} {draw.choice(VERBS)} the {b} that was to be with the {draw.choice(NOUNS)} of {own}."

    return " ".join(sentence() for _ in range(sentences))


def changed(draw: random.Random, text: str, words: int) -> str:
    """The text with some words put in the place of others."""
    split = text.split()
    for place in draw.sample(range(len(split)), words):
        split[place] = "".join(draw.choices("aeiou", k=9))
    return " ".join(split)


def planted(draw: random.Random, groups: int) -> list[Crawled]:
    """Pages alone and in families: copies, near copies, chains of them, one address under both schemes and at several
    times, copies of what is dropped; mixed."""
    pages: list[Crawled] = []

    def url(site: int | None = None) -> str:
        site = draw.randrange(6) if site is None else site
        return f"{draw.choice(['http', 'https'])}://www{site}.example/{draw.getrandbits(40):x}"

    for _ in range(groups):
        text = prose(draw, draw.choice([20, 25, 30]))
        first = Crawled(url(), text, draw.randrange(1, 28))
        pages.append(first)
        kind = draw.choice(["alone", "copies", "near", "chain", "url", "both", "short"])
        if kind in ("copies", "both"):
            pages += [Crawled(url(), text, draw.randrange(1, 28)) for _ in range(draw.randrange(1, 4))]
        if kind in ("near", "both"):
            pages += [Crawled(url(), changed(draw, text, draw.randrange(1, 4))) for _ in range(draw.randrange(1, 4))]
        if kind in ("url", "both"):
            other = first.url.replace("http:", "https:") if draw.random() < 0.5 else first.url
            pages += [Crawled(other, prose(draw), draw.randrange(1, 28)) for _ in range(2)]
            pages.append(Crawled(url(), pages[-1].text))
        if kind == "chain":
            for _ in range(4):
                text = changed(draw, text, 4)
                pages.append(Crawled(url(), text))
        if kind == "short":
            pages[-1] = replace(first, text="The end of the road is here and that is to be it.")
            pages.append(Crawled(url(), pages[-1].text))
    draw.shuffle(pages)
    return pages


def write_warc(path: Path, pages: Sequence[Crawled]) -> str:
    """The pages as one WARC of gzip members; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        for number, page in enumerate(pages):
            body = f"<html><head><title>t</title></head><body><article><p>{page.text}</p></article></body></html>"
            record = writer.create_warc_record(
                page.url,
                "response",
                payload=io.BytesIO(body.encode()),
                http_headers=StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1"),
                warc_headers_dict={
                    "WARC-Date": f"2024-01-{page.day:02}T00:00:00Z",
                    "WARC-Record-ID": f"<urn:uuid:00000000-0000-0000-0000-{number:012x}>",
                },
            )
            writer.write_record(record)
    return str(path)


def run(folder: Path, warcs: Sequence[str], **changes: Any) -> Path:
    """The whole data road over the WARCs, in this process; the run."""
    tokens = {"encoding": "trained", "vocab_size": 300, "shard_tokens": 4000, "validation": 0.1}
    config = scenario.data_config(folder, warcs, {}, tokenize=tokens) | {"quality": {"order": ["gopher"]}} | changes
    run_config(config)
    return folder


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    """Every verdict row, with the kind of its removal as ``removed``."""
    decisions = pq.read_table(run_dir / "duplicates" / "decisions.parquet").to_pylist()
    kinds = {row["doc_id"]: row["kind"] for row in decisions}
    columns = ["doc_id", "url", "canonical_url", "post_filter_hash", "stage", "reason"]
    tables = [pq.read_table(path, columns=columns) for path in sorted((run_dir / "verdicts").rglob("*.parquet"))]
    return [{**row, "removed": kinds.get(row["doc_id"])} for row in pa.concat_tables(tables).to_pylist()]


def kept(run_dir: Path) -> set[tuple[bytes, bytes]]:
    """(doc_id, post_filter_hash) of every document that has tokens."""
    rows = {
        (row["doc_id"], row["post_filter_hash"])
        for row in verdicts(run_dir)
        if row["stage"] is None and row["removed"] is None
    }
    spans = [pq.read_table(path) for path in sorted((run_dir / "tokens").rglob("*.spans.parquet"))]
    assert {doc_id for doc_id, _ in rows} == set(pa.concat_tables(spans)["doc_id"].to_pylist())
    return rows
