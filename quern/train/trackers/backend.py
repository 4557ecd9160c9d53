"""What a tracker's run is opened with, and what is then asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from quern.train.trackers.branches import Parent

__all__ = ["Backend", "Opening", "Point"]


class Point(NamedTuple):
    """Numbers at a step."""

    number: int
    """How many points of the branch are before it."""
    step: int
    numbers: Mapping[str, float]
    time_ms: int
    """Since 1970."""


@dataclass(frozen=True)
class Opening:
    """The run to open."""

    run_dir: str
    id: str | None
    """Of the run to go on with; None = a new one."""
    project: str
    name: str
    group: str
    tags: Sequence[str]
    config: Mapping[str, Any]
    """The config of the start, as in config.yaml."""
    described: Mapping[str, Any]
    """``run.json``."""
    parent: Parent | None


class Backend(Protocol):
    """A tracker's run that is open. Every call may raise whatever the tracker's library does."""

    id: str

    def log(self, points: Sequence[Point]) -> None:
        """Add points whose steps do not decrease."""

    def close(self, how: str) -> None:
        """``how``: ``finished``, ``stopped`` by a signal, ``failed``, ``killed``, or ``left`` for another branch."""
