"""What every DuckDB connection of ours is given: its memory, a folder to spill to, and nothing that it loads itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

__all__ = ["connect", "default_memory", "lock", "open_run", "quoted"]

_DEFAULT_MEMORY_BYTES = 4 << 30


def default_memory() -> int:
    """DuckDB's memory in bytes where none is given: 4 GiB, at most half of the machine's."""
    return min(_DEFAULT_MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


@contextmanager
def connect(
    scratch: str, memory_bytes: int | None = None, threads: int | None = None
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection that spills below ``scratch`` (None: :func:`default_memory`, every core)."""
    import duckdb

    config: dict[str, Any] = {
        "memory_limit": f"{memory_bytes or default_memory()}B",
        "temp_directory": os.path.join(scratch, "spill"),
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
    }
    with closing(duckdb.connect(":memory:", config=config | ({"threads": str(threads)} if threads else {}))) as found:
        yield found


@contextmanager
def open_run(
    run: str, memory_bytes: int | None = None, threads: int | None = None
) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """A connection, and the path by which it is to read the folder ``run``: no query can know it, and nothing in it is
    a glob or a quote."""
    with (
        tempfile.TemporaryDirectory(prefix="quern-sql-") as scratch,
        connect(scratch, memory_bytes, threads) as connection,
    ):
        alias = os.path.join(scratch, "run")
        os.symlink(run, alias)
        yield connection, alias


def quoted(text: str) -> str:
    """``text`` as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def lock(connection: duckdb.DuckDBPyConnection, folders: Iterable[str]) -> None:
    """From here on: these folders, no other file, no network, no setting."""
    listed = ", ".join(quoted(os.path.join(folder, "")) for folder in folders)
    connection.execute(f"SET allowed_directories = [{listed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
