"""Decides whether ranks that have failed are started again, and after how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from quern.errors import FAILING, STOPPED, GoBackError, InputError

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
    own: bool = False
    """Whether it failed by itself, so that its place may be the cause."""
    said: str | None = None
    """Who failed and of what, in a line; None: a rank has said it itself."""


@dataclass
class Restarts:
    """Counts the failures of a run."""

    most: int
    """Starts after a failure."""
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    """Before a start after a failure that got no further than those before; twice as long after each more in a row."""
    places: list[int] = field(default_factory=list)
    """By rank, the places that are in use: the ranks of the first start, or their GPUs."""
    spares: list[int] = field(default_factory=list)
    """Places beside them, of which the first is the next to take over a rank."""
    least: int | None = None
    """How many must be; None: all."""
    done: int = 0
    """Starts after a failure so far."""
    left_out: int | None = None
    """After :meth:`wait_s`: the place that is left out from now on."""
    taken: int | None = None
    """After :meth:`wait_s`: the spare place that took over its rank."""
    why: str | None = None
    """After :meth:`wait_s` said None of a failure: why there is no other start."""
    _failed_at: int | None = field(default=None, init=False)
    _blamed: int | None = field(default=None, init=False)
    _furthest: int = field(default=-1, init=False)
    _in_a_row: int = field(default=0, init=False)

    def wait_s(self, attempt: Attempt) -> float | None:
        """Seconds to wait before the ranks are started again; None: they are not. After progress there is no wait: a
        start takes longer than what a wait is for, and each has to get further. A place that has failed by itself
        is left for a spare one, and left out, while there are more than ``least``, if it was the first to fail twice in
        a row, or its GPU fails."""
        self.left_out = self.taken = None
        if attempt.code in _ENDS or attempt.asked:
            return None
        if attempt.adapted or attempt.code == GoBackError.exit_code:  # no failures, and there is an end to both
            return 0.0
        before, self._failed_at = self._failed_at, attempt.step
        place = self.places[attempt.rank] if self.places and attempt.rank is not None else None
        more = self.least is not None and len(self.places) > self.least
        spoiled = more and place is not None and (place == self._blamed or attempt.code == FAILING)
        self._blamed = place
        if attempt.step is not None and attempt.step == before and not spoiled:
            self.why = f"step {attempt.step} has ended the run twice in a row"
            return None
        if self.done >= self.most:
            times = "once" if self.most == 1 else f"{self.most} times"
            self.why = f"it was started again {times} (--max-restarts)" if self.most else None
            return None
        if place is not None and self.spares and (attempt.own or spoiled):
            self.left_out, self.taken = place, self.spares.pop(0)
            self.places[self.places.index(place)] = self.taken
        elif spoiled and place is not None:
            self.places.remove(place)
            self.left_out = place
        elif attempt.code == FAILING:
            self.why = "no GPU can take over (--spares, --min-nproc)"
            return None
        reached = -1 if attempt.step is None else attempt.step
        further = reached > self._furthest
        self._furthest = max(self._furthest, reached)
        self._in_a_row = 0 if further else self._in_a_row + 1
        self.done += 1
        waits = self.first_wait_s * 2.0 ** min(self._in_a_row - 1, 30)
        return min(self.longest_wait_s, waits) if self._in_a_row else 0.0
