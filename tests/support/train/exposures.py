"""Which steps read a window, told by the lines of a ledger alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from quern.mixtures.order import Order
from quern.train.history.ledger import MOVES, surviving


class Exposure(NamedTuple):
    """A step that read a window. ``applied``: its update went into the weights (false: skipped on device)."""

    step: int
    data_step: int
    applied: bool


def exposures(
    entries: Iterable[Mapping[str, Any]], t_end: int, order: Order, source: int, epoch: int, window: int
) -> list[Exposure]:
    """The surviving steps < ``t_end`` that read a window: none or one, for an order gives a window of an epoch once.

    ``order`` is the newest of ``entries``, which explains the older steps too.
    """
    g = order.locate(source, epoch, window)
    lines = list(entries)
    data_step = -1 if g is None else step_of(order, g)
    steps = [part.step + data_step - part.data_step for part in surviving(lines, t_end) if _has(part, data_step)]
    return [Exposure(step, data_step, _applied(lines, step, data_step)) for step in steps]


def step_of(order: Order, g: int) -> int:
    """The step that reads position ``g``."""
    row = [row for row in order.phases if row.first_sample <= g][-1]
    return row.first_step + (g - row.first_sample) // row.global_batch


def _has(part: Any, data_step: int) -> bool:
    return part.data_step <= data_step < part.data_stop


def _applied(lines: list[Mapping[str, Any]], step: int, data_step: int) -> bool:
    """As the last attempt that took the step says; attempts are told apart by the lines that open them."""
    applied = True
    for line in lines:
        if line["kind"] in MOVES and line["step"] <= step:
            applied = True
        elif line["kind"] == "skipped" and (line["step"], line["data_step"]) == (step, data_step):
            applied = False
    return applied
