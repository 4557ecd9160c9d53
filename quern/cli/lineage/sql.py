"""``quern lineage sql``: SQL over a run's tables."""

from __future__ import annotations

import datetime as dt
import math
import os
import sys
from decimal import Decimal
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quern.cli.open_run import note
from quern.cli.output import JSON, err_console, json_stdout, out_console, plain_line, reports_errors
from quern.lineage.sql.child import in_child
from quern.lineage.sql.query import QueryResult, query
from quern.storage.sql import default_memory
from quern.words import counted

__all__ = ["sql", "table_console"]

LIMIT = 1000
#: Characters of a cell on the terminal; ``--json`` has them all.
_CELL_CHARS = 200
_WIDE = 10_000


@reports_errors
def sql(
    run: Annotated[str, typer.Argument(help="A data run, or a training run for its steps.", metavar="RUN")],
    statement: Annotated[str, typer.Argument(help="One query.", metavar="SQL")],
    limit: Annotated[int, typer.Option(min=0, help="Rows to print; 0: all of them.")] = LIMIT,
    memory_gb: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="For DuckDB; the rest spills to TMPDIR. Lists and texts that a function makes: as much."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: one per core.")] = None,
    json: bool = JSON,
) -> None:
    """One SQL query (DuckDB's) over the views documents, verdicts, duplicates, spans, measures and steps: DESCRIBE
    documents names the columns of one. It reads the run's tables and nothing else, and writes nothing."""
    memory_bytes = default_memory() if memory_gb is None else int(memory_gb * 10**9)
    how: dict[str, Any] = {"limit": limit or None, "memory_bytes": memory_bytes, "threads": threads, "note": note}
    with json_stdout(json) as emit:
        found = in_child(partial(query, run, statement, **how), memory_bytes, threads or os.cpu_count() or 1)
        if json:
            emit(_document(found))
            return
        _print(found)


def _document(found: QueryResult) -> dict[str, Any]:
    return {
        "columns": [{"name": name, "type": kind} for name, kind in zip(found.columns, found.types, strict=True)],
        "rows": [dict(zip(found.columns, map(_value, row), strict=True)) for row in found.rows],
        "truncated": found.truncated,
    }


def _value(value: Any) -> Any:
    """As JSON has it: bytes as hex, times as ISO 8601, numbers that are not finite as null, the rest as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return float(value) if value.is_finite() else None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(_value(key)): _value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return str(value)


def table_console() -> Console:
    """For tables whose rows are long: in a file or a pipe they are one line each."""
    console = out_console()
    if not sys.stdout.isatty():
        console.width = _WIDE
    return console


def _print(found: QueryResult) -> None:
    console = table_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, kind in zip(found.columns, found.types, strict=True):
        numeric = kind.endswith(("INT", "INTEGER", "DOUBLE", "FLOAT")) or kind.startswith("DECIMAL")
        table.add_column(Text(_cell(name)), justify="right" if numeric else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*(Text("–", "dim") if value is None else Text(_cell(value)) for value in row))
    console.print(table)
    more = "; there are more (--limit 0 prints all)" if found.truncated else ""
    err_console().print(Text(counted(len(found.rows), "row") + more))


def _cell(value: Any) -> str:
    """One line of bounded length, without anything that would move a cursor."""
    return plain_line(value if isinstance(value, str) else str(_value(value)), _CELL_CHARS)
