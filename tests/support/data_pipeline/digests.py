"""Digests of what decides the pages of a run."""

from __future__ import annotations

from quern.data_pipeline.config import PipelineConfig
from quern.data_pipeline.source_chains import source_chains

__all__ = ["pages_hash"]


def pages_hash(config: PipelineConfig) -> dict[str, str]:
    """Source name → the digest that the commits of its partitions record."""
    return {name: own.digest for name, own in source_chains(config).items()}
