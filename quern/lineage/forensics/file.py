"""Reads and checks a training run's ``forensics/step_00000123.json``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quern import storage
from quern.errors import InputError

if TYPE_CHECKING:
    from quern.lineage.steps import StepRead
    from quern.lineage.training import TrainingRun

__all__ = ["COLUMNS", "FOLDER", "Chosen", "ForensicsRecord", "StepRecord", "losses_of", "read_record"]

FOLDER = "forensics"
FORMAT = 1

_NAME = re.compile(r"step_(\d{8,})(?:\.attempt_(\d+))?\.json")
COLUMNS = ("place", "dp_rank", "micro_batch", "row", "source", "epoch", "window", "targets")


@dataclass(frozen=True)
class Chosen:
    """How many tokens chose each expert in a step; N layers, E experts."""

    layers: Sequence[int]
    total_NE: NDArray[np.int64]
    """Of the batch."""
    sequences: Sequence[tuple[int, list[int], NDArray[np.int64]]]
    """Of some: the place, where its documents start, and counts [documents, N, E]."""


@dataclass(frozen=True)
class StepRecord:
    """One step of the window. Arrays by sequence, in the order of places."""

    raw: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.raw["step"])

    @property
    def data_step(self) -> int:
        return int(self.raw["data_step"])

    @property
    def layers(self) -> Mapping[str, float | None]:
        """Norm of each layer's gradient; None where it is not finite."""
        layers: Mapping[str, float | None] = self.raw["layers"]
        return layers

    @property
    def figures(self) -> dict[str, Any]:
        """Numbers and flags of the whole step."""
        return {name: value for name, value in self.raw.items() if value is None or isinstance(value, int | float)}

    def column(self, name: str) -> NDArray[np.int64]:
        """One of :data:`COLUMNS`."""
        return self._arrays[name]

    @cached_property
    def _arrays(self) -> dict[str, NDArray[np.int64]]:
        return {name: np.array(self.raw["sequences"][name], np.int64).reshape(-1) for name in COLUMNS}

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """Nats a target; NaN where it is not finite, or nothing is a target."""
        return np.array([np.nan if v is None else v for v in self.raw["sequences"]["loss"]], np.float64)

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        return np.array(self.raw["sequences"]["finite"], np.bool_)

    @cached_property
    def _within(self) -> dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """By place, nats and targets of each piece."""
        within = self.raw["within"]
        return {
            int(place): (np.array([np.nan if v is None else v for v in nats], np.float64), np.array(targets, np.int64))
            for place, nats, targets in zip(within["place"], within["loss"], within["targets"], strict=True)
        }

    def nats_between(self, place: int, start: int, stop: int) -> float | None:
        """Loss of the targets at positions [start, stop), all of which count; infinite if not finite; None where the
        file does not say. A piece's loss is shared out evenly among its targets."""
        found = self._within.get(place)
        if found is None:
            return None
        (nats_P, targets_P), size = found, int(self.raw["within"]["tokens"])
        total = 0.0
        for piece in range(start // size, min(-(-stop // size), len(nats_P))):
            overlap = min(stop, (piece + 1) * size) - max(start, piece * size)
            total += overlap * nats_P[piece] / max(targets_P[piece], 1)
        return float(total) if np.isfinite(total) else float("inf")

    @cached_property
    def chosen(self) -> Chosen | None:
        """None where the file does not tell."""
        told = self.raw.get("experts")
        if told is None:
            return None
        total_NE = np.array(told["total"], np.int64)
        shares = zip(told["place"], told["starts"], told["counts"], strict=True)
        found = Chosen(told["layers"], total_NE, [(p, own, np.array(counts, np.int64)) for p, own, counts in shares])
        shapes = [(counts.shape, (len(starts), *total_NE.shape)) for _, starts, counts in found.sequences]
        if total_NE.shape[:1] != (len(found.layers),) or any(got != expected for got, expected in shapes):
            raise ValueError(f"step {self.step}: experts: expected counts [documents, layers, experts]")
        if any(starts != sorted({*starts}) or starts[:1] != [0] for _, starts, _ in found.sequences):
            raise ValueError(f"step {self.step}: experts.starts: expected 0 and then ascending positions")
        return found

    def along(self, place: int) -> list[float | None] | None:
        """Nats a target of each piece of a sequence; None where there is none or it is not finite."""
        if place not in self._within:
            return None
        nats_P, targets_P = self._within[place]
        with np.errstate(invalid="ignore", divide="ignore"):
            return [float(mean) if np.isfinite(mean) else None for mean in nats_P / targets_P]


@dataclass(frozen=True)
class ForensicsRecord:
    """The content of a file."""

    path: str
    attempt: int
    reasons: list[str]
    decision: str
    policy: Mapping[str, Any]
    layout: Mapping[str, Any]
    sources: list[str]
    """Identities, by their number in the order."""
    parameters: Mapping[str, float | None]
    steps: list[StepRecord]
    """Ascending; the last one is the step."""
    first: Mapping[str, Any] | None
    """Where what is not finite came first; None where that was not looked for."""


def losses_of(run: TrainingRun, read: StepRead) -> dict[int, float | None]:
    """Place in the global batch → loss of the sequence in nats a target (None: not finite, or no targets), where a file
    has them for this step of this attempt; empty where nobody looked, or the file is damaged or of other data."""
    samples = zip(read.sources_G.tolist(), read.epochs_G.tolist(), read.windows_G.tolist(), strict=True)
    known = dict(zip(read.places_G.tolist(), samples, strict=True))
    folder = os.path.join(run.folder_of(read.attempt), FOLDER)
    for match in _names(folder):
        if int(match[1]) < read.step:  # a file looks back from the step it is named by
            continue
        try:
            record = _read(os.path.join(folder, match[0]))
        except InputError:
            continue
        for own in record.steps if record.attempt == read.attempt.number else ():
            if (own.step, own.data_step) == (read.step, read.data_step):
                columns = [own.column(name).tolist() for name in ("place", "source", "epoch", "window")]
                rows = zip(*columns, own.losses.tolist(), strict=True)
                found = {
                    row[0]: None if np.isnan(row[-1]) else row[-1] for row in rows if known.get(row[0]) == row[1:4]
                }
                if found:
                    return found
    return {}


def read_record(run: str, step: int, attempt: int | None = None) -> ForensicsRecord:
    """The file of a step; of several attempts', the newest, or ``attempt``'s.

    Raises:
        InputError: there is none (which there are is said), or it is damaged.
    """
    folder = os.path.join(run, FOLDER)
    names = _names(folder)
    paths = sorted((match for match in names if int(match[1]) == step), key=lambda match: int(match[2] or -1))
    records = [_read(os.path.join(folder, match[0])) for match in paths]
    fitting = [record for record in records if attempt is None or record.attempt == attempt]
    if fitting:
        return max(fitting, key=lambda record: record.attempt)
    if records:
        known = ", ".join(str(record.attempt) for record in records)
        raise InputError(f"{folder}: has step {step} of attempt {known}, expected one of attempt {attempt}")
    steps = sorted({int(match[1]) for match in names})
    told = (
        f"it has steps {', '.join(map(str, steps[:20]))}{' …' if len(steps) > 20 else ''}" if steps else "it has none"
    )
    raise InputError(
        f"{folder}: nothing is written down of step {step}: {told}. A spike, a step that is not finite, "
        "forensics.steps and SIGUSR1 write one"
    )


def _names(folder: str) -> list[re.Match[str]]:
    """The names of the files in a folder, sorted, with step and attempt; none where it is not there."""
    try:
        return [match for name in sorted(os.listdir(folder)) if (match := _NAME.fullmatch(name))]
    except OSError:
        return []


def _read(path: str) -> ForensicsRecord:
    raw = storage.read_json(path)
    if not isinstance(raw, dict) or raw.get("kind") != "forensics":
        raise InputError(f"{path}: expected what the trainer writes down of a step")
    if raw.get("format") != FORMAT:
        raise InputError(f"{path}: format: expected {FORMAT}, got {raw.get('format')!r}")
    try:
        steps = [StepRecord(step) for step in raw["steps"]]
        record = ForensicsRecord(
            path, int(raw["attempt"]), list(raw["reasons"]), str(raw["decision"]), dict(raw["policy"]),
            dict(raw["layout"]), [str(name) for name in raw["sources"]], dict(raw["parameters"]), steps,
            raw.get("first_non_finite"),
        )  # fmt: skip
        for own in steps:
            _check(own, len(record.sources))
        texts = [record.decision, *record.reasons, *record.sources, *record.parameters]
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise ValueError("decision, reasons, sources or parameters: expected plain text")
        if not all(_is_figure(value) for value in record.parameters.values()):
            raise ValueError("parameters: expected numbers")
        if not (type(record.layout.get("seq_len")) is int and record.layout["seq_len"] >= 1):
            raise ValueError("layout.seq_len: expected an integer ≥ 1")
        if not steps or steps[-1].step != raw["step"]:
            raise ValueError("steps: expected the step itself as the last")
        if record.first is not None:
            _check_first(record.first, len(steps[-1].column("place")), record.layout["seq_len"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = f"{error.args[0]}: missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: is damaged: {why}") from None
    return record


def _check(own: StepRecord, num_sources: int) -> None:
    """Everything that is looked at later is there, and fits together."""
    num = len(own.column("place"))
    sizes = {name: len(own.column(name)) for name in COLUMNS} | {"loss": len(own.losses), "finite": len(own.finite)}
    for name, size in sizes.items():
        if size != num:
            raise ValueError(f"step {own.step}: sequences.{name}: expected {num} values, got {size}")
    if sorted(own.column("place").tolist()) != list(range(num)):
        raise ValueError(f"step {own.step}: sequences.place: expected each of 0 to {num - 1} once")
    if num and not 0 <= own.column("source").min() <= own.column("source").max() < num_sources:
        raise ValueError(f"step {own.step}: sequences.source: expected numbers below {num_sources}")
    size = int(own.raw["within"]["tokens"])
    if size < 1 or any(len(nats) != len(targets) for nats, targets in own._within.values()):
        raise ValueError(f"step {own.step}: within: expected pieces of 1 token or more, with as many losses as targets")
    if own.chosen is not None and not all(type(layer) is int for layer in own.chosen.layers):
        raise ValueError(f"step {own.step}: experts.layers: expected integers")
    if own.data_step < 0 or not all(_is_figure(value) for value in own.layers.values()):
        raise ValueError(f"step {own.step}: data_step or layers")
    for name in ("loss", "loss_z", "grad_norm", "grad_norm_z"):
        if not _is_figure(own.raw[name]):
            raise ValueError(f"step {own.step}: {name}: expected a number")
    for name in ("skipped", "non_finite", "loss_spike", "grad_norm_spike"):
        if type(own.raw[name]) is not bool:
            raise ValueError(f"step {own.step}: {name}: expected true or false")


def _check_first(first: Mapping[str, Any], num: int, seq_len: int) -> None:
    numbers = [(first[name] or 0, 1 << 32) for name in ("rank", "micro_batch")]
    limits = {"place": num, "position": seq_len, "row": num}
    numbers += [(row[name], stop) for row in first["sequences"] for name, stop in limits.items()]
    plain = all(str(first[name]).isprintable() for name in ("phase", "module", "value", "redone"))
    if not plain or not all(type(number) is int and 0 <= number < stop for number, stop in numbers):
        raise ValueError("first_non_finite: expected a module, numbers of the step's sequences and positions in them")


def _is_figure(value: Any) -> bool:
    """A number that JSON can say, or null."""
    return value is None or (type(value) in (int, float) and math.isfinite(value))
