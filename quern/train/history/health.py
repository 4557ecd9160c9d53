"""Finds good checkpoints: those that were followed by enough healthy steps.

A step is *healthy* when its loss and gradient norm are finite, the guard calls neither a spike, and its update was
applied. A checkpoint after c steps is *good* once it is published and steps c … c + window - 1 are healthy: weights
that are silently damaged show it in the steps computed with them. Steps count from 0, so step c is the first that uses
the checkpoint's weights.

``good {step, name}`` is a line of the ledger, and no edit of a published manifest. All the rest follows from the
ledger too. A ``start``, ``resume`` or ``rollback`` to step s leaves the branch behind s: its checkpoints after s never
become good, and what its steps from s on were is forgotten, for they are run again. An unhealthy step before s has a
line; so a step before s without one was healthy. A checkpoint with an unhealthy step in its window cannot become good
unless the run goes back to before that step; one that is good stays good as long as its branch does. The last
checkpoint of a run has no steps behind it, and those less than a window before the end too few: they become good only
if the run is given more steps.

Assumptions: a step's lines are in the ledger before the ``checkpoint`` line of a later one, and checkpoints are
published in the order of their lines. Imports no torch, and nothing here is collective: rank 0 alone knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from quern.train.history.ledger import MOVES, UNHEALTHY, reached

__all__ = ["Good", "HealthTracker", "good_steps", "last_good", "protected", "why_none"]

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Good:
    """A checkpoint that has become good: the fields of its line in the ledger."""

    step: int
    """Completed optimizer steps."""
    name: str


@dataclass
class _Branch:
    """What the lines say of the branch the run is on."""

    saved: dict[int, str] = field(default_factory=dict)
    """Names of its checkpoints by step."""
    unhealthy: set[int] = field(default_factory=set)
    good: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Self:
        branch = cls()
        for entry in entries:
            kind, step = entry["kind"], int(entry.get("step", -1))
            if kind in MOVES:
                branch.saved = {saved: name for saved, name in branch.saved.items() if saved <= step}
                branch.unhealthy = {unhealthy for unhealthy in branch.unhealthy if unhealthy < step}
                branch.good = {good for good in branch.good if good <= step}
            elif kind == "checkpoint":
                branch.saved[step] = entry["name"]
            elif kind == "checkpoint_failed":
                branch.saved.pop(step, None)
            elif kind in UNHEALTHY:
                branch.unhealthy.add(step)
            elif kind == "good":
                branch.good.add(step)
        return branch


class HealthTracker:
    """Counts the healthy steps behind each checkpoint of one attempt, and says which have become good.

    ``window``: healthy steps that make a checkpoint good. ``reached``: steps completed so far, on this branch.
    ``unhealthy``: those of them that were not healthy.

    Tell it of every step by :meth:`observe` and of every checkpoint by :meth:`published`, whichever comes first, and
    ask :meth:`take` after either.
    """

    def __init__(self, window: int, reached: int = 0, unhealthy: Iterable[int] = ()) -> None:
        if window < 1:
            raise ValueError(f"window: expected at least 1, got {window}")
        self.window = window
        self._reached = reached
        # all of the branch: a checkpoint may be published long after the steps that follow it
        self._unhealthy = sorted(set(unhealthy))
        self._pending: dict[int, str] = {}
        self._good: list[Good] = []

    @classmethod
    def from_ledger(cls, entries: Sequence[Entry], window: int) -> Self:
        """The tracker at the end of the given lines; checkpoints that are good and have no line yet wait in
        :meth:`take` (a kill came between, or the window was longer then).
        """
        branch = _Branch.of(entries)
        tracker = cls(window, reached(entries), branch.unhealthy)
        for step in sorted(branch.saved.keys() - branch.good):
            tracker.published(step, branch.saved[step])
        return tracker

    @property
    def pending(self) -> dict[int, int]:
        """Checkpoints that may yet become good: how many healthy steps follow each so far, by step, ascending."""
        return {step: max(0, self._reached - step) for step in sorted(self._pending)}

    def published(self, step: int, name: str) -> None:
        """Record that the checkpoint after ``step`` steps is published, and count from that step on."""
        first = self._first_unhealthy(step)
        if first is not None and first < step + self.window:
            return
        if self._reached >= step + self.window:
            self._good.append(Good(step, name))
        else:
            self._pending[step] = name

    def failed(self, step: int) -> None:
        """Record that the checkpoint after ``step`` steps will not be published, or no longer exists."""
        self._pending.pop(step, None)

    def observe(self, step: int, ok: bool) -> None:
        """Record the health of the next step, by its number.

        Raises:
            ValueError: it is another than the next step.
        """
        if step != self._reached:
            raise ValueError(f"step: expected {self._reached}, the next one, got {step}")
        self._reached = step + 1
        if not ok:
            self._unhealthy.append(step)
            self._pending = {saved: name for saved, name in self._pending.items() if saved > step}
            return
        whole = step + 1 - self.window
        if whole in self._pending:  # an unhealthy step would have taken it out
            self._good.append(Good(whole, self._pending.pop(whole)))

    def take(self) -> list[Good]:
        """The checkpoints that have become good since the last call, each once."""
        found, self._good = self._good, []
        return found

    def _first_unhealthy(self, step: int) -> int | None:
        """The first unhealthy step from ``step`` on."""
        place = bisect_left(self._unhealthy, step)
        return self._unhealthy[place] if place < len(self._unhealthy) else None


def good_steps(entries: Iterable[Entry]) -> list[int]:
    """The steps of the present branch's good checkpoints by their lines, ascending; some may stand no more."""
    return sorted(_Branch.of(entries).good)


def last_good(entries: Sequence[Entry], steps: Collection[int], window: int) -> int | None:
    """The newest of ``steps``, those of the checkpoints that stand, that is good on the present branch; else None.

    A checkpoint is good by its line, or because the ledger proves ``window`` healthy steps after it: a run that is
    taken up with a shorter ``guard.health_window`` need not count anew.
    """
    due = {found.step for found in HealthTracker.from_ledger(entries, window).take()}
    return max((due | _Branch.of(entries).good) & set(steps), default=None)


def protected(entries: Sequence[Entry], steps: Collection[int], window: int) -> set[int]:
    """Which of ``steps``, those of the checkpoints that stand, must not be pruned: at most two.

    The last good one; and the oldest that may yet become good, since where more than ``keep_last`` checkpoints are
    saved within a window, each would be gone before its window is whole and none would ever be good.
    """
    pending = HealthTracker.from_ledger(entries, window).pending
    candidate = min((step for step in pending if step in steps), default=None)
    return {step for step in (last_good(entries, steps, window), candidate) if step is not None}


def why_none(entries: Sequence[Entry], steps: Collection[int], window: int) -> str:
    """Why the newest checkpoint of the present branch is not good yet, in words; ``steps``: existing checkpoints."""
    branch = _Branch.of(entries)
    newest = max((step for step in branch.saved if step in steps), default=None)
    if newest is None:
        return "the run has no checkpoint"
    first = min((step for step in branch.unhealthy if step >= newest), default=None)
    known = (reached(entries) if first is None else first) - newest
    found = f"the newest, {branch.saved[newest]}, has {known} of the {window} healthy steps it needs after it"
    return found if first is None else f"{found}: step {first} was none"
