"""Reads from a ledger how a run goes back by itself: ``back {step, reason, before, leave_out, good, order}``.

The trainer writes the line and ends; the next start goes back to a checkpoint after at most ``before`` steps, the last
good one or, where ``good`` is false, the newest. Data steps ``leave_out`` of the order with the hash ``order`` are read
and not applied from then on: their steps have a ``skipped`` line, as those that the guard skips. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quern.train.history.ledger import MOVES

__all__ = ["LEFT_OUT", "asked_back", "backs", "left_out", "spikes"]

LEFT_OUT = "left_out"
"""Reason of the ``skipped`` line of a step whose data was left out."""

Entry = Mapping[str, Any]


def asked_back(entries: Sequence[Entry]) -> Entry | None:
    """The ``back`` line that no start has followed yet; of several, the one that goes back furthest."""
    pending: Entry | None = None
    for entry in entries:
        if entry["kind"] in MOVES:
            pending = None
        elif entry["kind"] == "back" and (pending is None or entry["before"] < pending["before"]):
            pending = entry
    return pending


def backs(entries: Iterable[Entry]) -> tuple[int, ...]:
    """The steps in which the run has gone back by itself, in the order of their lines."""
    return tuple(entry["step"] for entry in entries if entry["kind"] == "back")


def left_out(entries: Iterable[Entry]) -> frozenset[int]:
    """Data steps that are not applied. One that a later order has taken over holds other samples, and is applied."""
    found: dict[int, str] = {}
    for entry in entries:
        if entry["kind"] == "back":
            found |= dict.fromkeys(entry["leave_out"], entry["order"])
        elif entry["kind"] in MOVES:
            found = {n: order for n, order in found.items() if order == entry["order"] or n < entry["data_step"]}
    return frozenset(found)


def spikes(entries: Iterable[Entry]) -> tuple[int, ...]:
    """The steps of the present branch that were spikes, ascending."""
    found: list[int] = []
    for entry in entries:
        if entry["kind"] in MOVES:
            found = [step for step in found if step < entry["step"]]
        elif entry["kind"] == "spike":
            found.append(entry["step"])
    return tuple(found)
