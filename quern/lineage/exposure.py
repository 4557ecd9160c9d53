"""Finds every training step that read given documents: the sequence and positions, as input or target, applied or not.

Each attempt of a run is asked by the order it read from: a window is located in it for every epoch, and the attempt saw
it if its data step lies in what the ledger proves. What later attempts did not go back behind survives: it is in the
present weights unless the step was skipped.

:func:`walk` needs memory for a block of exposures only, however many documents are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quern.errors import InputError
from quern.lineage.index.changes import purged_at
from quern.lineage.index.columns import I64, Bools
from quern.lineage.selection import Selection, select
from quern.lineage.training import Attempt, SeenCheckpoint, Stretch, TrainingRun
from quern.lineage.windows import never_visited, parts, touching
from quern.mixtures.order import Order

if TYPE_CHECKING:
    from quern.lineage.store import IndexedRun

__all__ = ["Clean", "Exposures", "Tally", "clean", "exposures", "walk"]

#: (window, epoch) pairs that are located at once.
_PAIRS = 1 << 17
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Exposures:
    """A row for each (span, step that read a window with a part of it); parallel arrays."""

    lineages: I64
    """Which selection."""
    spans: I64
    """Which span of the selection."""
    numbers: I64
    streams: I64
    sources: I64
    """Of the attempt's order."""
    attempts: I64
    steps: I64
    """Model steps."""
    data_steps: I64
    sequences: I64
    """Places in the global batch."""
    epochs: I64
    windows: I64
    input_starts: I64
    """Positions [start, stop) of the sequence at which the span is input; [0, 0) where it is not."""
    input_stops: I64
    target_starts: I64
    """Positions at which the next token, the target, is the span's."""
    target_stops: I64
    purged: Bools
    """Nothing of the document was left when the step read it."""
    applied: Bools
    """False: the step's update was skipped."""
    surviving: Bools
    """False: of a branch that the run has left."""

    def __len__(self) -> int:
        return len(self.steps)

    @classmethod
    def join(cls, blocks: Sequence[Self]) -> Self:
        """All rows, ordered by step, sequence, attempt and where they stand in the sequence."""
        names = [field.name for field in fields(cls)]
        columns = {}
        for name in names:
            kind = np.bool_ if name in ("purged", "applied", "surviving") else np.int64
            columns[name] = np.concatenate([np.empty(0, kind), *(getattr(block, name) for block in blocks)])
        joined = cls(**columns)
        place = np.maximum(joined.input_stops, joined.target_stops)
        return joined.take(np.lexsort((place, joined.attempts, joined.sequences, joined.steps)))

    def take(self, chosen: ArrayLike) -> Self:
        """The rows ``chosen`` (indices or a mask)."""
        return type(self)(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


@dataclass
class Tally:
    """Counts of :func:`walk`; one number per attempt in the arrays."""

    run: TrainingRun
    documents: int = 0
    without_tokens: int = 0
    """Documents that are not in any stream: purged, dropped, or duplicates."""
    spans: int = 0
    surviving: int = 0
    """Exposures of the present branch; those of them that count: :attr:`applied`."""
    applied: int = 0
    abandoned: int = 0
    purged: int = 0
    """Surviving exposures in which nothing of the document was left."""
    unsure: int = 0
    """Surviving exposures of documents that were purged later than in the oldest version that the attempt, which does
    not tell which one it read, can have read: that is taken for it."""
    tail_tokens: int = 0
    """Behind the last window: read by no step."""
    first_tokens: int = 0
    """Spans with token 0 of a stream, which is never a target."""
    held_out: int = 0
    """Spans in held-out streams, which no step reads."""
    foreign: int = 0
    """Spans in streams that the run does not read."""
    not_chosen: int = 0
    """Spans of documents that fulfil none of the conditions under which the run reads their stream."""
    windows: int = 0
    """(span, window) pairs; those no surviving step has read: :attr:`unreached`."""
    unreached: int = 0
    left_out: int = 0
    """Places of the order before the run's present one that no surviving step read: data that a rollback skipped."""
    steps: dict[int, list[int]] = field(default_factory=dict)
    """Surviving step → [exposures, applied]."""
    first_applied: I64 = field(init=False)
    """The first step of each attempt whose weights took something in; a number beyond all steps if none."""
    next_unproven: I64 = field(init=False)
    """The first step beyond what is proven that would read something, of attempts that did not say where they ended."""
    first_unknown: I64 = field(init=False)
    """The first step of each attempt of which it is not known whether it read something."""

    def __post_init__(self) -> None:
        self.first_applied, self.next_unproven, self.first_unknown = np.full((3, len(self.run.attempts)), _NEVER)

    def add(self, rows: Exposures) -> None:
        """Count a block."""
        real = rows.applied & ~rows.purged
        np.minimum.at(self.first_applied, rows.attempts[real], rows.steps[real])
        kept = rows.surviving
        self.surviving += int(kept.sum())
        self.applied += int((kept & real).sum())
        self.purged += int((kept & rows.purged).sum())
        self.abandoned += int((~kept).sum())
        steps, which = np.unique(rows.steps[kept], return_inverse=True)
        counts, applied = np.bincount(which), np.bincount(which, weights=real[kept])
        for step, count, own in zip(steps.tolist(), counts.tolist(), applied.tolist(), strict=True):
            row = self.steps.setdefault(step, [0, 0])
            row[0] += count
            row[1] += int(own)


def exposures(run: TrainingRun, selection: Sequence[tuple[IndexedRun, ArrayLike] | Selection]) -> Exposures:
    """Every exposure of the selected documents, of surviving and abandoned steps, ordered by step and sequence.

    ``selection``: document numbers of data runs, or :class:`Selection` of parts.
    """
    chosen = [given if isinstance(given, Selection) else select(*given) for given in selection]
    return Exposures.join(list(walk(run, chosen, Tally(run))))


def walk(run: TrainingRun, selection: Sequence[Selection], tally: Tally) -> Iterator[Exposures]:
    """Yield the exposures in blocks, and count them and the unread tokens in ``tally``."""
    for index, chosen in enumerate(selection):
        tally.documents += len(chosen.documents)
        tally.without_tokens += len(chosen.documents) - len(np.unique(chosen.numbers))
        tally.spans += len(chosen.numbers)
        for number in np.unique(chosen.streams).tolist():
            stream, rows = chosen.lineage.streams[number], np.flatnonzero(chosen.streams == number)
            identities, read = run.identities_of(stream.identity), np.zeros(len(rows), np.bool_)
            if not identities:
                tally.held_out += len(rows) if stream.held_out else 0
                tally.foreign += 0 if stream.held_out else len(rows)
                continue
            for identity in identities:
                try:
                    own, inside = _moved(run, chosen, rows, identity)
                except InputError:  # the run's unknown sources have it
                    read[:] = True
                    continue
                read |= inside
                for block in _blocks(run, own, rows[inside], _readings(run, identity), tally):
                    found = Exposures(lineages=np.full(len(block["steps"]), index), **block)  # type: ignore[arg-type]
                    tally.add(found)
                    yield found
            tally.not_chosen += int((~read).sum())


def _moved(run: TrainingRun, chosen: Selection, rows: I64, identity: str) -> tuple[Selection, Bools]:
    """Spans ``rows`` where they are in the stream of a source, and which of them are in it."""
    stream = run.find_stream(identity)[1]
    if stream.chosen is None:
        return chosen, np.ones(len(rows), np.bool_)
    starts, stops = chosen.starts.copy(), chosen.stops.copy()
    starts[rows] = stream.chosen.place(chosen.starts[rows])
    stops[rows] += starts[rows] - chosen.starts[rows]
    return replace(chosen, starts=starts, stops=stops), starts[rows] >= 0


@dataclass(frozen=True)
class _Reading:
    """A stream as one order gives it, and the attempts that read from that order."""

    order: Order
    source: int
    attempts: tuple[Attempt, ...]
    versions: tuple[int, ...]
    """The corpus version that each attempt read."""
    newest: bool

    @property
    def epochs(self) -> int:
        """Epochs of the source that the attempts can have been given."""
        end = self.order.first_sample(max(attempt.data_stop for attempt in self.attempts))
        given = self.order.consumed(end)[self.source]
        # what a phase's cut has left out of a block is given later than its running index says
        given += sum(phase.block for phase in self.order.phases if phase.global_batch % phase.block)
        return given // max(1, self.order.windows[self.source]) + 1


def _readings(run: TrainingRun, identity: str) -> list[_Reading]:
    by_order: dict[str, list[Attempt]] = {}
    for attempt in run.attempts:
        by_order.setdefault(attempt.order, []).append(attempt)
    found = []
    for attempts in by_order.values():
        order = run.order_of(attempts[0])
        if identity in order.ids:
            versions = tuple(attempt.version_of(identity) for attempt in attempts)
            newest = order.hash == run.order.hash
            found.append(_Reading(order, order.ids.index(identity), tuple(attempts), versions, newest))
    return found


def _blocks(
    run: TrainingRun, chosen: Selection, rows: I64, readings: Sequence[_Reading], tally: Tally
) -> Iterator[dict[str, NDArray[np.generic]]]:
    """Columns of the exposures of spans ``rows`` of one stream."""
    length, kept = run.seq_len, run.kept()
    num_windows = readings[-1].order.windows[readings[-1].source]
    starts, stops = chosen.starts[rows], chosen.stops[rows]
    tally.tail_tokens += int(never_visited(starts, stops, length, num_windows).sum())
    tally.first_tokens += int((starts == 0).sum())
    first, counts = touching(starts, stops, length, num_windows)
    ends = np.cumsum(counts)
    epochs = {reading.order.hash: reading.epochs for reading in readings}
    at_once = max(1, _PAIRS // max(epochs.values()))
    for begin in range(0, int(ends[-1]) if len(ends) else 0, at_once):
        pairs = np.arange(begin, min(begin + at_once, int(ends[-1])))
        own = np.searchsorted(ends, pairs, "right")
        spans, windows = rows[own], first[own] + pairs - (ends - counts)[own]
        visited = np.zeros(len(pairs), np.bool_)
        would = parts(
            chosen.starts[spans], chosen.stops[spans], windows, length, heads=chosen.heads[spans],
            purged=np.zeros(len(spans), np.bool_), document_mask=run.attempts[-1].document_mask,
        ).any  # fmt: skip
        for reading in readings:
            for located in _locate(reading, windows, epochs[reading.order.hash]):
                if reading.newest:
                    tally.left_out += located.left_out(run, would)
                for attempt, version in zip(reading.attempts, reading.versions, strict=True):
                    found = located.of(attempt)
                    _note_next(tally, located, attempt)
                    pair = located.pairs[found]
                    span = spans[pair]
                    purged = purged_at(chosen.purged_since[span], version)  # what went later was there then
                    part = parts(
                        chosen.starts[span], chosen.stops[span], windows[pair], length,
                        heads=chosen.heads[span], purged=purged, document_mask=attempt.document_mask,
                    )  # fmt: skip
                    some = part.any
                    steps = attempt.step + located.data_steps[found] - attempt.data_step
                    surviving = steps < kept[attempt.number]
                    visited[pair[some & surviving]] = True
                    columns = {
                        "spans": span, "numbers": chosen.numbers[span], "streams": chosen.streams[span],
                        "sources": np.full(len(span), reading.source),
                        "attempts": np.full(len(span), attempt.number), "steps": steps,
                        "data_steps": located.data_steps[found], "sequences": located.places[found],
                        "epochs": located.epochs[found], "windows": windows[pair], **vars(part), "purged": purged,
                        "applied": ~np.isin(steps, attempt.skipped), "surviving": surviving,
                    }  # fmt: skip
                    if not attempt.tells_version(reading.order.ids[reading.source]):
                        later = (chosen.purged_since[span] > 0) & ~purged
                        tally.unsure += int((some & surviving & later).sum())
                    if some.any():
                        yield {name: column[some] for name, column in columns.items()}
        tally.windows += int(would.sum())
        tally.unreached += int((would & ~visited).sum())


@dataclass(frozen=True)
class _Located:
    """Where an order gives windows, by ascending data step; parallel arrays."""

    pairs: I64
    epochs: I64
    data_steps: I64
    places: I64

    def of(self, attempt: Attempt) -> slice:
        """The rows that an attempt has read for certain."""
        begin, end = np.searchsorted(self.data_steps, [attempt.data_step, attempt.data_stop])
        return slice(int(begin), max(int(begin), int(end)))

    def left_out(self, run: TrainingRun, would: Bools) -> int:
        """Rows before the run's present place that no surviving step has read, of pairs that ``would`` count; of the
        newest order."""
        branch = run.branch()
        data_steps = self.data_steps[would[self.pairs]]
        edges = np.searchsorted(data_steps, [edge for s in branch for edge in (s.data_step, s.data_stop)])
        return int((edges[2::2] - edges[1:-1:2]).sum()) + (int(edges[0]) if len(edges) else 0)


def _locate(reading: _Reading, windows: I64, num_epochs: int) -> Iterator[_Located]:
    order = reading.order
    at_once = max(1, _PAIRS // len(windows))
    first_samples = np.array([phase.first_sample for phase in order.phases], np.int64)
    first_steps = np.array([phase.first_step for phase in order.phases], np.int64)
    batches = np.array([phase.global_batch for phase in order.phases], np.int64)
    for first in range(0, num_epochs, at_once):
        epochs = np.arange(first, min(first + at_once, num_epochs))
        positions, given = order.locate_many(reading.source, epochs[:, None], windows[None, :])
        epoch, pair = np.nonzero(given)
        g = positions[epoch, pair].astype(np.int64)
        by_place = np.argsort(g, kind="stable")
        g, epoch, pair = g[by_place], epoch[by_place], pair[by_place]
        phase = np.searchsorted(first_samples, g, "right") - 1
        steps, places = np.divmod(g - first_samples[phase], batches[phase])
        yield _Located(pair, epochs[epoch], first_steps[phase] + steps, places)


def _note_next(tally: Tally, located: _Located, attempt: Attempt) -> None:
    """Note where an attempt with an unknown end would next have read one of the documents."""
    place = int(np.searchsorted(located.data_steps, attempt.data_stop))
    if not attempt.ended and place < len(located.data_steps):
        step = attempt.step + int(located.data_steps[place]) - attempt.data_step
        tally.next_unproven[attempt.number] = min(tally.next_unproven[attempt.number], step)


# ---- checkpoints


@dataclass(frozen=True)
class Clean:
    """Which checkpoints have read any of a selection."""

    seen: tuple[tuple[SeenCheckpoint, int], ...]
    """With the first step that put it there, of the checkpoint's own branch."""
    unseen: tuple[SeenCheckpoint, ...]
    unknown: tuple[SeenCheckpoint, ...]
    """Of which nobody can tell: steps of their branch read what cannot be opened any more."""
    last: SeenCheckpoint | None
    """The newest of the present branch that is known to have taken nothing in."""


def clean(run: TrainingRun, found: Exposures | Tally, *, store: bool = False) -> Clean:
    """Divide the run's checkpoints by whether their weights have read any of ``found``.

    Skipped steps and what was purged before it was read do not count. ``store``: also the checkpoints that only the
    run's store has.
    """
    if isinstance(found, Exposures):
        tally = Tally(run)
        tally.add(found)
        found = tally
    seen, unseen, unknown = [], [], []
    for checkpoint in run.checkpoints(store):
        branch = run.branch_of(checkpoint)
        if firsts := _begun(found.first_applied, branch):
            seen.append((checkpoint, firsts[0]))
        elif _begun(found.first_unknown, branch):
            unknown.append(checkpoint)
        else:
            unseen.append(checkpoint)
    last = [checkpoint for checkpoint in unseen if checkpoint.abandoned is None]
    return Clean(tuple(seen), tuple(unseen), tuple(unknown), last[-1] if last else None)


def _begun(firsts: I64, branch: Sequence[Stretch]) -> list[int]:
    """Those of the first steps of attempts that a branch has."""
    return [int(firsts[own.attempt.number]) for own in branch if firsts[own.attempt.number] < own.stop]
