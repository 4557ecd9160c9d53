"""Converts finished pages into rows of the three tables of a partition."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from quern.data_pipeline.chain import QUALITY_GATE
from quern.data_pipeline.execution.commits import TABLES
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, SIGNATURE_SCHEMA, Page, content_hash, verdict_schema

__all__ = ["PageRows"]

#: Columns of verdicts that are a page's own attributes.
_OF_PAGE = [name for name in verdict_schema(()).names if name not in ("pre_filter_hash", "post_filter_hash")]


class PageRows:
    """Finished pages as columns, written as one Arrow table of each kind."""

    def __init__(self, measures: tuple[str, ...]) -> None:
        self.schemas = {
            "verdicts": verdict_schema(measures),
            "documents": DOCUMENT_SCHEMA,
            "signatures": SIGNATURE_SCHEMA,
        }
        self.measures = measures
        self.clear()

    def clear(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        self.chars = 0

    def __len__(self) -> int:
        return len(self.rows["verdicts"])

    def add(self, page: Page, reached: int) -> None:
        text = page.text if reached >= QUALITY_GATE else None
        names = (page.url, page.canonical_url, page.surt, page.record_id, page.payload_digest)
        self.chars += sum(map(len, filter(None, names)))
        self.rows["verdicts"].append(
            {
                **{name: getattr(page, name) for name in _OF_PAGE},
                "pre_filter_hash": content_hash(page.extracted) if page.extracted is not None else None,
                "post_filter_hash": content_hash(text) if text is not None else None,
                **{name: page.measures.get(name) for name in self.measures},
            }
        )
        if text is not None:
            extracted = page.extracted if page.extracted != text else None
            self.rows["documents"].append(
                {"doc_id": page.doc_id, "text": text, "extracted": extracted, "kept": page.stage is None}
            )
            self.chars += len(text) + len(extracted or "")
        if page.stage is None:
            self.rows["signatures"].append(
                {"doc_id": page.doc_id, "signature": page.signature, "shingles": page.shingles}
            )

    def tables(self) -> dict[str, pa.Table]:
        return {name: pa.Table.from_pylist(rows, schema=self.schemas[name]) for name, rows in self.rows.items()}
