"""Duplicates in the report of a finished run: sizes of clusters, the largest clusters, and verified pairs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.dedup.schemas import CLUSTERS, DECISIONS
from quern.data_pipeline.page.keys import bytes_of
from quern.storage.parquet import open_table, read_batches

__all__ = ["Cluster", "Clusters", "decision_rows", "id_keys", "mix", "read_clusters", "removed_keys"]

BATCH_ROWS = 1 << 16
#: Rows whose cluster sizes are counted in one pass over the table; more rows take more passes, not more memory.
PASS_ROWS = 4_000_000
NUM_LARGEST = 10
NUM_MEMBERS = 3


@dataclass(frozen=True)
class Cluster:
    """A component of duplicates: ``members`` are a few of its ``size`` documents, chosen by key."""

    cluster_id: bytes
    size: int
    members: tuple[bytes, ...]


@dataclass
class Clusters:
    """All components with at least two members."""

    sizes: Counter[int] = field(default_factory=Counter)
    """Size → number of clusters of that size."""
    largest: list[Cluster] = field(default_factory=list)


def id_keys(ids: pa.Array) -> np.ndarray:
    """uint64[n]: the first eight bytes of 16-byte ids without nulls. Ids are hashes, so these are as good as unique."""
    if isinstance(ids, pa.ChunkedArray):
        ids = ids.combine_chunks()
    return np.frombuffer(bytes_of(ids), "<u8")[::2].copy()


def mix(keys: np.ndarray, seed: int) -> np.ndarray:
    """uint64[n]: a keyed hash of 64-bit keys, two rounds of the SplitMix64 finalizer (Steele et al. 2014)."""
    mask = (1 << 64) - 1
    with np.errstate(over="ignore"):
        z = keys + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask)
        for _ in range(2):
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return z


def removed_keys(run_dir: str) -> np.ndarray:
    """Sorted uint64 keys of every removed document."""
    parts = (id_keys(batch.column(0)) for batch in _batches(storage.join(run_dir, DECISIONS), ["doc_id"]))
    return np.sort(np.concatenate([np.empty(0, np.uint64), *parts]))


def decision_rows(run_dir: str, num: int, seed: int) -> list[dict[str, Any]]:
    """A keyed choice of at most ``num`` decisions: two of every other kind, the rest near duplicates."""
    best: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
    serial = 0
    for batch in _batches(storage.join(run_dir, DECISIONS), None):
        order = mix(id_keys(batch.column("doc_id")), seed)
        kinds = np.array(batch.column("kind").to_pylist(), object)
        for kind in sorted(set(kinds)):
            rows = np.flatnonzero(kinds == kind)
            for row in rows[np.argsort(order[rows], kind="stable")[:num]]:
                serial += 1
                best.setdefault(kind, []).append((int(order[row]), serial, batch.slice(int(row), 1).to_pylist()[0]))
            best[kind] = heapq.nsmallest(num, best[kind])
    near = [row for _, _, row in best.pop("near", [])]
    others = [row for kind in sorted(best) for _, _, row in best[kind][:2]]
    return (near[: max(0, num - len(others))] + others)[:num]


def read_clusters(run_dir: str, seed: int = 0) -> Clusters:
    """Sizes of all clusters, and the largest ones with a few members each."""
    path = storage.join(run_dir, CLUSTERS)
    found = Clusters()
    num_passes = max(1, -(-_num_rows(path) // PASS_ROWS))
    top: list[tuple[int, int]] = []
    for turn in range(num_passes):
        parts = []
        for batch in _batches(path, ["cluster_id"]):
            keys = id_keys(batch.column(0))
            parts.append(keys if num_passes == 1 else keys[mix(keys, 0) % np.uint64(num_passes) == turn])
        keys, sizes = np.unique(np.concatenate(parts) if parts else np.empty(0, np.uint64), return_counts=True)
        for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
            found.sizes[int(size)] += int(count)
        best = np.lexsort((keys, -sizes))[:NUM_LARGEST]
        top = sorted(top + [(-int(sizes[i]), int(keys[i])) for i in best])[:NUM_LARGEST]
    members: dict[int, list[tuple[int, bytes]]] = {key: [] for _, key in top}
    ids: dict[int, bytes] = {}
    wanted = np.array(sorted(members), np.uint64)
    for batch in _batches(path, ["doc_id", "cluster_id"]):
        keys = id_keys(batch.column("cluster_id"))
        order = mix(id_keys(batch.column("doc_id")), seed)
        for key in wanted:
            rows = np.flatnonzero(keys == key)
            if not len(rows):
                continue
            ids[int(key)] = batch.column("cluster_id")[int(rows[0])].as_py()
            rows = rows[np.argsort(order[rows], kind="stable")[:NUM_MEMBERS]]
            new = [(int(order[row]), batch.column("doc_id")[int(row)].as_py()) for row in rows]
            members[int(key)] = sorted(members[int(key)] + new)[:NUM_MEMBERS]
    for size, key in top:
        found.largest.append(Cluster(ids[key], -size, tuple(member for _, member in members[key])))
    return found


def _num_rows(path: str) -> int:
    if not storage.exists(path):
        return 0
    with open_table(path) as table:
        return int(table.metadata.num_rows)


def _batches(path: str, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    """The table in batches; nothing when it is not there (a run without the duplicates phase)."""
    return read_batches(path, columns, BATCH_ROWS) if storage.exists(path) else iter(())
