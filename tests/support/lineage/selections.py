"""Runs of two topics, to select documents from, and what stands in the tables of selections."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from support.lineage.runs import Listing, listing, write_listing

TOPICS = ("the mill grinds wheat and rye to flour", "the ship sails with wind and tide to harbour")
"""Words of both, and of each alone."""


def topic_text(doc_id: bytes, words: int = 4) -> str:
    """A text of the topic that the last bit of the id names: its words, each the other topic's one time in five."""
    draw = random.Random(doc_id)
    own = [draw.random() < 0.8 for _ in range(words)]
    return " ".join(draw.choice(TOPICS[(doc_id[15] & 1) ^ (not same)].split()) for same in own)


def give_texts(found: Listing, text_of: Callable[[bytes], str]) -> None:
    """Give each page another text, in its tables of texts and in its span."""
    for rows in found.documents.values():
        for row in rows:
            row |= {"text": text_of(row["doc_id"]), "extracted": None}
            found.texts[row["doc_id"]] = row["text"]
    for spans in found.spans.values():
        start = 0
        for span in spans:
            span["length"] = len(found.texts[span["doc_id"]].encode()) + 1
            span["start"], start = start, start + span["length"]


def write_topics(folder: Path, *, documents: int = 160, files: int = 2, sources: tuple[str, ...] = ("web",)) -> Listing:
    """Write a run of both topics to ``folder / run`` and a target of the first one, ``folder / target.jsonl``."""
    found = listing(seed=5, documents=documents, files=files, sources=sources)
    give_texts(found, topic_text)
    write_listing(folder / "run", found, identity="topics")
    rows = [{"text": topic_text(random.Random(number).randbytes(15) + b"\0", 12)} for number in range(40)]
    (folder / "target.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return found


def read_documents(found: Listing) -> dict[bytes, int]:
    """doc_id → tokens of what training reads."""
    return {
        span["doc_id"]: span["length"]
        for stream, spans in found.spans.items()
        for span in spans
        if not stream.endswith(".val") and not span["purged"]
    }


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    """The table of a selection, part after part."""
    parts = sorted((run / "measures" / name).glob("part-*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def files_of(run: Path, name: str) -> dict[str, bytes]:
    """Every file of a selection."""
    root = run / "measures" / name
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
