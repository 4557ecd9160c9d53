"""Converts finished pages into rows of the three tables of a partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from quern.data_pipeline.chain import QUALITY_GATE
from quern.data_pipeline.execution.commits import TABLES
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, SIGNATURE_SCHEMA, Page, content_hash, verdict_schema

__all__ = ["PageRows"]


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
                "doc_id": page.doc_id,
                "source": page.source,
                "url": page.url,
                "canonical_url": page.canonical_url,
                "surt": page.surt,
                "host": page.host,
                "source_file": page.source_file,
                "record_offset": page.record_offset,
                "record_length": page.record_length,
                "record_id": page.record_id,
                "fetched_at": page.fetched_at,
                "payload_digest": page.payload_digest,
                "charset": page.charset,
                "language": page.language,
                "language_score": page.language_score,
                "pre_filter_hash": content_hash(page.extracted) if page.extracted is not None else None,
                "post_filter_hash": content_hash(text) if text is not None else None,
                "stage": page.stage,
                "reason": page.reason,
                "failed_rules": page.failed_rules,
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
        return {name: _table(rows, self.schemas[name]) for name, rows in self.rows.items()}


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = [_column([row[field.name] for row in rows], field) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    if not pa.types.is_list(field.type) or pa.types.is_string(field.type.value_type):
        return pa.array(values, field.type)
    sizes = [0 if value is None else len(value) for value in values]
    filled = [value for value in values if value is not None and len(value)]
    flat = np.concatenate(filled) if filled else np.empty(0, field.type.value_type.to_pandas_dtype())
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    mask = pa.array(np.array([value is None for value in values], bool))
    return pa.ListArray.from_arrays(offsets, pa.array(flat, field.type.value_type), field.type, mask=mask)
