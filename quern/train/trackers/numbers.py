"""Names the numbers in a line of ``metrics.jsonl`` or ``ledger.jsonl`` as every tracker shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quern.train.history.metrics_file import held_out, numbers

__all__ = ["FACTS", "numbers_of", "place_of"]

FACTS = {
    "checkpoint": "checkpoint/begun", "checkpoint_failed": "checkpoint/failed", "good": "checkpoint/good",
    "rollback": "run/went_back_to", "resume": "run/resumed_at", "stopped": "run/stopped_at", "end": "run/ended_at",
}  # fmt: skip
"""Of the ledger's kinds, those that are sent: the name under which their step is. What is known of a step itself, as
that it was skipped, stands in its line of metrics."""


def place_of(row: Mapping[str, Any]) -> float:
    """Where a line of metrics stands among all of them: a validation after N steps is between steps N - 1 and N."""
    return row["step"] + (0.5 if row["kind"] == "step" else 0.0)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics: ``train/loss``, ``losses_by_source/web``, ``validation/web``; what is null is
    left out, true is 1."""
    told = dict(numbers(row))
    if row["kind"] == "validation":
        own = held_out(told)
        total = "loss of all sources" if "loss" in own else "loss"
        own |= {total: told["loss"]} if "loss" in told else {}
        return {f"validation/{name}": loss for name, loss in own.items()}
    del told["step"]
    return {name.replace(".", "/", 1) if "." in name else f"train/{name}": value for name, value in told.items()}
