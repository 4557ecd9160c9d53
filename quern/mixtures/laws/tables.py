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
from quern.mixtures.laws.forms import Floats
from quern.storage.parquet import read_table

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
    tables = [_read(path) for path in paths]
    first, last = tables[0], tables[-1]
    if first is last:
        places = np.arange(first.num_rows)
        runs = [f"row {place + 1}" for place in places]
    else:
        runs, others = (_names(path, table, key) for path, table in zip(paths, tables, strict=True))
        if missing := [*sorted(set(runs) - set(others)), *sorted(set(others) - set(runs))]:
            raise InputError(f"{paths[0]} and {paths[-1]}: run {missing[0]} is in one alone; expected it in both")
        places = np.array([{run: place for place, run in enumerate(others)}[run] for run in runs])
    named = [SHARE + name if SHARE + name in first.column_names else name for name in sources] or _columns(
        first, SHARE, first is not last
    )
    tasks = dict(families or {name.removeprefix(LOSS): [name] for name in _columns(last, LOSS, first is not last)})
    if not named or not tasks:
        raise InputError(f"{paths[0]}: expected columns {SHARE}NAME and {LOSS}NAME, or a table of each kind")
    mixtures = np.column_stack([_numbers(paths[0], first, name, runs) for name in named])
    sums = mixtures.sum(axis=1)
    for run, share, least in zip(runs, sums, mixtures.min(axis=1), strict=True):
        if least < 0 or abs(share - 1) > 0.01:
            raise InputError(f"{paths[0]}: {run}: expected shares ≥ 0 that add up to 1, got {share:.4g} in all")
    if first is not last:
        runs = _names(paths[-1], last, key)
    losses = {
        family: np.mean([_numbers(paths[-1], last, name, runs) for name in names], axis=0)[places]
        for family, names in tasks.items()
    }
    return Runs(tuple(name.removeprefix(SHARE) for name in named), mixtures / sums[:, None], losses)


def _read(path: str) -> pa.Table:
    if path.endswith(".parquet"):
        return read_table(path)
    with storage.reading(path):
        data = storage.read_bytes(path)
    try:
        return pyarrow.csv.read_csv(io.BytesIO(data))
    except pa.ArrowException as error:
        raise InputError(f"{path}: not a CSV table: {first_line(error)}") from None


def _columns(table: pa.Table, prefix: str, all_floats: bool) -> list[str]:
    begun = [name for name in table.column_names if name.startswith(prefix)]
    return begun or [field.name for field in table.schema if all_floats and pa.types.is_floating(field.type)]


def _names(path: str, table: pa.Table, key: str) -> list[str]:
    if key not in table.column_names:
        raise InputError(f"{path}: has no column {key!r}; expected the one with the names of runs")
    names = [str(name) for name in table[key].to_pylist()]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: {key}: {max(names, key=names.count)!r} is there twice; expected each run once")
    return names


def _numbers(path: str, table: pa.Table, name: str, runs: Sequence[str]) -> Floats:
    if table.column_names.count(name) != 1:
        raise InputError(f"{path}: column {name!r} is there {table.column_names.count(name)} times; expected it once")
    for run, value in zip(runs, table[name].to_pylist(), strict=True):
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise InputError(f"{path}: {run}: {name}: expected a number, got {value!r}")
    return np.asarray(table[name].to_numpy(), float)
