"""Paths and columns of the two tables of decisions of a run."""

from __future__ import annotations

import pyarrow as pa

from quern.data_pipeline.page.document import HASH

__all__ = ["CLUSTERS", "CLUSTER_SCHEMA", "DECISIONS", "DECISION_SCHEMA"]

DECISIONS = "duplicates/decisions.parquet"
CLUSTERS = "duplicates/clusters.parquet"

DECISION_SCHEMA = pa.schema(
    [
        pa.field("doc_id", HASH, nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("duplicate_of", HASH, nullable=False),
        pa.field("cluster_id", HASH, nullable=False),
        pa.field("similarity", pa.float64()),
        pa.field("band", pa.int16()),
    ]
)
CLUSTER_SCHEMA = pa.schema([pa.field("doc_id", HASH, nullable=False), pa.field("cluster_id", HASH, nullable=False)])
