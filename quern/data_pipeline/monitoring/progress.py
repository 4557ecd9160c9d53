"""Shows a data run's progress on stderr: a live view on a terminal, plain lines elsewhere.

A view never breaks a run: when drawing fails it says so once and the run goes on.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quern.data_pipeline.monitoring.phase import PhaseCounters, format_duration
from quern.words import counted, shorten, size

__all__ = ["RunProgress"]

NUM_ERRORS_SHOWN = 3
MAX_MESSAGE_CHARS = 300

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")


class RunProgress:
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
        self._phase: PhaseCounters | None = None
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

    def __exit__(self, *raised: Any) -> None:
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
        num_resumed: int = 0,
    ) -> None:
        """Begin a phase, of whose partitions ``num_resumed`` were done before; with ``total_bytes`` of input the
        estimate is better than by partitions.

        ``count_in_work`` tells at any moment how many pages the unfinished partitions are through with.
        """
        with self._guarded():
            if self._phase is not None:
                self._end("done")
            now = self._clock()
            self._phase = PhaseCounters(name, total_partitions, total_bytes, now, count_in_work=count_in_work)
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
                much = f", {size(total_bytes)}" if total_bytes else ""
                done = f", {num_resumed:,} of them done before" if num_resumed else ""
                self._line(f"{name}: {counted(total_partitions, 'partition')}{much}{done}")
                self._drawn = now

    def partition_done(
        self, counts: Mapping[str, Any], size_bytes: int, *, resumed: bool = False, source: str = ""
    ) -> None:
        """A partition of ``source`` is finished, with the counts of its commit.

        ``resumed``: an earlier attempt did it; it counts as done, and not for the pace.
        """
        self._told(lambda phase: phase.add(counts, size_bytes, resumed, source))

    def partition_put_right(self, counts: Mapping[str, Any], counted: Mapping[str, Any], *, source: str = "") -> None:
        """Replace the counts ``counted`` for a partition by ``counts`` of its new commit."""
        self._told(lambda phase: phase.put_right(counts, counted, source))

    def _told(self, change: Callable[[PhaseCounters], None]) -> None:
        with self._guarded():
            if self._phase is not None:
                change(self._phase)
                self._changed = True
                self.tick()

    def error(self, message: str) -> None:
        """Report an error after which the run continues; the last few are shown, all are counted."""
        with self._guarded():
            self._num_errors += 1
            shown = shorten(_CONTROL.sub(" ", message).strip(), MAX_MESSAGE_CHARS)
            self._errors.append(shown)
            self._changed = True
            if not self._console.is_terminal:
                self._line(f"error: {shown}")
            self.tick()

    def end_phase(self) -> None:
        """The phase is finished: its summary stays as one line."""
        with self._guarded():
            if self._phase is not None:
                self._end("done")

    def snapshot(self) -> dict[str, Any]:
        """The current phase (None between two), the finished phases, and the errors, as plain data."""
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
        except Exception:  # stderr is closed: the error cannot be reported
            self._num_errors += 1

    def tick(self) -> None:
        """Redraw if it is time; called by the background thread."""
        with self._guarded():
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
            done = [f"{phase.done:,}/{counted(phase.total, 'partition')}"] if phase.done or how != "done" else []
            parts = [took, *done, *phase.facts(self._clock()), *phase.funnel()]
            self._line(f"{phase.name}: " + ", ".join([*parts, *self._error_count()]))

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _error_count(self) -> list[str]:
        return [f"{self._num_errors:,} error{'s' * (self._num_errors != 1)}"] if self._num_errors else []

    def _status(self, phase: PhaseCounters, now: float) -> str:
        parts = [f"{phase.done:,}/{counted(phase.total, 'partition')} ({phase.share:.0%})", *phase.facts(now)]
        parts += [*phase.funnel(), f"ETA {format_duration(phase.eta_s(now))}", *self._error_count()]
        return f"{phase.name}: " + ", ".join(parts)

    def _draw(self, now: float) -> None:
        if self._live is not None and self._phase is not None:
            self._drawn = now
            self._live.update(self._view(self._phase, now), refresh=True)

    def _view(self, phase: PhaseCounters, now: float) -> Group:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(phase.name, style="bold"),
            ProgressBar(total=1.0, completed=phase.share, width=24),
            Text(f"{phase.share:4.0%}"),
            Text(f"{phase.done:,}/{counted(phase.total, 'partition')}"),
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
