"""Accounts for the wall clock time of a training run, and for the tokens that its present weights were made of."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from quern.train.history.ledger import latest_order, surviving
from quern.train.report.history import ABANDONED, AGAIN, KEPT, Attempt, Run

__all__ = ["PARTS", "SourceTokens", "account", "tokens_by_source"]

#: What the time went into, in the order shown, with a word for each.
PARTS = {
    "compute": "steps, without waits for data",
    "data": "waits for data",
    "validation": "validation",
    "saves": "saves, as far as they stop the loop",
    "start": "starts: until the first step",
    "other": "between steps, for other reasons",
    "again": "steps that were done again",
    "abandoned": "steps that a rollback abandoned",
    "between": "between attempts",
}


def account(run: Run) -> dict[str, float] | None:
    """Seconds of each of :data:`PARTS`; their sum is the time from the run's first line to its last, to within a
    step an attempt. None: the files do not tell times.

    Rows are written up to a step late, but not before a save or a validation, which waits for them: so the time of a
    save is what is left of the time between two such rows when the steps between them are taken off.
    """
    own = run.attempts[run.first :]
    times = [np.array([(one.began, one.last) for one in own]), *map(run.metrics.column, ("time", "step_time_s"))]
    if any(np.isnan(known).any() for known in times):
        return None
    spent = dict.fromkeys(PARTS, 0.0)
    for number, attempt in enumerate(own):
        _steps(run, attempt, spent)
        _between_steps(run, attempt, spent)
        if number:
            spent["between"] += max(0.0, attempt.began - own[number - 1].last)
    return spent


def _steps(run: Run, attempt: Attempt, spent: dict[str, float]) -> None:
    seconds, fate = run.metrics.column("step_time_s")[attempt.rows], run.fate[attempt.rows]
    wait = np.minimum(np.nan_to_num(run.metrics.column("data_wait_s")[attempt.rows]), seconds)
    spent["data"] += float(wait[fate == KEPT].sum())
    spent["compute"] += float((seconds - wait)[fate == KEPT].sum())
    spent["again"] += float(seconds[fate == AGAIN].sum())
    spent["abandoned"] += float(seconds[fate == ABANDONED].sum())


def _between_steps(run: Run, attempt: Attempt, spent: dict[str, float]) -> None:
    rows = attempt.rows
    if not len(rows):
        spent["start"] += max(0.0, attempt.last - attempt.began)
        return
    saved = {fact["step"] for fact in attempt.facts if fact["kind"] == "checkpoint"}
    times, steps = run.metrics.column("time")[rows], run.metrics.step[rows]
    done = np.cumsum(run.metrics.column("step_time_s")[rows])
    validated = {}
    for own in run.metrics.validations:
        place = int(np.searchsorted(rows, own.row - 1))
        if place < len(rows) and rows[place] == own.row - 1 and not math.isnan(own.time):
            validated[place] = max(0.0, own.time - float(times[place]))
    spent["validation"] += sum(validated.values())
    ends = sorted({len(rows) - 1, *validated, *np.flatnonzero(np.isin(steps + 1, sorted(saved))).tolist()})
    before, ran, into, paid = attempt.began, 0.0, "start", 0.0
    for end in ends:
        spent[into] += max(0.0, float(times[end]) - before - paid - (float(done[end]) - ran))
        before, ran, paid = float(times[end]), float(done[end]), validated.get(end, 0.0)
        into = "saves" if int(steps[end]) + 1 in saved else "other"
    spent[into] += max(0.0, attempt.last - before - paid)


class SourceTokens(NamedTuple):
    """What the surviving steps have read of a source that has so many tokens ``available``: ``tokens``, and ``epochs``,
    how often each was read on average."""

    name: str
    tokens: int
    available: int
    epochs: float


def tokens_by_source(run: Run) -> list[SourceTokens]:
    """A row a source, by the ledger alone: its newest order explains every surviving step. None where the ledger has no
    order that says how long a window is.

    Raises:
        QuernError: the order in the ledger cannot be made again.
    """
    order = latest_order(run.entries)
    if order is None or order.seq_len is None:
        return []
    samples: Counter[int] = Counter()
    for own in surviving(run.entries, run.reached):
        assert own.data_stop is not None
        for sign, step in ((1, own.data_stop), (-1, own.data_step)):
            for source, count in enumerate(order.consumed(order.first_sample(step))):
                samples[source] += sign * count
    parts = [ident.split("/")[-2] if ident.count("/") >= 2 else ident for ident in order.ids]
    names = [name if parts.count(name) == 1 else ident for name, ident in zip(parts, order.ids, strict=True)]
    return [
        SourceTokens(name, samples[at] * order.seq_len, size * order.seq_len, samples[at] / size if size else 0.0)
        for at, (name, size) in enumerate(zip(names, order.windows, strict=True))
    ]
