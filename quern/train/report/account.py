"""Accounts for the wall clock time of a training run, and for the tokens that its present weights were made of."""

from __future__ import annotations

import math
from collections import Counter
from datetime import timedelta

import numpy as np

from quern.tokenize.selection.chosen import Identity
from quern.train.history.ledger import latest_order, surviving
from quern.train.report.history import ABANDONED, AGAIN, KEPT, Attempt, Run, open_run

__all__ = ["PARTS", "account", "goodput", "tokens_by_source"]

#: What the time went into, in the order shown, with a word for each.
PARTS = {
    "compute": "steps, without waits",
    "data": "waits for data",
    "communication": "waits for other ranks",
    "skipped": "steps whose update was skipped",
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
    known = [np.array([(one.began, one.last) for one in own]), *map(run.metrics.column, ("time", "step_time_s"))]
    if any(np.isnan(times).any() for times in known):
        return None
    spent = dict.fromkeys(PARTS, 0.0)
    for number, attempt in enumerate(own):
        seconds, fate = run.metrics.column("step_time_s")[attempt.rows], run.fate[attempt.rows]
        wait = np.minimum(np.nan_to_num(run.metrics.column("data_wait_s")[attempt.rows]), seconds)
        ranks = np.nan_to_num(run.metrics.column("ranks.comm_wait_s.median")[attempt.rows])
        ranks = np.minimum(ranks, seconds - wait)
        used = (fate == KEPT) & ~(run.metrics.column("skipped")[attempt.rows] == 1)
        for name, times, of in (
            ("data", wait, used), ("communication", ranks, used), ("compute", seconds - wait - ranks, used),
            ("skipped", seconds, (fate == KEPT) & ~used), ("again", seconds, fate == AGAIN),
            ("abandoned", seconds, fate == ABANDONED),
        ):  # fmt: skip
            spent[name] += float(times[of].sum())
        _between_steps(run, attempt, spent)
        if number:
            spent["between"] += max(0.0, attempt.began - own[number - 1].last)
    return spent


def goodput(run_dir: str) -> str | None:
    """Which share of a run's time went into steps whose update its present weights have, and the rest by part, in a
    line; None where the files do not tell times.

    Raises:
        QuernError: the run cannot be read.
    """
    spent = account(open_run(run_dir)) or {}
    total = sum(spent.values())
    if not total:
        return None
    parts = sorted(((value / total, name) for name, value in spent.items() if name != "compute"), reverse=True)
    rest = ", ".join(f"{PARTS[name]} {share:.1%}" for share, name in parts if share >= 0.0005)
    return f"goodput {spent['compute'] / total:.1%} of {timedelta(seconds=round(total))}" + f" ({rest})" * bool(rest)


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


def tokens_by_source(run: Run) -> list[tuple[str, int, int]]:
    """Of each source its name, the tokens of it that the surviving steps have read, and those of an epoch: by the
    ledger alone, whose newest order explains every such step. None where no order says how long a window is.

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
    wheres = {ident: where for entry in run.entries for ident, where in (entry.get("wheres") or {}).items()}
    streams = [Identity(ident).stream for ident in order.ids]
    parts = [stream.split("/")[-2] if stream.count("/") >= 2 else stream for stream in streams]
    parts = [
        f"{part} where {wheres[own]}" if own in wheres else part for part, own in zip(parts, order.ids, strict=True)
    ]
    names = [
        name if parts.count(name) == 1 else f"{name} ({stream})" for name, stream in zip(parts, streams, strict=True)
    ]
    read = [samples[source] * order.seq_len for source in range(len(names))]
    return list(zip(names, read, (size * order.seq_len for size in order.windows), strict=True))
