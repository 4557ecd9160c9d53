"""Counts what a reader found besides pages: other records and damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quern.data_pipeline.sources.containers.ranges import Edges

__all__ = ["ReadLog"]

_MAX_DAMAGE = 1000


@dataclass
class ReadLog:
    """Counts filled while :func:`read` is iterated; one log may serve many partitions."""

    other_records: dict[str, int] = field(default_factory=dict)
    """Number of records that carry no page, by type (``request``, ``revisit``, …)."""
    damage: list[dict[str, Any]] = field(default_factory=list)
    """``{"file", "offset", "why"}`` of each damage met, the first thousand a log; ``offset`` is in bytes (a row in
    Parquet)."""
    damage_left_out: int = 0
    unreadable_dates: int = 0
    """Values of ``date_field`` that are there and are no date."""
    unreadable_urls: int = 0
    """Values of ``url_field`` that are there and are no text."""
    edges: Edges | None = None
    """Of a partition that is a range of a file, once it has been read."""
    tick: Callable[[], None] = lambda: None
    """Called while a reader is at work and has no page to show for it: it passes over damage, or a large record."""

    def damaged(self, file: str, offset: int, why: str) -> None:
        """Record one damaged place."""
        if len(self.damage) < _MAX_DAMAGE:
            self.damage.append({"file": file, "offset": offset, "why": why})
        else:
            self.damage_left_out += 1
