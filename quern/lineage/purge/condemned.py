"""All that goes with a selection of documents: the same URLs, the same texts, what was removed for their sake."""

from __future__ import annotations

import pyarrow as pa

from quern.data_pipeline.document import HASH

__all__ = ["CONDEMNED_SCHEMA", "WHY"]

#: Why a document is condemned: it was asked for itself, or it has the canonical URL, or the text, of one that is, or
#: was removed as a duplicate of one that is.
WHY = ("selected", "url", "text", "duplicate")

#: One row a condemned document, sorted by ``doc_id``.
CONDEMNED_SCHEMA = pa.schema(
    [
        pa.field("doc_id", HASH, nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("partition", pa.string(), nullable=False),  # its verdicts file below the source, without .parquet
        pa.field("canonical_url", pa.string()),
        pa.field("post_filter_hash", HASH),
        pa.field("why", pa.string(), nullable=False),  # one of WHY
        pa.field("through", HASH),  # the document that drew it in; null where it was selected
        pa.field("stage", pa.string()),  # what dropped it on the chain's road; null where nothing did
        pa.field("removed_as", pa.string()),  # the kind of its row in duplicates/decisions.parquet, if it has one
    ]
)
