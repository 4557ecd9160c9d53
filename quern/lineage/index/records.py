"""JSON files that contain their own digest, and the open parts of an index."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from quern import storage
from quern.config import digest

__all__ = ["Opened", "read_sealed", "write_sealed"]

T = TypeVar("T")


def read_sealed(path: str) -> dict[str, Any] | None:
    """The record that :func:`write_sealed` wrote; None if the file is missing or damaged."""
    try:
        with open(path, "rb") as file:
            sealed = json.load(file)
        record = sealed["record"]
        return dict(record) if digest([_place(path), record]) == sealed["digest"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_sealed(path: str, record: dict[str, Any]) -> None:
    """Write a record, atomically, with its digest."""
    storage.write_json(path, {"record": record, "digest": digest([_place(path), record])}, indent=None)


def _place(path: str) -> str:
    """The file and its folder: one that was put in another's place is not taken for it."""
    return "/".join(path.split("/")[-2:])


class Opened:
    """A cache of at most ``limit`` open parts with up to four file descriptors each; evicts the least recently used.

    What has been given out stays readable; what nobody holds any more is closed at once, by its count of references:
    a part must be in no cycle of them.
    """

    def __init__(self, limit: int = 100) -> None:
        self._limit = limit
        self._parts: OrderedDict[str, Any] = OrderedDict()

    def get(self, path: str, make: Callable[..., T], *arguments: Any) -> T:
        """Return ``make(path, *arguments)``, cached."""
        if path not in self._parts:
            self._parts[path] = make(path, *arguments)
            if len(self._parts) > self._limit:
                self._parts.popitem(last=False)
        self._parts.move_to_end(path)
        part: T = self._parts[path]
        return part
