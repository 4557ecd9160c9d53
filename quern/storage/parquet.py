"""Opens Parquet tables on any store, as no other module does, and writes them in pieces.

The caller's thread alone decodes a table. A thread of pyarrow that reads a Python stream still releases its buffers
when the read has returned; where the process ends at that moment, it is aborted (apache/arrow #34314). A file of this
machine is opened by its path, so that there is no such stream; from a store, whose answers take their time, all
columns of a row group are fetched at once (``pre_buffer``).
"""

from __future__ import annotations

import errno
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.errors import InputError, QuernError, one_line

__all__ = ["Table", "TableWriter", "null_count", "open_table", "publish_table", "read_batches", "read_table",
           "require_columns", "table_in"]  # fmt: skip


#: What no reading ends with: the block that reads a table writes another file.
_OF_WRITING = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class Table(pq.ParquetFile):
    """An open table. Its errors are those of Arrow and of the stream; :func:`open_table` gives them the file's name."""

    def iter_batches(
        self, batch_size: int, row_groups: Sequence[int] | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows, or those of some row groups, at most ``batch_size`` at a time."""
        return super().iter_batches(batch_size, row_groups, _listed(columns), use_threads=False)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows."""
        return super().read(_listed(columns), use_threads=False)

    def read_row_group(self, i: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a row group."""
        return super().read_row_group(i, _listed(columns), use_threads=False)

    def read_row_groups(self, row_groups: Iterable[int], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of some row groups."""
        return super().read_row_groups(list(row_groups), _listed(columns), use_threads=False)


def _listed(columns: Sequence[str] | None) -> list[str] | None:
    return None if columns is None else list(columns)


@contextmanager
def open_table(
    path: str, columns: Sequence[str] = (), *, expected: str = "", missing: str | None = "no such file", **options: Any
) -> Iterator[Table]:
    """The table in a file, which has each of ``columns`` once.

    Args:
        path: of this machine or of a store.
        columns: see :func:`require_columns`.
        expected: what else the file should be, for the error about a column.
        missing: what the error says of a file that is not there; None: FileNotFoundError is raised.
        options: of :class:`pyarrow.parquet.ParquetFile`.

    Raises:
        InputError: the file is not there, or cannot be read, inside the block too: what Arrow refuses there.
    """
    local, inside = storage.is_local(path), False
    try:
        with (
            pa.OSFile(storage.split(path)[1]) if local else storage.open_read(path) as source,
            Table(source, pre_buffer=not local, **options) as table,
        ):
            if columns:
                require_columns(path, table.schema_arrow.names, columns, expected)
            inside = True
            yield table
    except QuernError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        number = error.errno if isinstance(error, OSError) else None
        if inside and (getattr(error, "filename", None) is not None or number in _OF_WRITING):
            raise  # of another file: Arrow gives no name
        if isinstance(error, FileNotFoundError):
            if missing is None:
                raise
            raise InputError(f"{path}: {missing}") from None
        # Arrow's message of a local file begins with its path, however long
        why = os.strerror(number) if local and number else one_line(error, 120)
        raise InputError(f"{path}: cannot be read: {why}") from None


def read_batches(
    path: str, columns: Sequence[str] | None = None, rows: int = 1 << 16, **options: Any
) -> Iterator[pa.RecordBatch]:
    """The rows of a table, at most ``rows`` at a time; ``columns`` None: all. See :func:`open_table`."""
    with open_table(path, columns or (), **options) as table:
        yield from table.iter_batches(rows, columns=columns)


def read_table(path: str, columns: Sequence[str] | None = None, **options: Any) -> pa.Table:
    """All rows of a table; ``columns`` None: all. See :func:`open_table`."""
    with open_table(path, columns or (), **options) as table:
        return table.read(columns)


def table_in(data: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """All rows of the table in a file's bytes, with the columns of ``schema`` (None: as they are).

    Raises:
        InputError: it is no such table; the error has no name of a file.
    """
    try:
        table = Table(io.BytesIO(data), pre_buffer=False).read()
        return table if schema is None else table.select(schema.names).cast(schema)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise InputError(one_line(error, 120)) from None


def publish_table(path: str, table: pa.Table, **options: Any) -> None:
    """Write a table to a file, atomically; ``options``: of :func:`pyarrow.parquet.write_table`."""
    with storage.publish(path) as file:
        pq.write_table(table, file, compression="zstd", **options)


class TableWriter:
    """Writes a table to a stream, whatever pieces it comes in: a row group has ``rows`` rows, and fewer where they have
    ``size`` bytes; ``options``: of :class:`pyarrow.parquet.ParquetWriter`."""

    def __init__(
        self, file: IO[bytes], schema: pa.Schema, *, rows: int = 1 << 20, size: float = math.inf, **options: Any
    ) -> None:
        self._writer = pq.ParquetWriter(file, schema, compression="zstd", **options)
        self._schema, self._rows, self._size = schema, rows, size
        self._held: list[pa.Table] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._flush()
        self._writer.close()

    def add(self, table: pa.Table) -> None:
        """Append rows."""
        if len(table):
            self._held.append(table.cast(self._schema))
        if sum(map(len, self._held)) >= self._rows or sum(own.nbytes for own in self._held) >= self._size:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held), row_group_size=self._rows)
            self._held = []


def null_count(table: Table, group: int, name: str) -> int | None:
    """How many rows of a row group have null in a column of the top level; None: the file does not say."""
    known = table.metadata.row_group(group).column(table.schema_arrow.names.index(name)).statistics
    return known.null_count if known is not None and known.has_null_count else None


def require_columns(path: str, names: Sequence[str], wanted: Iterable[str], expected: str = "") -> None:
    """Refuse a table, whose columns are ``names``, that has not each of ``wanted`` once.

    Raises:
        InputError: with the first that is missing or stands there twice; ``expected``: what else it should be.
    """
    for name in wanted:
        count = names.count(name)
        if count != 1:
            told = f"has no column {name!r}" if not count else f"has {count} columns {name!r}, expected one"
            raise InputError(f"{path}: {told}{expected and f'; expected {expected}'}")
