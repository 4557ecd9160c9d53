"""Checks a Parquet table before one of its columns is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quern.errors import InputError

__all__ = ["require_columns"]


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
