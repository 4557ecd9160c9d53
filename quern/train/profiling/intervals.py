"""Reduces overlapping and nested intervals to one owner for every instant. Imports no torch.

An interval is ``(start, stop)`` in nanoseconds, ``stop`` not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quern.train.step.trace import Event

__all__ = ["Interval", "assign", "clipped", "covered", "nest"]

Interval = tuple[int, int]


def nest(events: Sequence[Event]) -> tuple[list[int | None], list[tuple[int, int, int]]]:
    """Nest the events of one thread. ``events`` in order of start, longer ones first.

    Returns, for each event, the number of the one it began in, and ``(start, stop, number)`` of the pieces in which an
    event was the innermost, which is the one that began last of those that had not ended.
    """
    parents: list[int | None] = []
    pieces: list[tuple[int, int, int]] = []
    stack: list[int] = []
    now = 0

    def until(instant: int) -> None:
        nonlocal now
        while stack and now < instant:
            top = stack[-1]
            stop = min(events[top].stop, instant)
            if stop > now:
                pieces.append((now, stop, top))
                now = stop
            if events[top].stop <= now:
                stack.pop()
        now = max(now, instant)

    for number, event in enumerate(events):
        until(event.start)
        while stack and events[stack[-1]].stop <= event.start:
            stack.pop()
        parents.append(stack[-1] if stack else None)
        stack.append(number)
        now = event.start
    until(max((event.stop for event in events), default=0))
    return parents, pieces


def assign(layers: Mapping[str, Sequence[Interval]], windows: Sequence[Interval]) -> dict[str | None, int]:
    """Nanoseconds of each layer inside the windows, every instant being the first layer's that covers it; those of no
    layer under None. Sums up to the windows' length, exactly; windows do not overlap."""
    names = list(layers)
    left = _flat(windows)
    taken: dict[str | None, int] = {}
    for name in names:
        mine = _flat(layers[name])
        rest = _minus(left, mine)
        taken[name] = _length(left) - _length(rest)
        left = rest
    taken[None] = _length(left)
    return taken


def covered(intervals: Sequence[Interval], windows: Sequence[Interval]) -> int:
    """Nanoseconds inside the windows in which at least one of the intervals was under way."""
    inside = assign({"": intervals}, windows)
    return inside[""]


def clipped(interval: Interval, windows: Sequence[Interval]) -> int:
    """Nanoseconds of one interval inside the windows."""
    return sum(max(0, min(interval[1], stop) - max(interval[0], start)) for start, stop in windows)


def _flat(intervals: Sequence[Interval] | np.ndarray) -> np.ndarray:
    """The union, [n, 2], in order, without touching neighbours."""
    spans = np.array(intervals, np.int64).reshape(-1, 2)
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    return np.stack([spans[first, 0], reach[np.concatenate([np.flatnonzero(first)[1:] - 1, [len(spans) - 1]])]], axis=1)


def _minus(spans: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What of a flat union is not in the other."""
    if not len(spans) or not len(other):
        return spans
    edges = np.unique(np.concatenate([spans.ravel(), other.ravel()]))
    begins, stops = edges[:-1], edges[1:]
    keep = _holds(spans, begins) & ~_holds(other, begins)
    return _flat(np.stack([begins[keep], stops[keep]], axis=1))


def _holds(spans: np.ndarray, instants: np.ndarray) -> np.ndarray:
    """Whether each instant is inside the flat union."""
    place = np.searchsorted(spans[:, 0], instants, side="right") - 1
    inside: np.ndarray = (place >= 0) & (instants < spans[np.maximum(place, 0), 1])
    return inside


def _length(spans: np.ndarray) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())
