"""Thins a run's columns for drawing, so that every extremum stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.train.report.history import Run

__all__ = ["RANGES", "Axes", "Series", "axes_of", "means", "numbers", "thin"]

#: Ranges of equally many steps in which each line keeps its first step, and those with its least and greatest value.
RANGES = 800
#: Points of a line of means.
_MEANS = 200

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Axes:
    """Where steps stand on each axis that the reader can choose: float64 [steps] each. ``hours``: since the start."""

    step: F64
    tokens: F64
    hours: F64

    def at(self, places: NDArray[np.int64]) -> Axes:
        """Those of some steps."""
        return Axes(self.step[places], self.tokens[places], self.hours[places])

    def to_dict(self) -> dict[str, list[float | None]]:
        """Plain JSON."""
        return {"step": numbers(self.step, 12), "tokens": numbers(self.tokens, 12), "hours": numbers(self.hours, 9)}


@dataclass(frozen=True)
class Series:
    """A line of a chart. ``look``: ``faint``, ``line``, ``dots`` or ``branch``; ``colour``: a number of the palette."""

    label: str
    axes: Axes
    values: F64
    look: str
    colour: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "label": self.label, "x": self.axes.to_dict(), "y": numbers(self.values), "look": self.look,
            "colour": self.colour,
        }  # fmt: skip


def axes_of(run: Run, rows: NDArray[np.int64]) -> Axes:
    """Where rows of the run's metrics stand, NaN where it does not tell: at the number of steps that are complete with
    it, which is 1 for step 0."""
    began = run.attempts[run.first].began
    return Axes(
        run.metrics.step[rows].astype(np.float64) + 1,
        run.metrics.column("tokens")[rows],
        (run.metrics.column("time")[rows] - began) / 3600,
    )


def thin(values: Sequence[F64] | F64) -> NDArray[np.int64]:
    """The places to draw of columns of equal length, ascending: all of a short one; of a longer one, in each of
    :data:`RANGES` ranges, the first and those of the least and the greatest value of each column, where it has one;
    and the last of all. What is not finite is drawn as a gap only where a whole range is."""
    columns = list(np.atleast_2d(values))
    size = len(columns[0])
    if size <= 4 * RANGES:
        return np.arange(size)
    edges = np.arange(RANGES) * size // RANGES
    found = [edges, np.array([size - 1])]
    for column in columns:
        for fill, best in ((np.inf, np.minimum), (-np.inf, np.maximum)):
            filled = np.where(np.isfinite(column), column, fill)
            extremes = np.repeat(best.reduceat(filled, edges), np.diff(edges, append=size))
            places = np.flatnonzero((filled == extremes) & np.isfinite(column))
            found.append(places[np.unique(np.searchsorted(edges, places, "right"), return_index=True)[1]])
    return np.unique(np.concatenate(found))


def means(axes: Axes, values: F64) -> tuple[Axes, F64] | None:
    """Means of ranges of equally many steps, each at the last step of its range; None for a run so short that they
    would be the values themselves."""
    size = len(values)
    if size < 2 * _MEANS or not np.isfinite(values).any():
        return None
    edges = np.arange(_MEANS) * size // _MEANS
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.int64), edges)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges)
    ends = np.append(edges[1:], size) - 1
    return axes.at(ends), np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def numbers(values: F64, digits: int = 6) -> list[float | None]:
    """For JSON: to so many significant digits, null for what is not finite."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
