"""Answers which documents hold text of a benchmark, as plain data: ``quern lineage match --json``."""

from __future__ import annotations

from typing import Any

import numpy as np

from quern.lineage.match import Matches

__all__ = ["match_answer"]


def match_answer(found: Matches) -> dict[str, Any]:
    """The result by document: where each item's text stands in it."""
    return {
        "run_id": found.run_id,
        "version": found.version,
        "benchmark": found.benchmark,
        "n": found.n,
        "items": len(found.items),
        "items_found": len(np.unique(found.item_index)),
        "not_looked_for": [{"id": item.id, "line": item.line} for item in found.not_looked_for],
        "documents": _documents(found),
    }


def _documents(found: Matches) -> list[dict[str, Any]]:
    """In the order of the streams; the items of a document by their line."""
    documents: dict[int, dict[str, Any]] = {}
    columns = (found.numbers, found.streams, found.item_index, found.starts, found.stops, found.grams, found.coverage)
    for row, (number, stream, item, start, stop, grams, coverage) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        document = documents.setdefault(
            number,
            {"doc_id": found.doc_ids[row].hex(), "url": found.urls[row], "source": found.sources[row],
             "stream": found.names[stream], "items": {}},
        )  # fmt: skip
        own = found.items[item]
        blank = {"id": own.id, "line": own.line, "grams": grams, "coverage": coverage, "spans": []}
        held = document["items"].setdefault(item, blank)
        held["spans"].append([start, stop])
    return [{**document, "items": list(document["items"].values())} for document in documents.values()]
