"""What every DuckDB connection of ours is given: its memory, a folder to spill to, and nothing that it loads itself."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

__all__ = ["default_memory", "lock", "quoted", "settings"]

_DEFAULT_MEMORY_BYTES = 4 << 30


def default_memory() -> int:
    """DuckDB's memory in bytes where none is given: 4 GiB, at most half of the machine's."""
    return min(_DEFAULT_MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def settings(memory_bytes: int | None, threads: int | None, scratch: str) -> dict[str, Any]:
    """The ``config`` of a connection that spills below ``scratch`` (None: :func:`default_memory`, every core)."""
    found = {
        "memory_limit": f"{memory_bytes or default_memory()}B",
        "temp_directory": os.path.join(scratch, "spill"),
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
    }
    return found | ({"threads": str(threads)} if threads else {})


def quoted(text: str) -> str:
    """``text`` as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def lock(connection: duckdb.DuckDBPyConnection, folders: Iterable[str]) -> None:
    """From here on: these folders, no other file, no network, no setting."""
    listed = ", ".join(quoted(os.path.join(folder, "")) for folder in folders)
    connection.execute(f"SET allowed_directories = [{listed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
