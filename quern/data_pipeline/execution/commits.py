"""The commit log: which pieces of work are done, identified by hashes of their inputs and config.

There is one JSON object per piece of work. It counts only while its input fingerprint and config hash equal those of
the run; counters are summed from these objects, so they survive any number of resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quern import storage

__all__ = ["TABLES", "commit_path", "find_commit", "publish_commit", "table_path", "withdraw_commit"]

TABLES = ("verdicts", "documents", "signatures")
"""Folders of a run with one table for each partition of pages."""


def commit_path(run_dir: str, phase: str, source: str, piece: str) -> str:
    """``RUN/commits/<phase>/<source>/<piece>.json``."""
    return storage.join(run_dir, "commits", phase, source, f"{piece}.json")


def table_path(run_dir: str, folder: str, source: str, partition: str) -> str:
    """``RUN/<folder>/<source>/<partition>.parquet``, of one of :data:`TABLES`."""
    return storage.join(run_dir, folder, source, f"{partition}.parquet")


def find_commit(
    run_dir: str, phase: str, source: str, piece: str, *, inputs: Any, config: str
) -> dict[str, Any] | None:
    """The commit of a piece, or None when it is missing or was made from other inputs or another config."""
    path = commit_path(run_dir, phase, source, piece)
    if not storage.is_file(path):
        return None
    entry: dict[str, Any] = storage.read_json(path)
    return entry if entry["inputs"] == inputs and entry["config"] == config else None


def withdraw_commit(run_dir: str, phase: str, source: str, piece: str) -> None:
    """Remove a commit before its outputs are replaced, since it would count again if the inputs changed back."""
    storage.remove(commit_path(run_dir, phase, source, piece))


def publish_commit(
    run_dir: str,
    phase: str,
    source: str,
    piece: str,
    *,
    inputs: Any,
    config: str,
    outputs: Mapping[str, str],
    counts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the commit: ``outputs`` maps paths below the run to their SHA-256. The last act of a piece of work."""
    entry = {
        "phase": phase,
        "source": source,
        "partition": piece,
        "inputs": inputs,
        "config": config,
        "outputs": dict(outputs),
        "counts": dict(counts),
    }
    storage.write_json(commit_path(run_dir, phase, source, piece), entry)
    return entry
