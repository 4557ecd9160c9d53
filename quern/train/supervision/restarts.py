"""Decides whether ranks that have failed are started again, and after how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from quern.errors import STOPPED, GoBackError, InputError

__all__ = ["Attempt", "Restarts"]

#: Exit codes after which the same command would do no better.
_ENDS = (0, InputError.exit_code, STOPPED)


@dataclass(frozen=True)
class Attempt:
    """How one start of all ranks has ended."""

    code: int
    """As a shell shows it: a rank's exit code, or 128 and the number of the signal that killed it."""
    asked: bool = False
    """Whether the command itself was asked to end by a signal."""
    rank: int | None = None
    """Which failed first; None: several at once, or not known."""
    step: int | None = None
    """That it was in; None: it had not begun one."""
    adapted: bool = False
    """Whether the next start has other settings, as memory ran out."""
    said: str | None = None
    """Who failed and of what, in a line; None: a rank has said it itself."""


@dataclass
class Restarts:
    """Counts the failures of a run."""

    most: int
    """Starts after a failure."""
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    """Before a start; twice as long after each failure that got no further than the one before."""
    places: list[int] = field(default_factory=list)
    """The ranks of the first start, or their GPUs, that are still in use."""
    least: int | None = None
    """How many must be; None: all."""
    done: int = 0
    """Starts after a failure so far."""
    left_out: int | None = None
    """After :meth:`wait_s`: the place that is left out from now on."""
    why: str | None = None
    """After :meth:`wait_s` said None of a failure: why there is no other start."""
    _failed_at: int | None = field(default=None, init=False)
    _blamed: int | None = field(default=None, init=False)
    _furthest: int | None = field(default=None, init=False)
    _in_a_row: int = field(default=0, init=False)

    def wait_s(self, attempt: Attempt) -> float | None:
        """Seconds to wait before the ranks are started again; None: they are not. A place that was the first to fail
        twice in a row is left out, while there are more than ``least``."""
        if attempt.code in _ENDS or attempt.asked:
            return None
        if attempt.adapted or attempt.code == GoBackError.exit_code:  # no failures, and there is an end to both
            return 0.0
        self.left_out = None
        before, self._failed_at = self._failed_at, attempt.step
        place = self.places[attempt.rank] if self.places and attempt.rank is not None else None
        more = self.least is not None and len(self.places) > self.least
        spoiled = more and place is not None and place == self._blamed
        self._blamed = place
        if attempt.step is not None and attempt.step == before and not spoiled:
            self.why = f"step {attempt.step} has ended the run twice in a row"
            return None
        if self.done >= self.most:
            times = "once" if self.most == 1 else f"{self.most} times"
            self.why = f"it was started again {times} (--max-restarts)" if self.most else None
            return None
        if spoiled and place is not None:
            self.places.remove(place)
            self.left_out = place
        reached = -1 if attempt.step is None else attempt.step
        further = self._furthest is None or reached > self._furthest
        self._furthest = reached if self._furthest is None else max(self._furthest, reached)
        self._in_a_row = 0 if further else self._in_a_row + 1
        self.done += 1
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(self._in_a_row, 30))
