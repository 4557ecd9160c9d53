"""What a running data run shows on stderr: a live view on a terminal, plain lines elsewhere.

A view never breaks a run: when drawing fails it says so once and the run goes on.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = ["Progress", "format_duration"]

#: An estimate of what is left needs this much of the phase behind it.
MIN_ETA_S = 5.0
MIN_ETA_PARTITIONS = 2
NUM_ERRORS_SHOWN = 3
MAX_MESSAGE_CHARS = 300

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")


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
class _Phase:
    """Counters of the phase in work. ``fresh_…`` leave out what an earlier attempt had done already."""

    name: str
    total: int
    total_bytes: int | None
    began: float
    done: int = 0
    done_bytes: int = 0
    fresh: int = 0
    fresh_bytes: int = 0
    fresh_documents: int = 0
    fresh_tokens: int = 0
    documents: int = 0
    tokens: int = 0
    pages: int = 0
    kept: int = 0
    damage: int = 0
    by_stage: Counter[str] = field(default_factory=Counter)
    count_in_work: Callable[[], int] | None = None
    in_work: int = 0
    """Documents of partitions that are not finished, as last counted."""

    def look(self) -> bool:
        """Count what is in work; whether there is something new."""
        before = self.in_work
        self.in_work = self.count_in_work() if self.count_in_work is not None else 0
        return self.in_work != before

    def add(self, counts: Mapping[str, Any], size_bytes: int, resumed: bool) -> None:
        documents = int(counts.get("pages", counts.get("documents", 0)))
        tokens = int(counts.get("tokens", 0))
        self.done += 1
        self.done_bytes += size_bytes
        self.documents += documents
        self.tokens += tokens
        self.pages += int(counts.get("pages", 0))
        self.kept += int(counts.get("kept", 0))
        self.damage += _damaged(counts)
        self.by_stage.update(counts.get("by_stage", {}))
        if not resumed:
            self.fresh += 1
            self.fresh_bytes += size_bytes
            self.fresh_documents += documents
            self.fresh_tokens += tokens

    def put_right(self, counts: Mapping[str, Any], counted: Mapping[str, Any]) -> None:
        """A partition was done again, and better: ``counts`` in place of what was ``counted`` for it."""
        more, kept = (int(counts.get(name, 0)) - int(counted.get(name, 0)) for name in ("pages", "kept"))
        self.documents += more
        self.fresh_documents += more
        self.pages += more
        self.kept += kept
        self.damage += _damaged(counts) - _damaged(counted)
        self.by_stage.update(counts.get("by_stage", {}))
        self.by_stage.subtract(counted.get("by_stage", {}))
        self.by_stage = +self.by_stage

    @property
    def share(self) -> float:
        """Work done, 0 to 1: by input bytes, else by partitions."""
        if self.total_bytes:
            return min(1.0, self.done_bytes / self.total_bytes)
        return min(1.0, self.done / self.total) if self.total else 0.0

    def eta_s(self, now: float) -> float | None:
        """Seconds left at the pace of this attempt; None while too little is done to tell."""
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
        """What another process is told of the phase."""
        elapsed = now - self.began
        fresh = self.fresh_documents + self.in_work
        return {
            "name": self.name,
            "partitions": self.total,
            "done": self.done,
            "share": self.share,
            "elapsed_s": round(elapsed, 1),
            "eta_s": self.eta_s(now),
            "pages": self.documents + self.in_work,
            "pages_per_s": round(fresh / elapsed, 1) if elapsed > 0 else None,
            "kept": self.kept,
            "quarantined": self.by_stage.get("quarantine", 0),
            "damage": self.damage,
        }

    @property
    def unit(self) -> str:
        """What the documents of this phase are called."""
        return "pages" if self.pages or self.count_in_work is not None else "documents"

    def facts(self, now: float) -> Iterator[str]:
        """Counts and rates as short texts."""
        elapsed = now - self.began
        for unit, num, fresh in (
            (self.unit, self.documents + self.in_work, self.fresh_documents + self.in_work),
            ("tokens", self.tokens, self.fresh_tokens),
        ):
            if num:
                rate = f" ({fresh / elapsed:,.0f}/s)" if elapsed > 0 and fresh else ""
                yield f"{num:,} {unit}{rate}"

    def funnel(self) -> Iterator[str]:
        """The funnel so far: the share of pages that was kept, and that each stage dropped, the largest first."""
        if not self.pages:
            return
        yield f"kept {self.kept / self.pages:.1%}"
        for stage, count in sorted(self.by_stage.items(), key=lambda item: (-item[1], item[0])):
            yield f"{stage} −{count / self.pages:.1%}"


class Progress:
    """A view of the phases of a run, on stderr.

    On a terminal it is redrawn at most every ``refresh_s`` seconds; elsewhere it is a line at most every
    ``interval_s`` seconds while there is something new, and always a line at the start and the end of a phase.
    As a context manager it keeps its clock running between partitions; without, it draws when it is told something.

    Args:
        interval_s: seconds between lines off a terminal.
        refresh_s: seconds between redraws on a terminal.
        clock: seconds, monotonic.
        console: where to draw; default is stderr.
        background: whether a thread redraws between events.
    """

    def __init__(
        self,
        *,
        interval_s: float = 30.0,
        refresh_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
        background: bool = True,
    ) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._every = refresh_s if self._console.is_terminal else interval_s
        self._clock = clock
        self._lock = threading.RLock()
        self._phase: _Phase | None = None
        self._live: Live | None = None
        self._drawn = float("-inf")
        self._changed = False
        self._num_errors = 0
        self._errors: deque[str] = deque(maxlen=NUM_ERRORS_SHOWN)
        self._past: list[dict[str, Any]] = []
        self._reported = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="progress") if background else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        with self._guarded():
            if self._phase is not None:
                self._end("stopped")
        if self._thread is not None:
            self._thread.join(timeout=5)

    def start_phase(
        self,
        name: str,
        total_partitions: int,
        total_bytes: int | None = None,
        count_in_work: Callable[[], int] | None = None,
    ) -> None:
        """A phase begins; ``total_bytes`` of input make the estimate better than partitions do.

        ``count_in_work`` tells at any moment how many pages the unfinished partitions are through with.
        """
        with self._guarded():
            if self._phase is not None:
                self._end("done")
            now = self._clock()
            self._phase = _Phase(name, total_partitions, total_bytes, now, count_in_work=count_in_work)
            if self._console.is_terminal:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,  # stdout may be a JSON document
                    redirect_stderr=self._console.file is sys.stderr,
                )
                self._live.start()
                self._draw(now)
            else:
                size = f", {_bytes(total_bytes)}" if total_bytes else ""
                self._line(f"{name}: {total_partitions:,} {_partitions(total_partitions)}{size}")
                self._drawn = now

    def partition_done(self, counts: Mapping[str, Any], size_bytes: int, *, resumed: bool = False) -> None:
        """A partition is finished, with the counts of its commit.

        ``resumed``: an earlier attempt did it; it counts as done, and not for the pace.
        """
        with self._guarded():
            if self._phase is not None:
                self._phase.add(counts, size_bytes, resumed)
                self._changed = True
                self._tick()

    def partition_put_right(self, counts: Mapping[str, Any], counted: Mapping[str, Any]) -> None:
        """A partition was done again: ``counts`` of its new commit in place of those ``counted`` before."""
        with self._guarded():
            if self._phase is not None:
                self._phase.put_right(counts, counted)
                self._changed = True
                self._tick()

    def error(self, message: str) -> None:
        """Something went wrong and the run goes on; the last few are shown, all are counted."""
        with self._guarded():
            self._num_errors += 1
            shown = _CONTROL.sub(" ", message).strip()
            shown = shown if len(shown) <= MAX_MESSAGE_CHARS else shown[: MAX_MESSAGE_CHARS - 1] + "…"
            self._errors.append(shown)
            self._changed = True
            if not self._console.is_terminal:
                self._line(f"error: {shown}")
            self._tick()

    def end_phase(self) -> None:
        """The phase is finished: its summary stays as one line."""
        with self._guarded():
            if self._phase is not None:
                self._end("done")

    def snapshot(self) -> dict[str, Any]:
        """The phase in work (None between two), the phases that are over, and the errors, as plain data."""
        with self._lock:
            now = self._clock()
            phase = self._phase
            if phase is not None:
                with suppress(OSError):  # a marker that goes while it is looked for
                    self._changed |= phase.look()
            return {
                "phase": phase.to_dict(now) if phase is not None else None,
                "past": list(self._past),
                "errors": {"num": self._num_errors, "last": list(self._errors)},
            }

    def tick(self) -> None:
        """Draw if it is time to; the background thread calls this."""
        with self._guarded():
            self._tick()

    def _run(self) -> None:
        while not self._closed.wait(min(self._every, 1.0)):
            self.tick()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One at a time; what goes wrong in drawing is reported once and never raised."""
        with self._lock:
            try:
                yield
            except Exception as error:  # drawing must not break the run, whatever it is
                self._report(error)

    def _report(self, error: Exception) -> None:
        if self._reported:
            return
        self._reported = True
        try:
            print(f"progress cannot be shown, the run goes on ({type(error).__name__}: {error})", file=sys.stderr)
        except Exception:  # stderr itself is gone: there is nobody left to tell
            self._num_errors += 1

    def _tick(self) -> None:
        now = self._clock()
        if self._phase is None or now - self._drawn < self._every:
            return
        self._changed |= self._phase.look()
        if self._console.is_terminal:
            self._draw(now)
        elif self._changed:
            self._line(self._status(self._phase, now))
            self._drawn = now
            self._changed = False

    def _end(self, how: str) -> None:
        phase, live = self._phase, self._live
        self._phase = self._live = None
        if phase is not None and how == "done":
            phase.in_work = 0
            self._past.append(phase.to_dict(self._clock()))
        if live is not None:
            live.stop()
        if phase is not None:
            elapsed = self._clock() - phase.began
            took = f"{how} {'in' if how == 'done' else 'after'} {format_duration(elapsed)}"
            done = [f"{phase.done:,}/{phase.total:,} partitions"] if phase.done or how != "done" else []
            parts = [took, *done, *phase.facts(self._clock()), *phase.funnel()]
            self._line(f"{phase.name}: " + ", ".join([*parts, *self._error_count()]))

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _error_count(self) -> list[str]:
        return [f"{self._num_errors:,} error{'s' * (self._num_errors != 1)}"] if self._num_errors else []

    def _status(self, phase: _Phase, now: float) -> str:
        parts = [f"{phase.done:,}/{phase.total:,} partitions ({phase.share:.0%})", *phase.facts(now)]
        parts += [*phase.funnel(), f"ETA {format_duration(phase.eta_s(now))}", *self._error_count()]
        return f"{phase.name}: " + ", ".join(parts)

    def _draw(self, now: float) -> None:
        if self._live is not None and self._phase is not None:
            self._drawn = now
            self._live.update(self._view(self._phase, now), refresh=True)

    def _view(self, phase: _Phase, now: float) -> Group:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(phase.name, style="bold"),
            ProgressBar(total=1.0, completed=phase.share, width=24),
            Text(f"{phase.share:4.0%}"),
            Text(f"{phase.done:,}/{phase.total:,} partitions"),
            Text(f"{format_duration(now - phase.began)} gone, ETA {format_duration(phase.eta_s(now))}"),
        )
        lines: list[Table | Text] = [head]
        facts = list(phase.facts(now))
        if facts:
            lines.append(Text("  " + "   ".join(facts)))
        funnel = list(phase.funnel())
        if funnel:
            lines.append(Text("  " + "   ".join(funnel), style="dim"))
        if self._errors:
            lines.append(Text(f"  {', '.join(self._error_count())}, the last:", style="red"))
            lines += [Text(f"    {message}", no_wrap=True, overflow="ellipsis") for message in self._errors]
        return Group(*lines)


def _damaged(counts: Mapping[str, Any]) -> int:
    return len(counts.get("damage", ())) + int(counts.get("damage_left_out", 0))


def _partitions(num: int) -> str:
    return "partition" if num == 1 else "partitions"


def _bytes(num: int) -> str:
    value, units = float(num), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if units[0] == "B" else f"{value:,.1f} {units[0]}"
