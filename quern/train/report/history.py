"""Tells of a training run's rows which are its present branch, and finds its attempts, checkpoints and odd steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from quern.config import load_config
from quern.errors import InputError
from quern.train.checkpoint.format.manifest import CONFIG_FILE, list_checkpoints
from quern.train.config import TrainConfig
from quern.train.history.branch import LEDGER_FILE, left_behind
from quern.train.history.ledger import MOVES, UNHEALTHY, read_ledger
from quern.train.history.metrics_file import METRICS_FILE, MetricsTable, Validation, read_metrics

__all__ = ["ABANDONED", "AGAIN", "KEPT", "Attempt", "Odd", "Run", "SavedCheckpoint", "open_run", "when"]

Entry = Mapping[str, Any]
#: What has become of a row: its step is in the present weights; it was done again after an end without a checkpoint; or
#: the run was taken back behind it.
KEPT, AGAIN, ABANDONED = 0, 1, 2


@dataclass(frozen=True)
class Attempt:
    """One start, resume or rollback, from ``step`` on. ``began`` and ``last`` (its last line): seconds since 1970.
    ``ended``: how, in words. ``rows``: its rows of metrics. ``facts``: its lines in the ledger."""

    number: int
    kind: str
    step: int
    began: float
    last: float
    ended: str
    rows: NDArray[np.int64]
    facts: Sequence[Entry]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that the ledger tells of, after ``step`` steps. ``kept``: it is of the present branch."""

    step: int
    state: str
    """In words."""
    good: bool
    failed: bool
    kept: bool


@dataclass(frozen=True)
class Odd:
    """A step that was not as it should be, as its lines in the ledger tell; ``kept``: it is of the present branch."""

    step: int
    attempt: int
    what: tuple[str, ...]
    loss: float
    loss_z: float
    norm: float
    norm_z: float
    kept: bool


@dataclass(frozen=True, eq=False)
class Run:
    """A training run, read.

    ``fate``: int64 [rows], of each row of ``metrics``. ``order``: its surviving rows by step. ``first``: the number of
    the first attempt that is its own: a fork's ledger begins with those of the run that it comes from.
    ``validations``: those of the present branch, by step. ``config``: of the last start, ``record``: run.json, as plain
    data, empty where there is none.
    """

    path: str
    name: str
    entries: Sequence[Entry]
    metrics: MetricsTable
    fate: NDArray[np.int64]
    order: NDArray[np.int64]
    attempts: tuple[Attempt, ...]
    first: int
    checkpoints: tuple[SavedCheckpoint, ...]
    odd: tuple[Odd, ...]
    validations: tuple[Validation, ...]
    config: Mapping[str, Any]
    record: Mapping[str, Any]

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The surviving steps, ascending."""
        return self.metrics.step[self.order]

    @property
    def reached(self) -> int:
        """Steps that are complete, by metrics."""
        return int(self.steps[-1]) + 1

    def kept(self, name: str) -> NDArray[np.float64]:
        """A column of the surviving rows, by step."""
        return self.metrics.column(name)[self.order]


def open_run(path: str) -> Run:
    """The training run in the folder ``path``.

    Raises:
        InputError: it is none, or has not completed a step.
        QuernError: its ledger is damaged.
    """
    ledger = os.path.join(path, LEDGER_FILE)
    if not os.path.isfile(ledger):
        raise InputError(f"{path}: expected the folder of a training run: it has no {LEDGER_FILE}")
    metrics = read_metrics(path)  # before the ledger, whose lines open the attempts of these rows
    entries = read_ledger(ledger)
    if not len(metrics.step):
        raise InputError(
            f"{os.path.join(path, METRICS_FILE)}: expected at least one step, got none; nothing to show yet"
        )
    places = [place for place, entry in enumerate(entries) if entry["kind"] in MOVES]
    if not places:
        raise InputError(f"{ledger}: expected a line that begins the run, got none")
    moves = [entries[place] for place in places]
    fate = _fates(metrics, moves)
    kept = np.flatnonzero(fate == KEPT)
    order = kept[np.argsort(metrics.step[kept], kind="stable")]
    order = order[np.flatnonzero(np.diff(metrics.step[order], append=-1) != 0)]  # of a step told twice the later
    if not len(order):
        raise InputError(f"{path}: expected a step of the branch that the run is on, got none since it went back")
    fork = max((place for place, entry in enumerate(entries) if entry["kind"] == "fork"), default=-1)
    attempts, stops = tuple(_attempts(entries, places, metrics)), _stops(moves)
    return Run(
        path=path, name=os.path.basename(os.path.abspath(path)), entries=entries, metrics=metrics, fate=fate,
        order=order, attempts=attempts, first=min(sum(place < fork for place in places), len(places) - 1),
        checkpoints=tuple(_checkpoints(path, entries)), odd=tuple(_odd(attempts, stops)),
        validations=_validations(metrics, stops), config=_plain(path, CONFIG_FILE), record=_plain(path, "run.json"),
    )  # fmt: skip


def when(entry: Entry) -> float:
    """When a line of the ledger was written, in seconds since 1970; NaN where it does not tell."""
    try:
        return datetime.fromisoformat(entry["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan


def _stops(moves: Sequence[Entry]) -> list[float]:
    """For each attempt, the step from which on its steps do not survive."""
    stops, lowest = [], math.inf
    for move in reversed(moves):
        stops.append(lowest)
        lowest = min(lowest, move["step"])
    return stops[::-1]


def _fates(metrics: MetricsTable, moves: Sequence[Entry]) -> NDArray[np.int64]:
    fate = np.zeros(len(metrics.step), np.int64)
    for number, stop in enumerate(_stops(moves)):
        rows = np.flatnonzero(metrics.attempt == number)
        steps = metrics.step[rows]
        if not len(rows) or steps.max() < stop:
            continue
        for move in moves[number + 1 :]:
            cut = (fate[rows] == KEPT) & (steps >= move["step"])
            fate[rows[cut]] = ABANDONED if move["kind"] == "rollback" else AGAIN
    return fate


def _attempts(entries: Sequence[Entry], moves: Sequence[int], metrics: MetricsTable) -> Iterator[Attempt]:
    for number, (place, end) in enumerate(zip(moves, [*moves[1:], len(entries)], strict=True)):
        entry, facts = entries[place], entries[place + 1 : end]
        rows = np.flatnonzero(metrics.attempt == number)
        times = [when(entry), *map(when, facts), *metrics.column("time")[rows[-1:]]]
        times += [own.time for own in metrics.validations if len(rows) and rows[0] < own.row <= rows[-1] + 1]
        last = max((time for time in times if not math.isnan(time)), default=math.nan)
        ended = _ended(facts, end == len(entries))
        yield Attempt(number, entry["kind"], entry["step"], when(entry), last, ended, rows, facts)


def _ended(facts: Sequence[Entry], newest: bool) -> str:
    for fact in reversed(facts):
        if fact["kind"] == "end":
            return "complete"
        if fact["kind"] == "stopped":
            return f"stopped by {fact.get('signal')}"
        if fact["kind"] == "fork":
            return "forked from here"
        if fact["kind"] == "corrupt":
            return f"left after step {fact['step']}: its weights were corrupt"
    return "running, or ended without a record" if newest else "ended without a record"


def _checkpoints(path: str, entries: Sequence[Entry]) -> Iterator[SavedCheckpoint]:
    standing = {found.step for found in list_checkpoints(path)}
    saved: dict[int, int] = {}
    good: set[int] = set()
    failed: dict[int, str] = {}
    for place, entry in enumerate(entries):
        step = entry.get("step", -1)
        if entry["kind"] == "checkpoint":
            saved[step] = place
            good.discard(step)
            failed.pop(step, None)
        elif entry["kind"] == "good":
            good.add(step)
        elif entry["kind"] == "checkpoint_failed":
            failed[step] = str(entry.get("why", ""))
    for step, place in sorted(saved.items()):
        left = left_behind(step, entries[place + 1 :])
        state = "good" if step in good else "saved"
        if step in failed:
            state = f"not saved: {failed[step]}"
        elif left:
            state = "on a branch that was left"
        elif step not in standing:
            state += ", removed since"
        yield SavedCheckpoint(step, state, step in good, step in failed, left is None)


def _odd(attempts: Sequence[Attempt], stops: Sequence[float]) -> Iterator[Odd]:
    words = {"skipped": "skipped", "non_finite": "not finite"}
    for attempt, stop in zip(attempts, stops, strict=True):
        steps: dict[int, list[Entry]] = {}
        for fact in attempt.facts:
            if fact["kind"] in UNHEALTHY:
                steps.setdefault(fact["step"], []).append(fact)
        for step, facts in sorted(steps.items()):
            what = [words.get(fact["kind"], "spike") for fact in facts]
            what += ["not finite" for fact in facts if fact.get("reason") == "non_finite"]
            told = {name: value for fact in facts for name, value in fact.items() if isinstance(value, int | float)}
            loss, z, norm, norm_z = (
                float(told.get(name, math.nan)) for name in ("loss", "loss_z", "grad_norm", "grad_norm_z")
            )
            yield Odd(step, attempt.number, tuple(dict.fromkeys(what)), loss, z, norm, norm_z, step < stop)


def _validations(metrics: MetricsTable, stops: Sequence[float]) -> tuple[Validation, ...]:
    """Those of the present branch; of two at one step the later."""
    kept = {}
    for own in metrics.validations:
        attempt = int(metrics.attempt[own.row - 1]) if own.row else 0
        if attempt >= len(stops) or own.step <= stops[attempt]:
            kept[own.step] = own
    return tuple(kept[step] for step in sorted(kept))


def _plain(path: str, name: str) -> Mapping[str, Any]:
    """The config, with the defaults of this version where it can be read by it, or run.json (which is YAML too)."""
    file = os.path.join(path, name)
    try:
        if name == CONFIG_FILE:
            return load_config(file, TrainConfig).model_dump(mode="json")
    except InputError:
        pass
    try:
        with open(file, encoding="utf-8") as text:
            found = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
