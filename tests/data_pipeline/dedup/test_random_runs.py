"""Whole runs of every shape against brute force, with tasks of every size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from dedup_oracle import BruteForce

from quern.data_pipeline.dedup.passes.run import DuplicatesReport, run
from quern.data_pipeline.execution.engine import InProcess
from support.data_pipeline import random_runs as R

#: All sizes, scopes, thresholds and priorities; each pass switched off that may be.
SOON = (3, 8, 12)
PRIORITIES: list[dict[str, int]] = [{}, {"a": 1}, {"b": 2, "c": -1}]


def decided(folder: Path) -> tuple[dict[bytes, tuple[Any, ...]], dict[bytes, bytes]]:
    """The rows of both tables; that they are sorted is checked."""
    decisions, clusters = (
        pq.read_table(folder / "duplicates" / f"{name}.parquet") for name in ("decisions", "clusters")
    )
    for table in (decisions, clusters):
        ids = table["doc_id"].to_pylist()
        assert ids == sorted(ids)
    rows = {
        row["doc_id"]: (row["kind"], row["duplicate_of"], row["similarity"], row["band"])
        for row in decisions.to_pylist()
    }
    names = {row["doc_id"]: row["cluster_id"] for row in clusters.to_pylist()}
    assert {row["doc_id"]: row["cluster_id"] for row in decisions.to_pylist()} == {id_: names[id_] for id_ in rows}
    return rows, names


def check(folder: Path, report: DuplicatesReport, expected: Any) -> None:
    rows, names = decided(folder)
    assert rows == expected.rows
    assert names == expected.clusters
    sizes = [list(names.values()).count(name) for name in set(names.values())]
    assert (report.clusters, report.largest_cluster) == (len(sizes), max(sizes, default=0))
    assert (report.candidate_pairs, report.verified_pairs) == (expected.num_candidates, expected.num_verified)
    most = expected.config.max_band_members
    assert report.shared_bands == len(expected.band_sizes)
    assert report.capped_bands == sum(size > most for size in expected.band_sizes)
    assert report.largest_band == max(expected.band_sizes, default=0)
    sources = {doc.doc_id: doc.source for doc in expected.order}
    for source in set(sources.values()):
        for kind in ("exact", "url", "near"):
            count = sum(row[0] == kind and sources[id_] == source for id_, row in rows.items())
            assert report.removed.get(source, {}).get(kind, 0) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [seed if seed in SOON else pytest.param(seed, marks=pytest.mark.long) for seed in range(16)]
)
def test_a_random_run_is_decided_as_by_brute_force(tmp_path, seed):
    rng = random.Random(seed)
    docs = R.corpus(rng, rng.choice([3, 30, 120, 250]))
    config, priorities = R.config(rng), rng.choice(PRIORITIES)
    partitions = R.write(tmp_path, docs, shuffled=rng.random() < 0.5)
    expected = BruteForce(docs, config, priorities)
    bytes_of = set()
    for records in (1 << 20, 60 if len(docs) <= 120 else 500, rng.choice([700, 1500])):
        scratch = str(tmp_path / f"work{records}")
        report = run(str(tmp_path), partitions, priorities, config, InProcess(), scratch, records_per_task=records)
        check(tmp_path, report, expected)
        bytes_of.add(R.tables(tmp_path))
    assert len(bytes_of) == 1
