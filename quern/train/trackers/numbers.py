"""Names the numbers in a line of ``metrics.jsonl`` or ``ledger.jsonl`` as every tracker shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    if row["kind"] == "validation":
        return dict(_validation(row))
    left_out = ("kind", "step", "time")
    return {
        f"{name}/{inner}" if inner else f"train/{name}": number
        for name, value in row.items()
        if name not in left_out
        for inner, number in _flat(value)
    }


def _validation(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    own = {**row["sources"], **row.get("sets", {})}
    total = "loss"
    while total in own:
        total += " of all sources"
    losses = {total: row["loss"], **{name: found["loss"] for name, found in own.items()}}
    return ((f"validation/{name}", float(loss)) for name, loss in losses.items() if loss is not None)


def _flat(value: Any) -> Iterator[tuple[str, float]]:
    """A number under no name, those of a mapping under their dotted names; other values have none."""
    if isinstance(value, bool | int | float):
        yield "", float(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            for rest, number in _flat(inner):
                yield f"{name}.{rest}" if rest else str(name), number
