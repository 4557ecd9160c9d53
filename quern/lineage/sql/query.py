"""Runs SQL over a run's views (:mod:`.views`) in DuckDB. Nothing is written but DuckDB's spill files, and those outside
of the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from quern import storage
from quern.data_pipeline.execution.run_directory import is_complete
from quern.errors import InputError, QuernError, first_line
from quern.lineage.sql.views import VIEWS, Note, define
from quern.storage.sql import lock, open_run
from quern.storage.sql_guard import check
from quern.train.history.branch import LEDGER_FILE

if TYPE_CHECKING:
    import duckdb

__all__ = ["UNFINISHED", "VIEWS", "QueryResult", "classify", "query", "query_table"]

UNFINISHED = "the run is not complete; what it has written so far is read"

_DATA_FOLDERS = ("verdicts", "documents", "duplicates", "tokens", "measures")
#: Of a result, as Python holds it; its rows are taken from DuckDB so many at once, for only then is it known how large
#: they are: more at once take no less time.
_RESULT_BYTES = 256 << 20
_ROWS_AT_ONCE = 16
R = TypeVar("R")


@dataclass(frozen=True)
class QueryResult:
    """Rows of a query: Python values as DuckDB gives them, in the order of ``columns`` (no name twice)."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool
    """There are more rows than were asked for."""


def query(
    run: str,
    sql: str,
    *,
    limit: int | None = None,
    memory_bytes: int | None = None,
    threads: int | None = None,
    note: Note = lambda line: None,
) -> QueryResult:
    """The first ``limit`` rows (None: all) of one SQL query over the run's views.

    ``memory_bytes`` (None: 4 GiB, at most half of the machine's) and ``threads`` (None: every core) are DuckDB's; what
    does not fit spills to the temporary folder (``TMPDIR``). ``note`` takes lines for the person: registered training
    runs that cannot be read.

    Raises:
        InputError: ``run`` is no run, or the SQL is wrong, is not one query, or reads something else than the views, or
            what it gives is larger than 256 MiB.
        QuernError: memory or disk did not suffice.
    """
    return _run(run, sql, partial(_fetch, limit=limit), memory_bytes, threads, note)


def query_table(
    run: str, sql: str, *, memory_bytes: int | None = None, threads: int | None = None, note: Note = lambda line: None
) -> pa.Table:
    """All rows of :func:`query`, as an Arrow table.

    Raises:
        InputError: as :func:`query`.
        QuernError: so too.
    """
    return _run(run, sql, _fetch_table, memory_bytes, threads, note)


def _run(
    run: str,
    sql: str,
    fetch: Callable[[duckdb.DuckDBPyConnection, str], R],
    memory_bytes: int | None,
    threads: int | None,
    note: Note,
) -> R:
    import duckdb

    run, training = classify(run)
    if not training and not is_complete(run):
        note(f"{run}: {UNFINISHED}")
    with open_run(run, memory_bytes, threads) as (connection, alias):
        wanted = check(connection, sql, ("steps",) if training else VIEWS)
        try:
            define(connection, run, training, alias, wanted, note)
            lock(connection, [os.path.join(alias, name) for name in _DATA_FOLDERS])
            return fetch(connection, sql)
        except duckdb.InterruptException:
            raise KeyboardInterrupt from None
        except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
            raise QuernError(f"sql: {first_line(error).replace(alias, run)}") from None
        except duckdb.Error as error:
            raise InputError(f"sql: {first_line(error).replace(alias, run)}") from None


def classify(run: str) -> tuple[str, bool]:
    """The run's folder, and whether it is a training run."""
    if not storage.is_local(run):
        raise InputError(f"{run}: lineage needs a local copy of the run")
    folder = os.path.abspath(storage.split(run)[1])
    if os.path.isfile(os.path.join(folder, LEDGER_FILE)):
        return folder, True
    if not os.path.isfile(os.path.join(folder, "run.json")):
        raise InputError(f"{run}: expected a data run or a training run: it has neither run.json nor {LEDGER_FILE}")
    return folder, False


def _fetch(connection: duckdb.DuckDBPyConnection, sql: str, *, limit: int | None) -> QueryResult:
    cursor = connection.execute(sql)  # its rows stream: what is not fetched is not computed
    described = cursor.description or []
    rows: list[tuple[Any, ...]] = []
    size = 0
    while limit is None or len(rows) <= limit:
        found = cursor.fetchmany(_ROWS_AT_ONCE if limit is None else min(_ROWS_AT_ONCE, limit + 1 - len(rows)))
        if not found:
            break
        rows += found
        size += sum(map(_size, found))
        _check_size(size, len(rows), "fewer of them (--limit)")
    truncated = limit is not None and len(rows) > limit
    names = _distinct([str(column[0]) for column in described])
    return QueryResult(names, tuple(str(column[1]) for column in described), rows[:limit], truncated)


def _fetch_table(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    reader: pa.RecordBatchReader = connection.sql(sql).to_arrow_reader()
    batches, size = [], 0
    for batch in reader:
        batches.append(batch)
        size += batch.nbytes
        _check_size(size, sum(map(len, batches)), "fewer of them")
    return pa.Table.from_batches(batches, reader.schema).rename_columns(_distinct(reader.schema.names))


def _check_size(size: int, rows: int, fewer: str) -> None:
    if size > _RESULT_BYTES:
        raise InputError(
            f"sql: the first {rows:,} rows are more than {_RESULT_BYTES >> 20} MiB; ask for {fewer}, for fewer "
            "columns, or for a part of long texts: left(text, 1000)"
        )


def _size(value: Any) -> int:
    """About how many bytes a value of a result takes."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(_size(key) + _size(item) for key, item in value.items())
    return size + sum(map(_size, value)) if isinstance(value, list | tuple) else size


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with ``_1``, ``_2`` … after those that came before."""
    found: list[str] = []
    for name in names:
        number, free = 0, name
        while free in found:
            number += 1
            free = f"{name}_{number}"
        found.append(free)
    return tuple(found)
