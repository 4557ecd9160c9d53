"""A page, its measurements and its verdict, and the Arrow schemas they are stored in."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

__all__ = [
    "DOCUMENT_SCHEMA",
    "HASH",
    "OUT_OF_MEMORY",
    "SIGNATURE_SCHEMA",
    "STAGES",
    "Page",
    "content_hash",
    "make_doc_id",
    "verdict_schema",
]

HASH = pa.binary(16)

#: The fault of a page that took more memory to read than its worker may have.
OUT_OF_MEMORY = "quarantine.memoryerror"

#: What can drop a page, in the order of the stages. A null stage means kept.
STAGES = ("read", "purged", "url", "language", "extract", "quality", "pii", "toxicity", "quarantine")


def make_doc_id(source: str, relative_path: str, position: int) -> bytes:
    """blake2b-128 of ``source \\0 relative_path \\0 position``: a permanent identity by place."""
    return hashlib.blake2b(f"{source}\0{relative_path}\0{position}".encode(), digest_size=16).digest()


def content_hash(text: str) -> bytes:
    """blake2b-128 of the UTF-8 text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(slots=True)
class Page:
    """One page-carrying record as it passes the chain.

    A source fills the first block; stages fill the rest. A stage measures and may rewrite ``text``; it never drops:
    it calls :meth:`fail`, and the chain decides at the next gate.
    """

    source: str
    source_file: str
    """The input path; its last part is the file's name."""
    relative_path: str
    position: int
    """Byte offset of the record (of its gzip member, else in the decompressed stream), line, row, or 0."""
    record_offset: int | None = None
    record_length: int | None = None
    record_id: str | None = None
    url: str | None = None
    fetched_at: dt.datetime | None = None
    """Aware, UTC."""
    payload_digest: str | None = None
    media: Literal["html", "text"] = "html"
    charset: str | None = None
    raw: str = ""
    """The decoded payload: HTML for ``media == "html"``, else the text itself. No lone surrogates."""
    fault: str | None = None
    """Why the record has no usable payload, as a reason name (``read.empty``); such a page fails at the first gate.
    :data:`OUT_OF_MEMORY` says nothing of the page alone, and quarantines it."""

    doc_id: bytes = b""
    canonical_url: str | None = None
    surt: str | None = None
    host: str | None = None
    language: str | None = None
    language_score: float | None = None
    text: str | None = None
    """The text as it stands: set by extraction, rewritten by later stages, tokenized in the end."""
    extracted: str | None = None
    """The text as extraction left it."""
    measures: dict[str, float] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    """(stage, rule) of every failed rule since the last gate, in the recipe's order."""
    stage: str | None = None
    """What dropped the page, one of :data:`STAGES`; None while it is kept."""
    reason: str | None = None
    failed_rules: list[str] = field(default_factory=list)
    """Every failed rule of a dropped page, and those that were only measured, of a kept one too."""
    signature: np.ndarray | None = None
    """uint32[num_perm] MinHash values; None when the text is too short for one shingle."""
    shingles: np.ndarray | None = None
    """Sorted unique uint64 shingle hashes."""

    def __post_init__(self) -> None:
        if not self.doc_id:
            self.doc_id = make_doc_id(self.source, self.relative_path, self.position)

    def fail(self, stage: str, rule: str) -> None:
        """Record a failed rule; the page is dropped at the next gate."""
        self.failures.append((stage, rule))

    def note(self, rule: str) -> None:
        """Record a failed rule that does not drop the page."""
        self.failed_rules.append(rule)

    def decide(self) -> bool:
        """Apply a gate: True if the page passes, else it is dropped with its first failed rule as the reason."""
        if not self.failures:
            return True
        self.stage, self.reason = self.failures[0]
        self.failed_rules += [rule for _, rule in self.failures]
        return False


def verdict_schema(measures: Iterable[str]) -> pa.Schema:
    """The verdict table of a run whose chain fills ``measures`` (one float64 column each, null where not measured)."""
    fixed = [
        pa.field("doc_id", HASH, nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("url", pa.string()),
        pa.field("canonical_url", pa.string()),
        pa.field("surt", pa.string()),
        pa.field("host", pa.string()),
        pa.field("source_file", pa.string(), nullable=False),
        pa.field("record_offset", pa.int64()),
        pa.field("record_length", pa.int64()),
        pa.field("record_id", pa.string()),
        pa.field("fetched_at", pa.timestamp("us", tz="UTC")),
        pa.field("payload_digest", pa.string()),
        pa.field("charset", pa.string()),
        pa.field("language", pa.string()),
        pa.field("language_score", pa.float64()),
        pa.field("pre_filter_hash", HASH),
        pa.field("post_filter_hash", HASH),
        pa.field("stage", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("failed_rules", pa.list_(pa.string())),
    ]
    return pa.schema(fixed + [pa.field(name, pa.float64()) for name in measures])


DOCUMENT_SCHEMA = pa.schema(
    [
        pa.field("doc_id", HASH, nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("extracted", pa.string()),
        pa.field("kept", pa.bool_(), nullable=False),
    ]
)

SIGNATURE_SCHEMA = pa.schema(
    [
        pa.field("doc_id", HASH, nullable=False),
        pa.field("signature", pa.list_(pa.uint32())),
        pa.field("shingles", pa.list_(pa.uint64())),
    ]
)
