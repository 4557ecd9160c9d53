"""The ledger: which data step each optimizer step read, across restarts, rollbacks and skipped data.

``RUN/ledger.jsonl`` is append-only, one JSON object a line, each synced before :meth:`Ledger.append` returns. *Step t*
is an optimiser step (the first is 0, so "at step t" means that t steps are complete); a *data step* is a step of the
order. They differ by the data that was never read. One sort of line relates them: ``start``, ``resume`` and
``rollback`` say "from model step ``step`` on, the data step is ``data_step + (t - step)``, read from ``order``". Such a
line discards every step ≥ ``step`` of the attempts before it. What is left are the *surviving* ranges: the steps that
the present weights are made of.

Lines that move the order keep three rules, so that model steps stay contiguous, data ranges stay disjoint and
ascending, and the newest order alone explains every surviving step:

- L1: ``step`` is at most the step the run has reached.
- L2: ``data_step`` is at or after the end of the data that survives at ``step``.
- L3: the order gives the same samples as the one before it on all data steps before ``data_step``.

Other lines are facts: ``order {hash, spec}``; ``skipped {step, data_step, reason}``, a step whose data was read and
whose update was not applied; ``spike {step, data_step, …}``; ``non_finite {step, data_step, …}``, a step whose loss or
gradient norm was NaN or infinite and whose update was applied all the same; ``checkpoint {step, data_step, name}``,
appended before the checkpoint is published, so that what can be resumed is always known to be reached;
``checkpoint_failed {step, why}``, after it, when the checkpoint was not published and will not be; ``good {step,
name}``, a published checkpoint that healthy steps followed (:mod:`quern.train.history.health`); ``back {step, reason,
before, leave_out, good, order}``, the run ends to go back by itself (:mod:`quern.train.history.back`); ``straggler
{step, what, ranks, slower}``, ranks whose computation is slow, or with ``slower`` 0 is not any more; ``slow_links
{step, found, links, before, now}``, what was found in so many links when transfers had come to take more of the
computation's time, ``now`` and ``before`` (:mod:`quern.train.supervision.link_probe`); ``placement {step, layers}``,
after ``step`` steps experts were placed anew: of each layer, by its number, which stand in each place now, by their
numbers before (:mod:`quern.train.step.placement`); ``corrupt {step, since, group,
ranks, hosts, certain, tensors, num_tensors}``, copies that differed after ``step`` steps and were last equal after
``since`` (:mod:`quern.train.supervision.replicas`), or with ``pairs`` two computations of a micro-batch
(:mod:`quern.train.supervision.recomputation`); ``complete {step}``, steps that another trainer says it has completed;
``end {step}``; ``stopped {step, signal}``, with ``failing``, their ranks, where GPUs fail; ``fork {step, data_step,
run, path}``: the lines before it are those of the run ``run`` in the folder ``path``, up to its checkpoint after
``step`` steps, from which this run goes on. Facts of an attempt stand before the line that opens the next one. A
healthy step leaves no line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quern import storage
from quern.closes import Closes
from quern.errors import QuernError
from quern.mixtures.order import Order

__all__ = [
    "MOVES", "UNHEALTHY", "Ledger", "Range", "check_append", "data_end", "data_step", "latest_order", "nulled",
    "opening", "reached", "read_ledger", "skips_before", "surviving",
]  # fmt: skip

Entry = Mapping[str, Any]

#: The kinds of line that relate model steps to data steps.
MOVES = ("start", "resume", "rollback")

#: The kinds of line that say of a step that it was not as it should be.
UNHEALTHY = ("skipped", "spike", "non_finite")

#: The kinds of line that prove progress, and how many steps beyond ``step`` are complete by them.
_PROGRESS = {"checkpoint": 0, "complete": 0, "end": 0, "stopped": 0, "fork": 0} | dict.fromkeys(UNHEALTHY, 1)


@dataclass(frozen=True)
class Range:
    """Model steps [step, stop) that survive; step t read data step ``data_step + (t - step)`` of ``order`` (a hash).

    ``stop`` is None for a range that still goes on.
    """

    step: int
    stop: int | None
    data_step: int
    order: str

    @property
    def data_stop(self) -> int | None:
        """The end of the data steps read; None for a range that still goes on."""
        return None if self.stop is None else self.data_step + self.stop - self.step


def opening(entries: Iterable[Entry]) -> list[Entry]:
    """The lines that open its attempts: those of :data:`MOVES`."""
    return [entry for entry in entries if entry["kind"] in MOVES]


def surviving(entries: Iterable[Entry], t_end: int | None) -> tuple[Range, ...]:
    """The ranges of model steps < ``t_end`` that the weights after ``t_end`` steps are made of, in ascending order.

    For the weights of a checkpoint of an abandoned attempt, give the lines up to that checkpoint's ledger offset.
    ``t_end`` None leaves the last range open.
    """
    return tuple(found for _, found in _surviving(list(entries), t_end))


def _surviving(entries: Sequence[Entry], t_end: int | None) -> list[tuple[int, Range]]:
    """Each surviving range with the place of its line."""
    found: list[tuple[int, Range]] = []
    stop = t_end
    for place in range(len(entries) - 1, -1, -1):
        entry = entries[place]
        if entry["kind"] not in MOVES:
            continue
        step = entry["step"]
        if stop is None or step < stop:
            found.append((place, Range(step, stop, entry["data_step"], entry["order"])))
            stop = step
    return found[::-1]


def data_step(entries: Iterable[Entry], step: int) -> int:
    """The data step that optimiser step ``step`` read, or will read when the run gets there.

    Raises:
        QuernError: no line covers the step.
    """
    for entry in reversed(list(entries)):  # the last line at or below the step is the one that no later line overrides
        if entry["kind"] in MOVES and entry["step"] <= step:
            return int(entry["data_step"] + step - entry["step"])
    raise QuernError(f"the ledger has no line that says which data step {step} reads; expected a start at step 0")


def data_end(entries: Iterable[Entry], step: int) -> int:
    """One beyond the last data step read by the surviving steps before ``step``; 0 for step 0."""
    return data_step(entries, step - 1) + 1 if step else 0


def _skipped(entries: Sequence[Entry], place: int, step: int, data_step: int) -> bool:
    """Whether the attempt that the line at ``place`` opened skipped the step; the same step of other attempts may
    have been applied.
    """
    for entry in entries[place + 1 :]:
        if entry["kind"] in MOVES:
            return False
        if entry["kind"] == "skipped" and (entry["step"], entry["data_step"]) == (step, data_step):
            return True
    return False


def skips_before(entries: Iterable[Entry], step: int) -> int:
    """How many surviving steps right before ``step``, one after the other, were skipped."""
    lines = list(entries)
    count = 0
    for place, found in reversed(_surviving(lines, step)):
        for other in range(step - count - 1, found.step - 1, -1):
            if not _skipped(lines, place, other, found.data_step + other - found.step):
                return count
            count += 1
    return count


def reached(entries: Iterable[Entry]) -> int:
    """The number of optimizer steps that the present branch has certainly completed, by its lines."""
    step = 0
    for entry in entries:
        if entry["kind"] in MOVES:
            step = entry["step"]
        elif entry["kind"] in _PROGRESS:
            step = max(step, entry["step"] + _PROGRESS[entry["kind"]])
    return step


def latest_order(entries: Iterable[Entry]) -> Order | None:
    """The order of the newest line that moves it; None before the first.

    Raises:
        QuernError: no ``order`` line has its spec, or the spec gives an order with another hash.
    """
    lines = list(entries)
    wanted = _latest_hash(lines)
    if wanted is None:
        return None
    spec = next((entry["spec"] for entry in lines if entry["kind"] == "order" and entry["hash"] == wanted), None)
    if spec is None:
        raise QuernError(f"the ledger reads from order {wanted} but has no line with its spec")
    try:
        order = Order.from_dict(spec)
    except ValueError as error:
        raise QuernError(f"the spec of order {wanted} in the ledger cannot be used: {error}") from None
    if order.hash != wanted:
        raise QuernError(f"the ledger's spec of order {wanted} makes an order with hash {order.hash}")
    return order


def _latest_hash(entries: Sequence[Entry]) -> str | None:
    return next((entry["order"] for entry in reversed(entries) if entry["kind"] in MOVES), None)


def check_append(entries: Iterable[Entry], step: int, data_step: int, order: Order) -> None:
    """Refuse a line that moves the order and breaks L1, L2 or L3; the first line is at step 0.

    Raises:
        QuernError: the rule that would break, with the values.
    """
    lines = list(entries)
    if not 0 <= step <= reached(lines):
        raise QuernError(f"cannot go on from step {step}: the ledger proves steps up to {reached(lines)} only")
    end = data_end(lines, step)
    if data_step < end:
        raise QuernError(
            f"cannot read data step {data_step} at step {step}: the weights have seen the data before {end}; "
            f"expected a data step ≥ {end}"
        )
    previous = _latest_hash(lines)
    if previous in (None, order.hash):
        return
    before = latest_order(lines)
    if before is not None and not order.agrees(before, data_step):
        raise QuernError(
            f"the order {order.hash} gives other samples than {previous} before data step {data_step}; changes of "
            "sources, weights, batch size or seed open a phase there"
        )


def read_ledger(path: str | os.PathLike[str], stop: int | None = None) -> list[dict[str, Any]]:
    """The lines of a ledger, also while another process appends to it; a last line that is not whole yet is left out.

    ``stop``: only the lines within the first ``stop`` bytes (a checkpoint's ledger offset).

    Raises:
        QuernError: a line is not an entry (the file and the line are named), or the file cannot be read or is
            shorter than ``stop``.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(-1 if stop is None else stop)
    except OSError as error:
        raise QuernError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from None
    if stop is not None and len(data) < stop:
        raise QuernError(f"{os.fspath(path)}: has {len(data)} bytes, expected at least {stop}; lines are lost")
    return _parse(os.fspath(path), data)[0]


def _parse(path: str, data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The entries, and the number of bytes they take: fewer than given if the last line is torn."""
    entries: list[dict[str, Any]] = []
    size = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is torn, or empty
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            if number == len(lines) - 1 and not lines[-1]:
                break  # blocks reach a disk in any order: a newline may have arrived without what stands before it
            raise QuernError(f"{path}: line {number} is damaged: expected a JSON object, got {line[:60]!r}")
        if (wrong := _wrong_field(entry)) is not None:
            raise QuernError(f"{path}: line {number}: {wrong}")
        entries.append(entry)
        size += len(line) + 1
    return entries, size


_LIMIT = 1 << 40
"""Beyond all steps: a line that says more is damaged."""
_NUMBERS = {
    **dict.fromkeys((*MOVES, "skipped", "non_finite", "checkpoint", "fork"), ("step", "data_step")),
    **dict.fromkeys(
        ("spike", "checkpoint_failed", "complete", "good", "end", "stopped", "straggler", "slow_links", "placement"),
        ("step",),
    ),
    "back": ("step", "before"),
    "corrupt": ("step", "since"),
}
_TEXTS = {
    **dict.fromkeys(MOVES, ("order",)), **dict.fromkeys(("checkpoint", "good"), ("name",)), "order": ("hash",),
    "fork": ("run", "path"), "back": ("reason", "order"),
}  # fmt: skip


def _wrong_field(entry: Entry) -> str | None:
    kind = entry.get("kind")
    if not isinstance(kind, str):
        return f"kind: expected text, got {kind!r}"
    for name in _NUMBERS.get(kind, ()):
        value = entry.get(name)
        if type(value) is not int or not 0 <= value < _LIMIT:
            return f"{kind}.{name}: expected an integer ≥ 0 and < 2^40, got {value!r:.40}"
    for name in _TEXTS.get(kind, ()):
        if not isinstance(entry.get(name), str):
            return f"{kind}.{name}: expected text, got {entry.get(name)!r}"
    if kind == "back" and not (isinstance(out := entry.get("leave_out"), list) and all(type(n) is int for n in out)):
        return f"back.leave_out: expected a list of integers, got {entry.get('leave_out')!r:.40}"
    if kind == "back" and type(entry.get("good")) is not bool:
        return f"back.good: expected true or false, got {entry.get('good')!r:.40}"
    if kind == "order" and not isinstance(entry.get("spec"), dict):
        return f"order.spec: expected a mapping, got {entry.get('spec')!r}"
    return None


def nulled(value: Any, digits: int = 17) -> Any:
    """Plain data for JSON, which has no NaN: a number that is not finite becomes None; others keep so many significant
    ``digits``, of which 17 are all that a double has."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: nulled(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nulled(item, digits) for item in value]
    return value


class Ledger(Closes):
    """The one writer of a run's ledger. Opening it cuts off a torn last line; others read with :func:`read_ledger`.

    Attributes: ``entries`` (every line), ``offset`` (the bytes they take: what a checkpoint records).

    Raises:
        QuernError: a line before the last is damaged (file and line are named), or the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        folder = os.path.dirname(os.path.abspath(self.path))
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = storage.open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise QuernError(f"{self.path}: cannot be opened ({error.strerror})") from None
        try:
            storage.sync(folder)  # a synced line in a file whose name is lost would be lost
            with open(self.path, "rb") as file:
                data = file.read()
            self.entries, self.offset = _parse(self.path, data)
            if self.offset < len(data):
                os.ftruncate(self._file, self.offset)
                os.fsync(self._file)
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Write one line, synced, with the time (ISO 8601, UTC). Numbers that are not finite are written as null.

        Raises:
            QuernError: the disk refused it; the ledger is as before.
            ValueError: a field of a known kind is missing or is not what it should be.
        """
        if self._file < 0:
            raise ValueError(f"{self.path}: the ledger is closed")
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind} | nulled(fields)
        if (wrong := _wrong_field(entry)) is not None:
            raise ValueError(wrong)
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            written = 0
            with storage.needs_room(self.path):
                while written < len(line):
                    written += os.write(self._file, line[written:])
                os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self.offset)  # half a line would damage the next one
            told = error if isinstance(error, QuernError) else f"{self.path}: cannot be written ({error.strerror})"
            raise QuernError(told) from None
        self.offset += len(line)
        self.entries.append(json.loads(line))
        return self.entries[-1]

    def move(self, kind: str, step: int, data_step: int, order: Order, **facts: Any) -> dict[str, Any]:
        """Append a line of :data:`MOVES` that :func:`check_append` allows; before it, the order's spec if it is new."""
        if kind not in MOVES:
            raise ValueError(f"expected one of {', '.join(MOVES)}, got {kind!r}")
        check_append(self.entries, step, data_step, order)
        if not any(entry["kind"] == "order" and entry["hash"] == order.hash for entry in self.entries):
            self.append("order", hash=order.hash, spec=order.to_dict())
        return self.append(kind, step=step, data_step=data_step, order=order.hash, **facts)
