"""Counters of a phase of a run, and its shares, rates and estimated time left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quern.data_pipeline.monitoring.damage import Damage
from quern.words import counted

__all__ = ["PhaseCounters", "format_duration"]

#: An estimate of what is left needs this much of the phase behind it.
MIN_ETA_S = 5.0
MIN_ETA_PARTITIONS = 2


def format_duration(seconds: float | None) -> str:
    """``42 s``, ``3 min 20 s``, ``2 h 05 min``, ``3 d 04 h``; ``–`` for None."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


@dataclass
class PhaseCounters:
    """Counters of the current phase. ``fresh_…`` leave out what an earlier attempt had done already."""

    name: str
    total: int
    total_bytes: int | None
    began: float
    done: int = 0
    done_bytes: int = 0
    fresh: int = 0
    fresh_bytes: int = 0
    fresh_pages: int = 0
    pages: int = 0
    kept: int = 0
    damage: Damage = field(default_factory=Damage)
    by_stage: Counter[str] = field(default_factory=Counter)
    count_in_work: Callable[[], int] | None = None
    in_work: int = 0
    """Pages of partitions that are not finished, as last counted."""

    def look(self) -> bool:
        """Update the counts of partitions in progress; returns whether they changed."""
        before = self.in_work
        self.in_work = self.count_in_work() if self.count_in_work is not None else 0
        return self.in_work != before

    def add(self, counts: Mapping[str, Any], size_bytes: int, resumed: bool, source: str) -> None:
        """A partition of ``source`` is done."""
        pages = int(counts.get("pages", 0))
        self.done += 1
        self.done_bytes += size_bytes
        self.pages += pages
        self.kept += int(counts.get("kept", 0))
        self.damage.add(counts, source)
        self.by_stage.update(counts.get("by_stage", {}))
        if not resumed:
            self.fresh += 1
            self.fresh_bytes += size_bytes
            self.fresh_pages += pages

    def put_right(self, counts: Mapping[str, Any], counted: Mapping[str, Any], source: str) -> None:
        """Replace what was ``counted`` for a partition by ``counts``, since it was processed again."""
        more, kept = (int(counts.get(name, 0)) - int(counted.get(name, 0)) for name in ("pages", "kept"))
        self.fresh_pages += more
        self.pages += more
        self.kept += kept
        self.damage.take_back(counted, source)
        self.damage.add(counts, source)
        self.by_stage.update(counts.get("by_stage", {}))
        self.by_stage.subtract(counted.get("by_stage", {}))
        self.by_stage = +self.by_stage

    @property
    def share(self) -> float:
        """The share of work done, 0 to 1: by input bytes, else by partitions."""
        if self.total_bytes:
            return min(1.0, self.done_bytes / self.total_bytes)
        return min(1.0, self.done / self.total) if self.total else 0.0

    def eta_s(self, now: float) -> float | None:
        """Estimated seconds left at the speed of this attempt; None while too little is done."""
        elapsed = now - self.began
        if self.done >= self.total:
            return 0.0
        if self.fresh < MIN_ETA_PARTITIONS or elapsed < MIN_ETA_S:
            return None
        if self.total_bytes:
            left, pace = max(0, self.total_bytes - self.done_bytes), self.fresh_bytes / elapsed
        else:
            left, pace = self.total - self.done, self.fresh / elapsed
        return left / pace if pace > 0 else None

    def to_dict(self, now: float) -> dict[str, Any]:
        """The phase as plain data for other processes."""
        elapsed = now - self.began
        fresh = self.fresh_pages + self.in_work
        return {
            "name": self.name,
            "partitions": self.total,
            "done": self.done,
            "share": self.share,
            "elapsed_s": round(elapsed, 1),
            "eta_s": self.eta_s(now),
            "pages": self.pages + self.in_work,
            "pages_per_s": round(fresh / elapsed, 1) if elapsed > 0 else None,
            "kept": self.kept,
            "quarantined": self.by_stage.get("quarantine", 0),
            "damage": self.damage.num,
        }

    def facts(self, now: float) -> Iterator[str]:
        """The number of pages and their rate as a short text; nothing without pages."""
        elapsed, fresh = now - self.began, self.fresh_pages + self.in_work
        if num := self.pages + self.in_work:
            rate = f" ({fresh / elapsed:,.0f}/s)" if elapsed > 0 and fresh else ""
            yield f"{counted(num, 'page')}{rate}"

    def funnel(self) -> Iterator[str]:
        """The funnel so far: the share of pages that was kept, and that each stage dropped, the largest first."""
        if not self.pages:
            return
        yield f"kept {self.kept / self.pages:.1%}"
        for stage, count in sorted(self.by_stage.items(), key=lambda item: (-item[1], item[0])):
            yield f"{stage} −{count / self.pages:.1%}"
