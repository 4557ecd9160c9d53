"""Reads which ranks a run's ledger has named since a start: those whose GPU fails, and those that are slow."""

from __future__ import annotations

import os
from typing import NamedTuple

from quern.errors import QuernError
from quern.train.history.ledger import read_ledger
from quern.train.history.metrics_file import when

__all__ = ["NamedRanks", "named_ranks"]


class NamedRanks(NamedTuple):
    """Of the start in question."""

    failing: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    """Without those that were as fast as the others again."""


def named_ranks(run_dir: str, began: float) -> NamedRanks:
    """From the lines since ``began`` [seconds since 1970]; a ledger that cannot be read names nobody."""
    try:
        entries = read_ledger(os.path.join(run_dir, "ledger.jsonl"))
    except (OSError, QuernError):
        return NamedRanks()
    began -= 0.001  # lines tell milliseconds
    failing, slow = list[int](), dict[str, list[int]]()
    for entry in entries:
        if when(entry) >= began and entry["kind"] == "straggler":
            slow[entry["what"]] = entry["ranks"] if entry["slower"] else []
        elif when(entry) >= began and entry["kind"] == "stopped":
            failing = entry.get("failing", [])
    return NamedRanks((*failing,), (*sorted({rank for ranks in slow.values() for rank in ranks}),))
