"""Writes the two tables of decisions, sorted by ``doc_id``; equal rows give equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.dedup.exchange import Slice, record_blocks, regrouped
from quern.data_pipeline.dedup.passes.decide import CLUSTER, DECISION
from quern.data_pipeline.dedup.records import KINDS
from quern.data_pipeline.dedup.rows import made_of
from quern.data_pipeline.dedup.schemas import CLUSTER_SCHEMA, CLUSTERS, DECISION_SCHEMA, DECISIONS
from quern.data_pipeline.dedup.work import DedupInputs, Done
from quern.data_pipeline.page.keys import column_of

__all__ = ["sort_rows", "write_tables"]

_DECIDED = np.dtype([*DECISION.descr, ("name_high", "<u8"), ("name_low", "<u8")])
_ROW_GROUP = 1 << 17


def sort_rows(work: DedupInputs, index: int, decisions: Slice, clusters: Slice) -> Done:
    """Task: one range of ids → the rows of both tables in their order. Gives back their numbers."""
    members = clusters.read(CLUSTER)
    members = members[np.lexsort((members["low"], members["high"]))]
    removed = decisions.read(DECISION)
    removed = removed[np.lexsort((removed["low"], removed["high"]))]
    high, low = (np.concatenate((members[half], removed[half])) for half in ("high", "low"))
    order = np.lexsort((low, high))  # stable: a member comes before its own removal
    member = order < len(members)
    own = members[(np.cumsum(member) - 1)[~member]]
    rows = made_of(_DECIDED, removed, name_high=own["name_high"], name_low=own["name_low"])
    storage.publish_bytes(work.file("decided", index), rows.tobytes())
    storage.publish_bytes(work.file("clustered", index), members.tobytes())
    return Done((len(rows), len(members)))


def write_tables(work: DedupInputs, counts: Sequence[tuple[int, int]]) -> Done:
    """Task: publish both tables. ``counts`` are the rows of each range of ids; memory is for one row group."""
    for number, (kind, dtype, table, schema, columns) in enumerate(
        (
            ("decided", _DECIDED, DECISIONS, DECISION_SCHEMA, _decision_columns),
            ("clustered", CLUSTER, CLUSTERS, CLUSTER_SCHEMA, _cluster_columns),
        )
    ):
        paths = [(work.file(kind, index), count[number]) for index, count in enumerate(counts)]
        _write_table(storage.join(work.run_dir, table), schema, columns, _row_groups(paths, dtype))
    return Done()


def _row_groups(paths: Sequence[tuple[str, int]], dtype: np.dtype) -> Iterator[np.ndarray]:
    """The rows of all files, as many at a time as a row group has; at least once."""
    pieces = (block for path, count in paths for _, block in record_blocks(path, dtype, count))
    yield from regrouped(pieces, _ROW_GROUP)
    if not any(count for _, count in paths):
        yield np.empty(0, dtype=dtype)


def _write_table(
    path: str, schema: pa.Schema, columns: Callable[[np.ndarray], list[pa.Array]], groups: Iterator[np.ndarray]
) -> None:
    with (
        storage.publish(path) as file,
        pq.ParquetWriter(file, schema, compression="zstd", store_schema=False) as writer,
    ):
        for rows in groups:
            writer.write_table(pa.Table.from_arrays(columns(rows), schema=schema), row_group_size=_ROW_GROUP)


def _decision_columns(rows: np.ndarray) -> list[pa.Array]:
    kinds = pa.DictionaryArray.from_arrays(pa.array(rows["kind"].astype(np.int32)), pa.array(KINDS))
    return [
        _hashes(rows["high"], rows["low"]),
        kinds.cast(pa.string()),
        _hashes(rows["by_high"], rows["by_low"]),
        _hashes(rows["name_high"], rows["name_low"]),
        pa.array(rows["similarity"], mask=np.isnan(rows["similarity"])),
        pa.array(rows["band"], pa.int16(), mask=rows["band"] < 0),
    ]


def _cluster_columns(rows: np.ndarray) -> list[pa.Array]:
    return [_hashes(rows["high"], rows["low"]), _hashes(rows["name_high"], rows["name_low"])]


def _hashes(high: np.ndarray, low: np.ndarray) -> pa.Array:
    return column_of(np.stack([high, low], axis=1).astype(">u8").tobytes())
