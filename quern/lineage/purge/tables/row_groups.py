"""Reads a run's Parquet tables one row group at a time, on any store; errors name the damaged file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from quern import storage
from quern.errors import InputError
from quern.storage.parquet import Table, open_table

__all__ = ["GONE", "name_below", "opened", "tables_in"]

#: What is said of a table that a complete run has.
GONE = "no such file; the run is not complete"


@contextmanager
def opened(path: str, columns: Sequence[str]) -> Iterator[Table]:
    """The file, which has each of ``columns`` once, those of doc_ids and hashes with 16 bytes a value.

    Raises:
        InputError: it is not there, or is no such table; inside the block too, for what cannot be read of it.
    """
    with open_table(path, columns) as table:
        for name in ("doc_id", "post_filter_hash"):
            kind = table.schema_arrow.field(name).type if name in columns else pa.binary(16)
            if kind != pa.binary(16):
                raise InputError(f"{path}: {name}: expected 16 bytes, got {kind}")
        yield table


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
