"""Accounts for the wall clock time of a training run: steps, data, validation, saves, starts, and what was lost."""

from __future__ import annotations

import math

import numpy as np

from quern.train.report.history import ABANDONED, AGAIN, KEPT, Attempt, Run

__all__ = ["PARTS", "account"]

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
    if any(math.isnan(value) for one in own for value in (one.began, one.last)):
        return None
    if np.isnan(run.metrics.column("time")).any() or np.isnan(run.metrics.column("step_time_s")).any():
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
