"""Reads runs from tables: a swarm of ours, or shares and metrics of others' as CSV or Parquet."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv

from quern import storage
from quern.errors import InputError, first_line
from quern.mixtures.laws.fit import Floats
from quern.storage.parquet import read_table, require_columns

__all__ = ["LOSS", "SHARE", "Runs", "read_runs"]

SHARE, LOSS = "share:", "loss:"
"""How columns of a swarm's own table begin, before the name of a source."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Mixtures [n, sources] that were tried, and by family the loss [n] of each."""

    sources: tuple[str, ...]
    mixtures: Floats
    losses: Mapping[str, Floats]


def read_runs(
    paths: Sequence[str], key: str, sources: Sequence[str] = (), families: Mapping[str, Sequence[str]] | None = None
) -> Runs:
    """Runs of one table, or shares of the first and losses of the last one, joined by their column ``key``.

    Args:
        paths: files; those that end in .parquet are Parquet, the others CSV.
        key: the column with a run's name, which is looked at where there are two tables.
        sources: columns of shares, with or without :data:`SHARE`; none: those that begin with it, else all of floats in
            the first of two tables.
        families: the columns whose mean is a family's loss; none: each by itself that begins with :data:`LOSS`, else
            all of floats in the last of two tables.

    Raises:
        InputError: names the file, the column and the run that is wrong, missing or there twice.
    """
    two = len(paths) > 1
    tables = [_read(path, key if two else None) for path in paths]
    (runs, first), (others, last) = tables[0], tables[-1]
    if odd := sorted(set(runs) ^ set(others)):
        raise InputError(f"{paths[0]} and {paths[-1]}: run {odd[0]} is in one alone; expected it in both")
    named = [SHARE + name if SHARE + name in first.column_names else name for name in sources]
    named = named or _columns(first, SHARE, two)
    tasks = families or {name.removeprefix(LOSS): [name] for name in _columns(last, LOSS, two)}
    if not named or not tasks:
        raise InputError(f"{paths[0]}: expected columns {SHARE}NAME and {LOSS}NAME, or a table of each kind")
    mixtures = _numbers(paths[0], runs, first, named)
    sums = mixtures.sum(axis=1)
    for run, share, least in zip(runs, sums, mixtures.min(axis=1), strict=True):
        if least < 0 or abs(share - 1) > 0.01:
            raise InputError(f"{paths[0]}: {run}: expected shares ≥ 0 that add up to 1, got {share:.4g} in all")
    losses = {family: _numbers(paths[-1], runs, last, names).mean(axis=1) for family, names in tasks.items()}
    return Runs(tuple(name.removeprefix(SHARE) for name in named), mixtures / sums[:, None], losses)


def _read(path: str, key: str | None) -> tuple[list[str], pa.Table]:
    """The names of runs and a table in their order; without a ``key`` both are as in the file."""
    if path.endswith(".parquet"):
        table = read_table(path)
    else:
        with storage.reading(path):
            data = storage.read_bytes(path)
        try:
            table = pyarrow.csv.read_csv(io.BytesIO(data))
        except pa.ArrowException as error:
            raise InputError(f"{path}: not a CSV table: {first_line(error)}") from None
    if key is None:
        return [f"row {number}" for number in range(1, table.num_rows + 1)], table
    require_columns(path, table.column_names, [key], "the one with the names of runs")
    names = [str(name) for name in table[key].to_pylist()]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: {key}: {max(names, key=names.count)!r} is there twice; expected each run once")
    return sorted(names), table.take(sorted(range(len(names)), key=names.__getitem__))


def _columns(table: pa.Table, prefix: str, all_floats: bool) -> list[str]:
    begun = [name for name in table.column_names if name.startswith(prefix)]
    return begun or [field.name for field in table.schema if all_floats and pa.types.is_floating(field.type)]


def _numbers(path: str, runs: Sequence[str], table: pa.Table, names: Sequence[str]) -> Floats:
    """Columns of a table, [n, names]."""
    require_columns(path, table.column_names, names)
    for name in names:
        for run, value in zip(runs, table[name].to_pylist(), strict=True):
            if not isinstance(value, int | float) or not np.isfinite(value):
                raise InputError(f"{path}: {run}: {name}: expected a number, got {value!r}")
    return np.column_stack([table[name].to_numpy() for name in names]).astype(float)
