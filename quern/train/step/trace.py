"""Reads an untrusted ``torch.profiler`` trace (chrome://tracing, Perfetto). Imports no torch.

Times are whole nanoseconds, so that sums of them are exact.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quern.errors import InputError, one_line

__all__ = ["STEP", "Event", "Trace", "read_trace"]

STEP = "ProfilerStep#"
"""How the annotation of a step begins: torch.profiler's own name for it."""

#: Kinds of events that are read; flows, stacks, counters and the device's copies of annotations are not.
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

#: The longest time in microseconds that is whole nanoseconds in a double.
_LAST_US = 2.0**53 / 1e3


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time on a thread of the host, or on a stream of the device."""

    name: str
    category: str
    lane: tuple[Any, Any]
    """Process and thread, or device and stream."""
    start: int
    stop: int
    args: Mapping[str, Any]
    where: str
    """For error messages: file and number."""

    def whole(self, field: str) -> int | None:
        """An argument that is an integer; None: there is none.

        Raises:
            InputError: it is something else.
        """
        value = self.args.get(field)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise InputError(f"{self.where}.args.{field}: expected an integer, got {value!r:.80}")

    def listed(self, field: str) -> list[Any]:
        """An argument that is a list; empty: there is none.

        Raises:
            InputError: it is something else.
        """
        value = self.args.get(field, [])
        if isinstance(value, list):
            return value
        raise InputError(f"{self.where}.args.{field}: expected a list, got {value!r:.80}")


@dataclass(frozen=True)
class Trace:
    """One rank's trace; events in order of their start, longer ones first."""

    path: str
    rank: int | None
    host: tuple[Event, ...]
    device: tuple[Event, ...]
    """Empty: the host itself is what computes."""


def read_trace(path: str) -> Trace:
    """The trace in a ``.json`` or ``.json.gz`` file.

    Raises:
        InputError: the file is no such trace; the field is named.
    """
    document = _document(path)
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise InputError(f"{path}: traceEvents: expected a list of events, as torch.profiler exports it")
    events = [
        event
        for number, row in enumerate(document["traceEvents"])
        if (event := _event(row, f"{path}: traceEvents[{number}]")) is not None
    ]
    events.sort(key=lambda event: (event.start, -event.stop))
    host = tuple(event for event in events if event.category in _HOST)
    if not host:
        raise InputError(f"{path}: traceEvents: expected events of category cpu_op, found none")
    return Trace(path, _rank(document, path), host, tuple(event for event in events if event.category in _DEVICE))


def _document(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json.loads(data)
    except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: expected JSON: {one_line(error, 200)}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _rank(document: Mapping[str, Any], path: str) -> int | None:
    info = document.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0):
        return rank
    raise InputError(f"{path}: distributedInfo.rank: expected an integer ≥ 0, got {rank!r:.80}")


def _event(row: Any, where: str) -> Event | None:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, got {row!r:.80}")
    category = row.get("cat")
    if row.get("ph") != "X" or not isinstance(category, str) or category not in _HOST + _DEVICE:
        return None
    name, args = row.get("name"), row.get("args", {})
    if not isinstance(name, str):
        raise InputError(f"{where}.name: expected text, got {name!r:.80}")
    if not isinstance(args, dict):
        raise InputError(f"{where}.args: expected an object, got {args!r:.80}")
    lane = (row.get("pid"), row.get("tid"))
    for part, value in zip(("pid", "tid"), lane, strict=True):
        if not isinstance(value, int | str):
            raise InputError(f"{where}.{part}: expected a number or text, got {value!r:.80}")
    start = _nanoseconds(row.get("ts"), f"{where}.ts")
    took = _nanoseconds(row.get("dur", 0), f"{where}.dur")
    if took < 0:
        raise InputError(f"{where}.dur: expected microseconds ≥ 0, got {row['dur']!r:.80}")
    return Event(name, category, lane, start, start + took, args, where)


def _nanoseconds(value: Any, where: str) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LAST_US:
        return round(value * 1000)  # NaN compares false
    raise InputError(f"{where}: expected microseconds, got {value!r:.80}")
