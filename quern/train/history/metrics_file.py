"""Reads ``metrics.jsonl``, of any version, also while a run appends to it: as columns, or its last step alone. Imports
no torch."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.errors import QuernError

__all__ = [
    "METRICS_FILE", "MetricsTable", "Validation", "held_out", "numbers", "read_metrics", "steps_of_metrics", "when",
]  # fmt: skip

METRICS_FILE = "metrics.jsonl"

#: Numbers of a step that are kept: a file that has more names than this was not written by a trainer.
_MAX_COLUMNS = 2_000
#: The end of the file in which :func:`steps_of_metrics` looks for the last step.
_TAIL_BYTES = 1 << 16
#: Beyond all steps and attempts, as in the ledger.
_LIMIT = 1 << 40


@dataclass(frozen=True)
class Validation:
    """Held-out loss after ``step`` completed steps, in nats a target, and by source; NaN where it is not finite. In the
    file ``row`` rows of steps stand before it. ``time``: seconds since 1970, NaN if not told."""

    step: int
    row: int
    time: float
    loss: float
    sources: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class MetricsTable:
    """The steps in the order of the file. ``step`` and ``attempt``: int64 [rows]. ``columns``: float64 [rows] of every
    other number (:func:`numbers`), NaN where a row has none; ``time`` as seconds since 1970. ``loads``: by row, where
    it tells them, the tokens that chose each expert, int64 [layers with experts, experts]. ``damaged``: the numbers of
    lines that are no row; a machine that stops leaves such a line, since metrics are not synced. The last line, if it
    is not whole yet, is none of them."""

    step: NDArray[np.int64]
    attempt: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.float64]]
    validations: tuple[Validation, ...]
    damaged: tuple[int, ...]
    loads: Mapping[int, NDArray[np.int64]]

    def column(self, name: str) -> NDArray[np.float64]:
        """A column, NaN throughout where the file has none of that name."""
        found = self.columns.get(name)
        return np.full(len(self.step), math.nan) if found is None else found


def numbers(row: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, float]]:
    """Every finite number of a line, true as 1, those in mappings by ``outer.inner``."""
    for name, value in row.items():
        if isinstance(value, float | int):
            if -1e300 < value < 1e300:
                yield outer + name, value
        elif isinstance(value, dict) and outer.count(".") < 2:
            yield from numbers(value, f"{outer}{name}.")


def held_out(told: Mapping[str, float]) -> dict[str, float]:
    """Losses by source and set in the :func:`numbers` of a validation."""
    return {
        name.partition(".")[2].removesuffix(".loss"): loss for name, loss in told.items()
        if name.startswith(("sources.", "sets.")) and name.endswith(".loss")
    }  # fmt: skip


def when(line: Mapping[str, Any]) -> float:
    """When a line of metrics or of the ledger was written, in seconds since 1970; NaN where it does not tell."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan


def read_metrics(run_dir: str) -> MetricsTable:
    """The metrics of the run in ``run_dir``; none where it has no such file.

    Raises:
        QuernError: the file cannot be read.
    """
    columns: dict[str, array[float]] = defaultdict(lambda: array("d"))
    validations, damaged, rows, loads = [], [], 0, {}
    for number, line in enumerate(_lines(os.path.join(run_dir, METRICS_FILE)), 1):
        try:
            row = json.loads(line)
            told, step, kind = {**dict(numbers(row)), "time": when(row)}, row["step"], row["kind"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            step, kind = -1, ""
        if type(step) is not int or not 0 <= step < _LIMIT:
            damaged.append(number)
        elif kind == "step":
            for name, value in told.items():
                if name in columns or len(columns) < _MAX_COLUMNS:
                    values = columns[name]
                    if len(values) < rows:
                        values.extend([math.nan] * (rows - len(values)))
                    values.append(value)
            if (counts := _counts(row)) is not None:
                loads[rows] = counts
            rows += 1
        elif kind == "validation":
            validations.append(Validation(step, rows, told["time"], told.get("loss", math.nan), held_out(told)))
    found = {name: np.array([*values, *[math.nan] * (rows - len(values))]) for name, values in columns.items()}
    steps = found.pop("step", np.zeros(0)).astype(np.int64)
    # where rows do not tell, an attempt begins at a step that is not after the one before
    counted = np.cumsum(np.diff(steps, prepend=-1) <= 0)
    told_attempt = found.pop("attempt", np.full(rows, math.nan))
    attempt = np.where((told_attempt >= 0) & (told_attempt < _LIMIT), told_attempt, counted).astype(np.int64)
    return MetricsTable(steps, attempt, found, tuple(validations), tuple(damaged), loads)


def steps_of_metrics(run_dir: str, attempt: int) -> int:
    """How many steps were complete when the newest line of metrics.jsonl that is ``attempt``'s was written; 0 where no
    line says it."""
    try:
        with open(os.path.join(run_dir, METRICS_FILE), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # torn, or the rest of a line that began before the tail
            continue
        if isinstance(row, dict) and row.get("kind") == "step" and type(row.get("step")) is int:
            return row["step"] + 1 if row.get("attempt") == attempt else 0
    return 0


def _counts(row: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """``experts.counts`` of a line, where they are whole numbers of equally many experts a layer."""
    try:
        found = np.array(row["experts"]["counts"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return found.astype(np.int64) if found.dtype.kind == "i" and found.ndim == 2 and found.min(initial=0) >= 0 else None


def _lines(path: str) -> Iterator[bytes]:
    """Each whole line."""
    try:
        with open(path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except FileNotFoundError:
        return
    except OSError as error:
        raise QuernError(f"{path}: cannot be read ({error.strerror})") from None
