"""Duplicates: signatures → bands → candidates → verified pairs → survivors."""

from quern.data_pipeline.dedup.config import DuplicatesConfig, recall, recall_curve
from quern.data_pipeline.dedup.run import FORMAT, DuplicatesReport, run
from quern.data_pipeline.dedup.shingles import minhash_hash, normalise, shingle_hash
from quern.data_pipeline.dedup.signature import SCHEME, Signature, minhash
from quern.data_pipeline.dedup.tables import CLUSTER_SCHEMA, CLUSTERS, DECISION_SCHEMA, DECISIONS

__all__ = [
    "CLUSTERS",
    "CLUSTER_SCHEMA",
    "DECISIONS",
    "DECISION_SCHEMA",
    "FORMAT",
    "SCHEME",
    "DuplicatesConfig",
    "DuplicatesReport",
    "Signature",
    "minhash",
    "minhash_hash",
    "normalise",
    "recall",
    "recall_curve",
    "run",
    "shingle_hash",
]
