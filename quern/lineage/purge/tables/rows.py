"""Reads rows of a run's tables by doc_id, in bounded batches, on any store."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from quern.data_pipeline.page.keys import key_set, keys_of
from quern.storage.parquet import null_count, open_table, read_batches

__all__ = ["batches", "by_partition", "matching", "with_value"]

_ROWS = 1 << 17
_HEAVY_ROWS = 1024


#: The rows of a table, some at a time; an InputError says that it is missing or damaged, or lacks a column.
batches = functools.partial(read_batches, rows=_ROWS, missing="is missing")


def matching(
    path: str, columns: Sequence[str], wanted: Callable[[np.ndarray], np.ndarray], rows: int = _HEAVY_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows whose doc_id is ``wanted`` (S16[n] → bool[n]), doc_id first; only row groups that have any are read.

    Raises:
        InputError: as :func:`batches`.
    """
    own = list(dict.fromkeys(["doc_id", *columns]))
    with open_table(path, own, missing="is missing") as table:
        for group in range(table.num_row_groups):
            ids = keys_of(table.read_row_group(group, ["doc_id"])["doc_id"])
            if not wanted(ids).any():
                continue
            for batch in table.iter_batches(rows, row_groups=[group], columns=own):
                found = batch.filter(pa.array(wanted(keys_of(batch.column("doc_id")))))
                if found.num_rows:
                    yield found.select(own)


def by_partition(rows: pa.Table) -> Iterator[tuple[str, str, pa.Table]]:
    """Source and partition of the rows of a table, each once, by name, and the rows of each in their order."""
    rows = rows.sort_by([("source", "ascending"), ("partition", "ascending")]).combine_chunks()
    names = list(zip(rows["source"].to_pylist(), rows["partition"].to_pylist(), strict=True))
    start = 0
    for (source, partition), own in itertools.groupby(names):
        count = sum(1 for _ in own)
        yield source, partition, rows.slice(start, count)
        start += count


def with_value(path: str, name: str) -> np.ndarray:
    """S16, sorted: the documents of which a table has a row where column ``name`` is not null.

    The column itself is read only where its statistics do not say that nothing of a row group is null.

    Raises:
        InputError: as :func:`batches`.
    """
    found = []
    with open_table(path, ["doc_id", name], missing="is missing") as table:
        for group in range(table.num_row_groups):
            whole = null_count(table, group, name) == 0
            columns = ["doc_id"] if whole else ["doc_id", name]
            for batch in table.iter_batches(_ROWS if whole else _HEAVY_ROWS, row_groups=[group], columns=columns):
                there = batch if whole else batch.filter(batch.column(name).is_valid())
                found.append(keys_of(there.column("doc_id")))
    return key_set(found)
