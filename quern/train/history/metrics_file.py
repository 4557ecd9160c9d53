"""Reads ``metrics.jsonl`` as columns, of any version, also while a run appends to it. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.errors import QuernError

__all__ = ["METRICS_FILE", "MetricsTable", "Validation", "read_metrics"]

METRICS_FILE = "metrics.jsonl"

#: Numbers of a step that are kept: a file that has more names than this was not written by a trainer.
_MAX_COLUMNS = 2_000
_NAN = float("nan")


@dataclass(frozen=True)
class Validation:
    """Held-out loss after ``step`` completed steps."""

    step: int
    row: int
    """How many rows of steps stand before it in the file."""
    time: float
    """Seconds since 1970; NaN where the line does not tell."""
    loss: float
    """Nats a target; NaN where it is not finite."""
    tokens: int
    """Targets."""
    sources: Mapping[str, float]


@dataclass(frozen=True)
class MetricsTable:
    """The steps in the order of the file.

    ``step`` and ``attempt``: int64 [rows]. ``time``: float64 [rows], seconds since 1970. ``columns``: float64 [rows] of
    every other number, true and false as 1 and 0, NaN where a row has none; numbers in mappings as ``outer.inner``.
    ``damaged``: the numbers of lines that are no row; a machine that stops leaves such a line, since metrics are not
    synced. The last line, if it is not whole yet, is none of them.
    """

    step: NDArray[np.int64]
    attempt: NDArray[np.int64]
    time: NDArray[np.float64]
    columns: Mapping[str, NDArray[np.float64]]
    validations: tuple[Validation, ...]
    damaged: tuple[int, ...]

    def column(self, name: str) -> NDArray[np.float64]:
        """A column, NaN throughout where the file has none of that name."""
        found = self.columns.get(name)
        return np.full(len(self.step), _NAN) if found is None else found


def read_metrics(run_dir: str) -> MetricsTable:
    """The metrics of the run in ``run_dir``; none where it has no such file.

    Raises:
        QuernError: the file cannot be read.
    """
    rows, steps, validations = _Rows(), array("q"), []
    damaged: list[int] = []
    for number, row in _lines(os.path.join(run_dir, METRICS_FILE)):
        kind = row.get("kind")
        step = row.get("step")
        if kind not in ("step", "validation") or type(step) is not int or not 0 <= step < 1 << 40:
            if row and isinstance(kind, str) and kind not in ("step", "validation"):
                continue  # of a later version
            damaged.append(number)
        elif kind == "step":
            steps.append(step)
            rows.add(row)
        else:
            validations.append(_validation(row, step, len(steps)))
    columns = {name: np.frombuffer(values) for name, values in rows.columns.items()}
    for values in columns.values():
        values[np.isinf(values)] = _NAN
    found = np.frombuffer(steps, np.int64) if steps else np.zeros(0, np.int64)
    attempt = _attempts(found, columns.pop("attempt", np.full(len(found), _NAN)))
    time = columns.pop("time", np.full(len(found), _NAN))
    columns.pop("step", None)
    return MetricsTable(found, attempt, time, columns, tuple(validations), tuple(damaged))


class _Rows:
    """Rows as columns, which may begin and end anywhere."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self._rows = 0

    def add(self, row: Mapping[str, Any]) -> None:
        put = self._put("", row)
        self._rows += 1
        if put < len(self.columns):
            for values in self.columns.values():
                if len(values) < self._rows:
                    values.append(_NAN)

    def _put(self, outer: str, row: Mapping[str, Any]) -> int:
        put = 0
        for name, value in row.items():
            kind = type(value)
            if kind is float or kind is int or kind is bool or value is None:
                put += self._append(outer + name, value)
            elif name == "time" and not outer:
                put += self._append(name, _seconds(value))
            elif kind is dict and outer.count(".") < 2:
                put += self._put(f"{outer}{name}.", value)
        return put

    def _append(self, name: str, value: float | None) -> int:
        values = self.columns.get(name)
        if values is None:
            if value is None or len(self.columns) >= _MAX_COLUMNS:
                return 0
            values = self.columns[name] = array("d", [_NAN]) * self._rows
        if len(values) > self._rows:  # "a.b" beside {"a": {"b": …}}
            return 0
        try:
            values.append(_NAN if value is None else value)
        except OverflowError:
            values.append(_NAN)
        return 1


def _lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each whole line, and what it holds: nothing if it is no JSON object."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                yield number, row if isinstance(row, dict) else {}
    except FileNotFoundError:
        return
    except OSError as error:
        raise QuernError(f"{path}: cannot be read ({error.strerror})") from None


def _validation(row: Mapping[str, Any], step: int, rows: int) -> Validation:
    given = row.get("sources")
    sources = {
        name: _number(own.get("loss")) for name, own in (given if isinstance(given, dict) else {}).items()
        if isinstance(own, dict)
    }  # fmt: skip
    tokens = row.get("tokens")
    return Validation(
        step, rows, _seconds(row.get("time")), _number(row.get("loss")), tokens if type(tokens) is int else 0, sources
    )


def _number(value: object) -> float:
    try:
        found = float(value) if isinstance(value, int | float) else _NAN
    except OverflowError:
        return _NAN
    return found if math.isfinite(found) else _NAN


def _seconds(value: object) -> float:
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else _NAN
    except (ValueError, OverflowError):
        return _NAN


def _attempts(steps: NDArray[np.int64], told: NDArray[np.float64]) -> NDArray[np.int64]:
    """What the rows tell; where they do not, an attempt begins at a step that is not after the one before."""
    counted = np.cumsum(np.diff(steps, prepend=-1) <= 0)
    with np.errstate(invalid="ignore"):
        return np.where((told >= 0) & (told < 1 << 40), told, counted).astype(np.int64)
