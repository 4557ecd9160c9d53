"""The last task: removals of all passes and verified pairs → the two tables of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.dedup.clusters import components
from quern.data_pipeline.dedup.equal import removals
from quern.data_pipeline.dedup.exchange import read_array
from quern.data_pipeline.dedup.facts import Work, read_ids
from quern.data_pipeline.dedup.verify import VERIFIED, survivors
from quern.data_pipeline.document import HASH

__all__ = ["CLUSTERS", "CLUSTER_SCHEMA", "DECISIONS", "DECISION_SCHEMA", "KINDS", "Outcome", "decide", "write_tables"]

DECISIONS = "duplicates/decisions.parquet"
CLUSTERS = "duplicates/clusters.parquet"

#: The passes in their order: a document removed by one is not looked at by the next.
KINDS = ("exact", "url", "near")

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


@dataclass(frozen=True)
class Outcome:
    """What was decided, counted."""

    removed: dict[int, dict[str, int]]
    """Partition index → kind → documents."""
    verified_pairs: int
    clusters: int
    largest_cluster: int


def decide(work: Work, kinds: Sequence[str], groups: int, documents: int) -> Outcome:
    """Task: write both tables, rows sorted by ``doc_id``. Takes memory for the removals and verified pairs.

    ``duplicate_of`` is the document that was kept in that pass; a later pass may have removed it in its turn.
    """
    removed = {kind: removals(work, kind, documents) for kind in kinds if kind != "near"}
    verified = np.concatenate(
        [np.empty(0, dtype=VERIFIED), *(read_array(work.file("verified", group)) for group in range(groups))]
    )
    near = survivors(verified)
    pieces = [(name, rows["rank"], rows["by"], np.ones(len(rows)) if name == "exact" else np.full(len(rows), np.nan),
               np.full(len(rows), -1)) for name, rows in removed.items()]  # fmt: skip
    pieces.append(("near", near["high"], near["low"], near["similarity"], near["band"].astype(np.int64)))
    kind = np.concatenate([np.full(len(piece[1]), KINDS.index(piece[0])) for piece in pieces])
    rank, by, similarity, band = (np.concatenate([piece[i] for piece in pieces]) for i in range(1, 5))

    ids = read_ids(work)
    ends = [(rows["rank"], rows["by"]) for rows in removed.values()] + [(verified["low"], verified["high"])]
    nodes, labels = components(np.concatenate([a for a, _ in ends]), np.concatenate([b for _, b in ends]))
    members, cluster = _name_clusters(nodes, labels, ids)
    cluster_of = cluster[np.searchsorted(nodes, rank)]
    order = np.lexsort((ids[rank, 1], ids[rank, 0]))
    decisions = [
        _hashes(ids[rank[order]]),
        pa.DictionaryArray.from_arrays(pa.array(kind[order], pa.int32()), pa.array(KINDS)).cast(pa.string()),
        _hashes(ids[by[order]]),
        _hashes(cluster_of[order]),
        pa.array(similarity[order], mask=np.isnan(similarity[order])),
        pa.array(band[order], pa.int16(), mask=band[order] < 0),
    ]
    by_id = np.lexsort((ids[members, 1], ids[members, 0]))
    clusters = [_hashes(ids[members[by_id]]), _hashes(cluster[by_id])]
    write_tables(work.run_dir, decisions, clusters)

    partition = read_array(storage.join(work.scratch, "partitions"))[rank]
    counts: dict[int, dict[str, int]] = {}
    for code, name in enumerate(KINDS):
        for index, count in enumerate(np.bincount(partition[kind == code]).tolist()):
            if count:
                counts.setdefault(index, {})[name] = count
    sizes = np.unique(labels, return_counts=True)[1]
    return Outcome(counts, len(verified), len(sizes), int(sizes.max(initial=0)))


def _name_clusters(nodes: np.ndarray, labels: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``nodes`` and the name of each one's cluster, uint64[nodes, 2]: the smallest id in it."""
    order = np.lexsort((ids[nodes, 1], ids[nodes, 0], labels))
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = labels[order][1:] != labels[order][:-1]
    names = np.empty((len(nodes), 2), dtype=np.uint64)
    names[order] = ids[nodes[order[starts]]][np.cumsum(starts) - 1]
    return nodes, names


def _hashes(words: np.ndarray) -> pa.Array:
    data = pa.py_buffer(words.astype(">u8").tobytes())
    return pa.FixedSizeBinaryArray.from_buffers(HASH, len(words), [None, data])


def write_tables(run_dir: str, decisions: Sequence[pa.Array], clusters: Sequence[pa.Array]) -> None:
    """Publish both tables; equal rows are equal bytes."""
    for name, columns, schema in ((DECISIONS, decisions, DECISION_SCHEMA), (CLUSTERS, clusters, CLUSTER_SCHEMA)):
        with storage.publish(storage.join(run_dir, name)) as file:
            table = pa.Table.from_arrays(list(columns), schema=schema)
            pq.write_table(table, file, compression="zstd", row_group_size=1 << 17, store_schema=False)
