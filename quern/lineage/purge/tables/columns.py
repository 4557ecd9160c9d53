"""Reads some columns of a run's tables, on any store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.errors import InputError

__all__ = ["read_columns"]


def read_columns(
    path: str, columns: Sequence[str], rows: int, *, without_nulls: Mapping[str, str] = MappingProxyType({})
) -> Iterator[pa.Table]:
    """Some columns of a table, a bounded number of rows at a time; those of ``without_nulls`` are left out where the
    other that they stand in for is nowhere null."""
    try:
        with storage.open_read(path) as stream:
            file = pq.ParquetFile(stream, pre_buffer=not storage.is_local(path))
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise InputError(f"{path}: has no column {missing[0]!r}")
            needless = {name for name, other in without_nulls.items() if not _has_nulls(file, other)}
            for batch in file.iter_batches(batch_size=rows, columns=[name for name in columns if name not in needless]):
                yield pa.Table.from_batches([batch])
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; the run is not complete") from None
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())[:120]})") from None


def _has_nulls(file: pq.ParquetFile, name: str) -> bool:
    place = file.metadata.schema.names.index(name)
    for group in range(file.metadata.num_row_groups):
        known = file.metadata.row_group(group).column(place).statistics
        if known is None or known.null_count is None or known.null_count:
            return True
    return False
