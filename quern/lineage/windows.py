"""Finds which windows contain a span of a stream, and which of its tokens are inputs and targets there.

Window i of a stream holds tokens iL … iL + L: position p of its sequence has token iL + p as input and token iL + p + 1
as target. Parts are given in positions of the sequence, [0, L).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from quern.lineage.index.columns import I64, Bools

__all__ = ["Parts", "never_visited", "parts", "touching"]


@dataclass(frozen=True)
class Parts:
    """Positions [start, stop) of a sequence at which a span's tokens are input, and target; empty ones are [0, 0)."""

    input_starts: I64
    input_stops: I64
    target_starts: I64
    target_stops: I64

    @property
    def any(self) -> Bools:
        """Whether the span is input or target at all."""
        return (self.input_stops > self.input_starts) | (self.target_stops > self.target_starts)


def touching(starts: I64, stops: I64, seq_len: int, windows: int) -> tuple[I64, I64]:
    """The first window that any token of each span [start, stop) is in, and how many windows are (0: none)."""
    first = np.maximum(0, -(-(starts - seq_len) // seq_len))
    last = np.minimum((stops - 1) // seq_len, windows - 1)
    return first, np.maximum(0, np.where(stops > starts, last - first + 1, 0))


def parts(
    starts: I64, stops: I64, windows: I64, seq_len: int, *, heads: ArrayLike, purged: ArrayLike, document_mask: bool
) -> Parts:
    """What of each span [start, stop) is input and target in a window that it touches, span by span.

    ``heads``: whether the span's first token is its document's: with document masks it is no target. ``purged``: no
    token of the span is a target.
    """
    origin = windows * seq_len
    input_starts = np.maximum(starts - origin, 0)
    input_stops = np.minimum(stops - origin, seq_len)
    masked = np.asarray(heads, np.bool_) & document_mask
    target_starts = np.maximum(starts + masked - origin - 1, 0)
    target_stops = np.where(purged, 0, np.minimum(stops - origin - 1, seq_len))
    return Parts(*_cleared(input_starts, input_stops), *_cleared(target_starts, target_stops))


def never_visited(starts: I64, stops: I64, seq_len: int, windows: int) -> I64:
    """The number of tokens of each span outside every window: those after the last one's last target."""
    end = windows * seq_len + 1 if windows else 0
    return np.maximum(0, stops - np.maximum(starts, end))


def _cleared(starts: I64, stops: I64) -> tuple[I64, I64]:
    some = stops > starts
    return np.where(some, starts, 0), np.where(some, stops, 0)
