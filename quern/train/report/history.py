"""Tells of a training run's rows which are its present branch, and finds its attempts and checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.config import read_yaml
from quern.errors import InputError
from quern.train.checkpoint.format.manifest import CONFIG_FILE
from quern.train.history.branch import LEDGER_FILE
from quern.train.history.ledger import MOVES, opening, read_ledger
from quern.train.history.metrics_file import METRICS_FILE, MetricsTable, Validation, read_metrics, when

__all__ = ["ABANDONED", "AGAIN", "KEPT", "Attempt", "Run", "open_run"]

Entry = Mapping[str, Any]
#: What has become of a row: its step is in the present weights; it was done again after an end without a checkpoint; or
#: the run was taken back behind it.
KEPT, AGAIN, ABANDONED = 0, 1, 2
_CHECKPOINTS = {"checkpoint": "saved", "good": "good", "checkpoint_failed": "failed"}


@dataclass(frozen=True)
class Attempt:
    """One start, resume or rollback, from ``step`` on. ``began`` and ``last`` (its last line): seconds since 1970.
    ``stop``: its steps from there on do not survive. ``rows``: its rows of metrics. ``facts``: its lines in the ledger,
    the one that opens it first."""

    number: int
    kind: str
    step: int
    stop: float
    began: float
    last: float
    rows: NDArray[np.int64]
    facts: Sequence[Entry]


@dataclass(frozen=True, eq=False)
class Run:
    """A training run, read.

    ``fate``: int64 [rows], of each row of ``metrics``. ``order``: its surviving rows by step. ``first``: the number of
    the first attempt that is its own: a fork's ledger begins with those of the run that it comes from.
    ``validations``: those of the present branch, by step. ``config``: of the last start, ``record``: run.json, as plain
    data, empty where there is none.
    """

    path: str
    entries: Sequence[Entry]
    metrics: MetricsTable
    fate: NDArray[np.int64]
    order: NDArray[np.int64]
    attempts: tuple[Attempt, ...]
    first: int
    validations: tuple[Validation, ...]
    config: Mapping[str, Any]
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return os.path.basename(os.path.abspath(self.path))

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The surviving steps, ascending."""
        return self.metrics.step[self.order]

    @property
    def reached(self) -> int:
        """Steps that are complete, by metrics."""
        return int(self.steps[-1]) + 1

    @property
    def ended(self) -> str:
        """How the last attempt ended, in words."""
        told = next((own for own in reversed(self.attempts[-1].facts) if own["kind"] in ("end", "stopped")), None)
        if told is None:
            return "running, or ended without a record"
        return "complete" if told["kind"] == "end" else f"stopped by {told.get('signal')}"

    @property
    def checkpoints(self) -> dict[int, str]:
        """Those of the present branch, by step: ``good``, ``saved`` (not known to be good) or ``failed``."""
        told = [(fact, own.stop) for own in self.attempts for fact in own.facts if fact["kind"] in _CHECKPOINTS]
        return {fact["step"]: _CHECKPOINTS[fact["kind"]] for fact, stop in told if fact["step"] <= stop}

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
    attempts = tuple(_attempts(entries, metrics))
    if not attempts:
        raise InputError(f"{ledger}: expected a line that begins the run, got none")
    fate = np.zeros(len(metrics.step), np.int64)
    for own in attempts[1:]:
        cut = (fate == KEPT) & (metrics.attempt < own.number) & (metrics.step >= own.step)
        fate[cut] = ABANDONED if own.kind == "rollback" else AGAIN
    kept = np.flatnonzero(fate == KEPT)
    order = kept[np.argsort(metrics.step[kept], kind="stable")]
    order = order[np.flatnonzero(np.diff(metrics.step[order], append=-1) != 0)]  # of a step told twice the later
    if not len(order):
        raise InputError(f"{path}: expected a step of the branch that the run is on, got none since it went back")
    fork = max((place for place, entry in enumerate(entries) if entry["kind"] == "fork"), default=0)
    first = min(len(opening(entries[:fork])), len(attempts) - 1)
    config, record = (_mapping(os.path.join(path, name)) for name in (CONFIG_FILE, "run.json"))
    validations = _validations(metrics, attempts)
    return Run(path, entries, metrics, fate, order, attempts, first, validations, config, record)


def _attempts(entries: Sequence[Entry], metrics: MetricsTable) -> Iterator[Attempt]:
    places = [place for place, entry in enumerate(entries) if entry["kind"] in MOVES]
    for number, (place, end) in enumerate(zip(places, [*places[1:], len(entries)], strict=True)):
        facts, rows = entries[place:end], np.flatnonzero(metrics.attempt == number)
        times = [*map(when, facts), *metrics.column("time")[rows[-1:]]]
        times += [own.time for own in metrics.validations if len(rows) and rows[0] < own.row <= rows[-1] + 1]
        last = max((time for time in times if not math.isnan(time)), default=math.nan)
        stop = min((entries[later]["step"] for later in places[number + 1 :]), default=math.inf)
        yield Attempt(number, facts[0]["kind"], facts[0]["step"], stop, times[0], last, rows, facts)


def _validations(metrics: MetricsTable, attempts: Sequence[Attempt]) -> tuple[Validation, ...]:
    """Those of the present branch; of two at one step the later."""
    kept = {}
    for own in metrics.validations:
        attempt = int(metrics.attempt[own.row - 1]) if own.row else 0
        if attempt >= len(attempts) or own.step <= attempts[attempt].stop:
            kept[own.step] = own
    return tuple(kept[step] for step in sorted(kept))


def _mapping(file: str) -> Mapping[str, Any]:
    with suppress(InputError):
        return read_yaml(file)  # JSON is YAML too
    return {}
