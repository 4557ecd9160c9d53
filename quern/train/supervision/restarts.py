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
    own: bool = False
    """Whether it failed by itself, so that its place may be the cause."""
    failing: tuple[int, ...] = ()
    """Ranks whose GPUs fail, whatever ended the start."""
    slow: tuple[int, ...] = ()
    """Ranks that a spare place is to take over because they compute longer than the others."""
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
    moves: list[tuple[int, int | None]] = field(default_factory=list)
    """After :meth:`wait_s`: the places that are left from now on, and the spare places that took over their ranks, None
    where it goes on with a rank fewer."""
    why: str | None = None
    """After :meth:`wait_s` said None of a failure: why there is no other start."""
    _failed_at: int | None = field(default=None, init=False)
    _blamed: int | None = field(default=None, init=False)
    _furthest: int = field(default=-1, init=False)
    _in_a_row: int = field(default=0, init=False)

    def wait_s(self, attempt: Attempt) -> float | None:
        """Seconds to wait before the ranks are started again; None: they are not. After progress there is no wait: a
        start takes longer than what a wait is for, and each has to get further. A place that has failed by itself, or
        is slow, is left for a spare one. One whose GPU fails, or that was the first to fail twice in a row, is left in
        any case, while there are more than ``least``."""
        self.moves = []
        if attempt.code in _ENDS or attempt.asked:
            return None
        if attempt.adapted or attempt.code == GoBackError.exit_code:  # no failures, and there is an end to both
            return 0.0
        before, self._failed_at = self._failed_at, attempt.step
        place = self.places[attempt.rank] if self.places and attempt.rank is not None else None
        failing = [self.places[rank] for rank in attempt.failing]
        twice = [place] if place is not None and place == self._blamed and self._may_go_without() else []
        self._blamed = place
        if attempt.step is not None and attempt.step == before and not failing and not twice:
            self.why = f"step {attempt.step} has ended the run twice in a row"
            return None
        if self.done >= self.most:
            times = "once" if self.most == 1 else f"{self.most} times"
            self.why = f"it was started again {times} (--max-restarts)" if self.most else None
            return None
        if len(failing) > len(self.spares) + (0 if self.least is None else len(self.places) - self.least):
            self.why = "no GPU can take over (--spares, --min-nproc)"
            return None
        own = [place] if place is not None and attempt.own else []
        for left in dict.fromkeys([*failing, *twice, *own, *(self.places[rank] for rank in attempt.slow)]):
            if self.spares:
                taken = self.spares.pop(0)
                self.places[self.places.index(left)] = taken
                self.moves.append((left, taken))
            elif left in (*failing, *twice) and self._may_go_without():
                self.places.remove(left)
                self.moves.append((left, None))
        reached = -1 if attempt.step is None else attempt.step
        further = reached > self._furthest
        self._furthest = max(self._furthest, reached)
        self._in_a_row = 0 if further else self._in_a_row + 1
        self.done += 1
        waits = self.first_wait_s * 2.0 ** min(self._in_a_row - 1, 30)
        return min(self.longest_wait_s, waits) if self._in_a_row else 0.0

    def _may_go_without(self) -> bool:
        return self.least is not None and len(self.places) > self.least
