"""Reads a run's Parquet tables one row group at a time, on any store; errors name the damaged file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.errors import InputError
from quern.lineage.index.tables import require_columns

__all__ = ["name_below", "opened", "read_group", "read_whole", "tables_in"]


@contextmanager
def opened(path: str, columns: Sequence[str]) -> Iterator[pq.ParquetFile]:
    """The file, which has each of ``columns`` once, those of doc_ids and hashes with 16 bytes a value.

    Raises:
        InputError: it is not there, or is no such table; inside the block too, for what cannot be read of it.
    """
    try:
        with storage.open_read(path) as file:
            table = pq.ParquetFile(file, pre_buffer=not storage.is_local(path))
            schema = table.schema_arrow
            require_columns(path, schema.names, columns)
            for name in ("doc_id", "post_filter_hash"):
                if name in columns and schema.field(name).type != pa.binary(16):
                    raise InputError(f"{path}: {name}: expected 16 bytes, got {schema.field(name).type}")
            yield table
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; pyarrow's own have no number
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())[:120]}") from None


def read_group(table: pq.ParquetFile, group: int, columns: Sequence[str] | None = None) -> pa.Table:
    """A row group; ``columns`` None: all."""
    return table.read_row_group(group, columns=None if columns is None else list(columns), use_threads=False)


def read_whole(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """The table in a file's bytes; read in this thread alone: one of pyarrow's own may still hold a Python object when
    the process ends, which aborts then."""
    file = pq.ParquetFile(io.BytesIO(data), pre_buffer=False)
    return file.read(None if columns is None else list(columns), use_threads=False)


def name_below(folder: str, path: str) -> str:
    """The name below ``folder`` of a file that ``storage.list_files(folder)`` gave."""
    if storage.is_local(folder):
        return os.path.relpath(storage.split(path)[1], storage.split(folder)[1])
    folder, path = (place.partition("://")[2].strip("/") for place in (folder, path))
    return path.removeprefix(f"{folder}/")


def tables_in(run: str, folder: str) -> list[tuple[str, str, str]]:
    """(source, partition, path below the run) of every table ``<folder>/<source>/<partition>.parquet``, sorted; what
    stands deeper is none."""
    found = []
    base = storage.join(run, folder)
    for path in storage.list_files(base):
        source, _, name = name_below(base, path).partition("/")
        if name.endswith(".parquet") and not name.startswith(".") and "/" not in name:
            found.append((source, name.removesuffix(".parquet"), f"{folder}/{source}/{name}"))
    return sorted(found)
