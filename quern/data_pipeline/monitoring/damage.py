"""Counts damaged places of a run's inputs from the commits of its partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["Damage"]


class Damage:
    """Counts damaged places; a place that two ranges of a file report at their edge counts once."""

    def __init__(self) -> None:
        self.num = 0
        self._told: Counter[tuple[str, str, int, str]] = Counter()

    def add(self, counts: Mapping[str, Any], source: str = "") -> list[Mapping[str, Any]]:
        """Count the damaged places in a partition's ``counts`` that no other range of the file has reported."""
        found = list(counts.get("damage", ()))
        if "range" in counts:
            keys = _keys(found, source)
            found = [place for place, key in zip(found, keys, strict=True) if key not in self._told]
            self._told.update(keys)
        self.num += len(found) + int(counts.get("damage_left_out", 0))
        return found

    def take_back(self, counts: Mapping[str, Any], source: str = "") -> None:
        """Undo :meth:`add`, because the partition was processed again."""
        gone = len(counts.get("damage", ()))
        if "range" in counts:
            keys = _keys(counts["damage"], source)
            self._told.subtract(keys)
            gone = sum(self._told[key] == 0 for key in keys)
            self._told = +self._told
        self.num -= gone + int(counts.get("damage_left_out", 0))


def _keys(found: Any, source: str) -> list[tuple[str, str, int, str]]:
    return [(source, place["file"], place["offset"], place["why"]) for place in found]
