"""Looks up duplicate decisions by document: its own decision, what was removed for it, and its cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from quern.data_pipeline.page.keys import bytes_of
from quern.errors import InputError, one_line
from quern.lineage.index.columns import I64, Column
from quern.lineage.index.joins import Numbers, Pairs
from quern.lineage.index.segments import Segment
from quern.storage.parquet import Table, open_table, require_columns

__all__ = ["CLUSTERS", "DECISIONS", "Duplicates", "read_cells", "read_row", "write_duplicates"]

DECISIONS = "decisions.parquet"
CLUSTERS = "clusters.parquet"
#: The two columns of doc_ids of each table below ``duplicates/``.
_IDS = {DECISIONS: ("doc_id", "duplicate_of"), CLUSTERS: ("doc_id", "cluster_id")}
_ROWS = 1 << 17


def write_duplicates(folder: str, scratch: str, tables: str, segments: Sequence[Segment], num_documents: int) -> None:
    """Write the index of the tables in folder ``tables`` to ``folder``, which is empty; a missing table has no rows.

    Raises:
        InputError: a table is damaged, or names a document that has no verdict.
    """
    for table, names in ((DECISIONS, ("decision_of", "removed_for")), (CLUSTERS, ("cluster_of", "members_of"))):
        path, first = os.path.join(tables, table), 0
        rows = _num_rows(path)
        forth, back = (Pairs(scratch, name, rows, num_documents) for name in names)
        for own, others in _numbers(path, _IDS[table], scratch, segments, rows):
            forth.add(own, np.arange(first, first + len(own)) if table == DECISIONS else others)
            back.add(others, own)
            first += len(own)
        for name, pairs in zip(names, (forth, back), strict=True):
            pairs.write(f"{folder}/{name}")


def _numbers(
    path: str, columns: tuple[str, str], scratch: str, segments: Sequence[Segment], rows: int
) -> Iterator[tuple[I64, I64]]:
    """The documents that two columns of a table name, in the order of its rows."""
    name = os.path.basename(path)
    pair = [Numbers(scratch, f"{name}.{column}", segments, rows) for column in columns]
    for ids in _batches(path, columns):
        for wanted, own in zip(pair, ids, strict=True):
            wanted.add(own)
    first = 0
    for both in zip(pair[0].chunks(), pair[1].chunks(), strict=True):
        for column, numbers in zip(columns, both, strict=True):
            wrong = np.flatnonzero(numbers < 0)
            if len(wrong):
                found = "none" if numbers[wrong[0]] == -1 else "two"
                row = first + wrong[0]
                raise InputError(f"{path}: row {row}: {column}: expected a document with one verdict row, got {found}")
        yield both
        first += len(both[0])


def _num_rows(path: str) -> int:
    if not os.path.exists(path):
        return 0
    with open_table(path) as table:
        return int(table.metadata.num_rows)


def _batches(path: str, columns: tuple[str, str]) -> Iterator[list[memoryview]]:
    """The bytes of two columns of hashes, some rows at a time."""
    if not os.path.exists(path):
        return
    with open_table(path, columns) as table:
        for batch in table.iter_batches(_ROWS, columns=columns):
            parts = []
            for name in columns:
                ids = batch[name].cast(pa.binary(16))
                if ids.null_count:
                    raise InputError(f"{path}: {name}: expected 16 bytes in every row, got null")
                parts.append(bytes_of(ids))
            yield parts


def read_row(path: str, row: int, schema: pa.Schema) -> dict[str, Any]:
    """One row of a Parquet file; only its row group is read, and of that the columns of ``schema``, as it says, and
    those of numbers, which are measurements.

    Raises:
        InputError: the file cannot be read, has no such row or not these columns, or a value in it is none of its type:
            text that is not UTF-8, a time beyond the year 9999.
    """
    with open_table(path) as table:
        kinds = {own.name: own.type for own in table.schema_arrow}
        numbers = [n for n, kind in kinds.items() if pa.types.is_floating(kind) or pa.types.is_integer(kind)]
        wanted = list(dict.fromkeys([*schema.names, *numbers]))
        require_columns(path, table.schema_arrow.names, wanted)
        if row >= table.metadata.num_rows:
            raise InputError(f"{path}: has {table.metadata.num_rows} rows, expected more; it has changed")
        ((_, columns),) = _read_rows(table, np.array([row]), wanted)
    found = {}
    for name in columns.column_names:
        column = columns[name]
        kind = schema.field(name).type if name in schema.names else column.type
        try:
            found[name] = column.cast(kind)[0].as_py()
        except UnicodeDecodeError:
            raise InputError(f"{path}: row {row}: {name}: expected UTF-8") from None
        except pa.ArrowException:
            raise InputError(f"{path}: row {row}: {name}: expected {kind}, got {column.type}") from None
        except (OverflowError, ValueError, KeyError) as error:  # a time outside Python's range, an unknown zone
            raise InputError(f"{path}: row {row}: {name}: expected {kind} ({one_line(error, 120)})") from None
    return found


def read_cells(path: str, rows: I64, columns: Sequence[str]) -> list[dict[str, Any]]:
    """``columns`` of some rows of a Parquet file; only their row groups are read.

    Raises:
        InputError: the file cannot be read, or has no such rows or columns.
    """
    found: list[dict[str, Any]] = [{}] * len(rows)
    with open_table(path, columns) as table:
        for mine, read in _read_rows(table, rows, columns):
            for place, cells in zip(mine.tolist(), read.to_pylist(), strict=True):
                found[place] = cells
    return found


def _read_rows(table: Table, rows: I64, columns: Sequence[str]) -> Iterator[tuple[I64, pa.Table]]:
    """Places in ``rows``, and those rows, a row group of the file at a time."""
    edges = np.cumsum([0, *(table.metadata.row_group(n).num_rows for n in range(table.metadata.num_row_groups))])
    groups = np.searchsorted(edges, rows, "right") - 1
    for group in np.unique(groups).tolist():
        mine = np.flatnonzero(groups == group)
        yield mine, table.read_row_group(group, columns).take(rows[mine] - edges[group])


class _Pairs:
    def __init__(self, path: str) -> None:
        self.numbers = Column(f"{path}.numbers", "<i8")
        self._values = Column(f"{path}.values", "<i8").sized(len(self.numbers))

    def check(self) -> None:
        self.numbers.check()
        self._values.check()

    def of(self, number: int) -> I64:
        """The values of a document, ascending."""
        return self._values.slice(*self.numbers.range(number)).astype(np.int64)


class Duplicates:
    """Reads what :func:`write_duplicates` wrote."""

    def __init__(self, folder: str) -> None:
        names = ("decision_of", "removed_for", "cluster_of", "members_of")
        self._pairs = {name: _Pairs(f"{folder}/{name}") for name in names}

    def check(self) -> None:
        """Compare every checksum."""
        for pairs in self._pairs.values():
            pairs.check()

    def decision_row(self, number: int) -> int | None:
        """The row of the document's decision in its table; None if it was not removed."""
        rows = self._pairs["decision_of"].of(number)
        return int(rows[0]) if len(rows) else None

    def removed_for(self, number: int) -> I64:
        """The documents that were removed in favour of this one, ascending."""
        return self._pairs["removed_for"].of(number)

    def cluster(self, number: int) -> I64:
        """All documents of its cluster, itself included, ascending; none if it is alone."""
        clusters = self._pairs["cluster_of"].of(number)
        return self._pairs["members_of"].of(int(clusters[0])) if len(clusters) else clusters
