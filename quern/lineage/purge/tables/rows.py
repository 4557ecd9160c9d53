"""Reads rows of a run's tables by doc_id, in bounded batches, on any store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.page.keys import key_set, keys_of
from quern.errors import InputError

__all__ = ["batches", "matching", "with_value"]

_ROWS = 1 << 17
_HEAVY_ROWS = 1024


def batches(path: str, columns: Sequence[str], rows: int = _ROWS) -> Iterator[pa.RecordBatch]:
    """The rows of a table.

    Raises:
        InputError: it is missing or damaged, or lacks a column.
    """
    with _opened(path, columns) as table:
        yield from table.iter_batches(rows, columns=list(columns), use_threads=False)


def matching(
    path: str, columns: Sequence[str], wanted: Callable[[np.ndarray], np.ndarray], rows: int = _HEAVY_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows whose doc_id is ``wanted`` (S16[n] → bool[n]), doc_id first; only row groups that have any are read.

    Raises:
        InputError: as :func:`batches`.
    """
    own = list(dict.fromkeys(["doc_id", *columns]))
    with _opened(path, own) as table:
        for group in range(table.num_row_groups):
            ids = keys_of(table.read_row_group(group, ["doc_id"], use_threads=False)["doc_id"])
            if not wanted(ids).any():
                continue
            for batch in table.iter_batches(rows, row_groups=[group], columns=own, use_threads=False):
                found = batch.filter(pa.array(wanted(keys_of(batch.column("doc_id")))))
                if found.num_rows:
                    yield found.select(own)


def with_value(path: str, name: str) -> np.ndarray:
    """S16, sorted: the documents of which a table has a row where column ``name`` is not null.

    The column itself is read only where its statistics do not say that nothing of a row group is null.

    Raises:
        InputError: as :func:`batches`.
    """
    found = []
    with _opened(path, ["doc_id", name]) as table:
        place = table.schema_arrow.names.index(name)
        for group in range(table.num_row_groups):
            known = table.metadata.row_group(group).column(place).statistics
            whole = known is not None and known.has_null_count and known.null_count == 0
            columns = ["doc_id"] if whole else ["doc_id", name]
            for batch in table.iter_batches(
                _ROWS if whole else _HEAVY_ROWS, row_groups=[group], columns=columns, use_threads=False
            ):
                there = batch if whole else batch.filter(batch.column(name).is_valid())
                found.append(keys_of(there.column("doc_id")))
    return key_set(found)


@contextmanager
def _opened(path: str, columns: Sequence[str]) -> Iterator[pq.ParquetFile]:
    try:
        with storage.open_read(path) as file, pq.ParquetFile(file, pre_buffer=not storage.is_local(path)) as table:
            missing = [name for name in columns if name not in table.schema_arrow.names]
            if missing:
                raise InputError(f"{path}: has no column {missing[0]!r}")
            yield table
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{path}: is missing") from None
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())[:120]}") from None
