"""Finds the documents of a step: what every sequence of its batch contained, and which rank computed it.

The batch is planned again by the code that planned it for the trainer (:mod:`quern.train.batches.step_plan`), from the
order of the attempt and the spans of the index.

Shape legend: G sequences of the step, M parts: a document in a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quern.errors import InputError
from quern.lineage.index.columns import I64, Bools
from quern.lineage.training import Attempt, TrainingRun
from quern.lineage.windows import parts
from quern.parallel.planning.segments import deal, document_starts, tokens_of
from quern.train.batches.assignment import check_divides
from quern.train.batches.boundaries import Documents
from quern.train.batches.step_plan import StepPlan, assign, cu_seqlens_of, plan_step

if TYPE_CHECKING:
    from quern.lineage.store import IndexedRun, Spans, Stream

__all__ = ["DocumentParts", "StepRead", "inputs_of", "read_step"]

Stretches = list[tuple[int, int]]
"""[start, stop) of each, ascending."""


@dataclass(frozen=True)
class DocumentParts:
    """The documents of a step's sequences, by sequence and place in it; parallel arrays [M]."""

    sequences: I64
    """Place in the global batch."""
    sources: I64
    """Of the attempt's order: :attr:`StepRead.streams`."""
    numbers: I64
    """Of the document in its data run."""
    starts: I64
    """Of the document in its stream."""
    lengths: I64
    """In tokens, the EOT included."""
    input_starts: I64
    """Positions [start, stop) of the sequence at which the document is input; [0, 0) where it is not."""
    input_stops: I64
    target_starts: I64
    """Positions at which the next token, the target, is the document's."""
    target_stops: I64
    purged: Bools
    """Nothing of the document was left when the step read it."""


@dataclass(frozen=True)
class StepRead:
    """The samples that an attempt read at a model step; the arrays [G] go by place in the global batch."""

    step: int
    data_step: int
    attempt: Attempt
    surviving: bool
    """False: of a branch that the run has left."""
    proven: bool
    """False: nobody knows whether the attempt got that far before it died."""
    applied: bool
    """False: the step's update was skipped."""
    seq_len: int
    global_batch: int
    places_G: I64
    ranks_G: I64 | None
    """Data-parallel rank; None where it cannot be known, likewise micro-batch and row."""
    micro_batches_G: I64 | None
    rows_G: I64 | None
    """In the micro-batch."""
    sources_G: I64
    epochs_G: I64
    windows_G: I64
    identities: tuple[str, ...]
    """Of each source of the order."""
    streams: Mapping[int, tuple[IndexedRun, Stream]]
    """Of each source that the step reads and that can be opened."""
    unknown: Mapping[int, str]
    """Of each source that the step reads and that cannot be opened: why."""
    documents: DocumentParts
    computed: Callable[[int], list[Stretches] | None]
    """Of a place: by rank of ``cp``, in turn, the positions of its row that it computed; None where each rank computed
    whole rows, or it is not known."""

    def of_rank(self, rank: int) -> StepRead:
        """The share of one data-parallel rank.

        Raises:
            InputError: the ledger does not tell the ranks, or there is no such rank.
        """
        if self.ranks_G is None or self.micro_batches_G is None or self.rows_G is None:
            raise InputError(
                f"step {self.step}: which rank computed what is not known: "
                + (
                    "a source of the step cannot be opened"
                    if self.attempt.dp is not None
                    else "the ledger is of an older version"
                )
            )
        if not 0 <= rank < (self.attempt.dp or 0):
            raise InputError(f"rank: expected 0 to {(self.attempt.dp or 0) - 1}, got {rank}")
        mine = np.flatnonzero(self.ranks_G == rank)
        kept = np.isin(self.documents.sequences, self.places_G[mine])
        columns = {f.name: getattr(self.documents, f.name)[kept] for f in fields(self.documents)}
        return replace(
            self, places_G=self.places_G[mine], ranks_G=self.ranks_G[mine],
            micro_batches_G=self.micro_batches_G[mine], rows_G=self.rows_G[mine], sources_G=self.sources_G[mine],
            epochs_G=self.epochs_G[mine], windows_G=self.windows_G[mine], documents=DocumentParts(**columns),
        )  # fmt: skip


def read_step(run: TrainingRun, step: int, attempt: int | None = None) -> StepRead:
    """What the present branch read at model step ``step``, or what attempt ``attempt`` read at it.

    Raises:
        InputError: no attempt has read the step, or that one has not.
    """
    chosen, proven = _attempt_at(run, step, attempt)
    order = run.order_of(chosen)
    data_step = chosen.data_step + step - chosen.step
    samples = order.batch(data_step)
    streams, unknown = _streams(run, samples[0], order.ids)
    spans: dict[int, Spans] = {}

    def documents_of(source: int, starts_N: I64) -> Documents:
        if source not in streams:  # unknown: assume one document that is the whole window
            ones = np.ones(len(starts_N), np.int64)
            return Documents(ones, ones - 1, np.zeros(len(starts_N), np.bool_))
        lineage, stream = streams[source]
        found, which = lineage.spans_in(stream, starts_N, starts_N + run.seq_len + 1)
        spans[source] = found
        counts_N = np.bincount(which, minlength=len(starts_N))
        purged = found.purged_at(chosen.version_of(stream.identity))  # what was purged later was there then
        return Documents(counts_N, found.starts - starts_N[which], purged)

    plan = plan_step(samples, len(order.ids), run.seq_len, chosen.document_mask, documents_of)
    dealt_3G = _dealt(plan, chosen, known=not unknown)
    ranks_G, micro_batches_G, rows_G = (None, None, None) if dealt_3G is None else dealt_3G
    return StepRead(
        step=step, data_step=data_step, attempt=chosen,
        surviving=bool(step < run.kept()[chosen.number]), proven=proven,
        applied=not bool(np.isin(step, chosen.skipped)), seq_len=run.seq_len, global_batch=len(samples[0]),
        places_G=np.arange(len(samples[0])),
        ranks_G=ranks_G, micro_batches_G=micro_batches_G, rows_G=rows_G, sources_G=samples[0].astype(np.int64),
        epochs_G=samples[1].astype(np.int64), windows_G=samples[2].astype(np.int64), identities=order.ids,
        streams=streams, unknown=unknown, documents=_parts(run, chosen, plan, streams, spans),
        computed=_computed(plan, chosen, run.seq_len, dealt_3G, known=not unknown),
    )  # fmt: skip


def inputs_of(read: StepRead, place: int, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The documents that are input at positions from ``start`` to before ``stop`` of a sequence: number among those of
    the step, and name and doc_id."""
    parts = read.documents
    inside = (parts.sequences == place) & (parts.input_starts < stop) & (parts.input_stops > start)
    for m in np.flatnonzero(inside).tolist():
        lineage, _ = read.streams[int(parts.sources[m])]
        who = lineage.documents([int(parts.numbers[m])])
        yield m, {"name": lineage.names(who)[0], "doc_id": who.doc_ids[0].hex()}


def _attempt_at(run: TrainingRun, step: int, number: int | None) -> tuple[Attempt, bool]:
    """Which attempt read the step, and whether the ledger proves it."""
    if step < 0:
        raise InputError(f"step: expected an integer ≥ 0, got {step}")
    if number is None:
        for stretch in run.branch():
            if stretch.step <= step < stretch.stop:
                return stretch.attempt, True
        raise InputError(f"{run.path}: step {step} was not read: {run.reached} steps are complete, from 0 on")
    if not 0 <= number < len(run.attempts):
        raise InputError(f"{run.path}: attempt: expected 0 to {len(run.attempts) - 1}, got {number}")
    attempt = run.attempts[number]
    if step < attempt.step or (attempt.ended and step >= attempt.stop):
        raise InputError(
            f"{run.path}: attempt {number} did not read step {step}: it began at step {attempt.step}"
            + (f" and ended before step {attempt.stop}" if attempt.ended else "")
        )
    return attempt, step < attempt.stop


def _streams(
    run: TrainingRun, sources: NDArray[np.uint64], identities: tuple[str, ...]
) -> tuple[dict[int, tuple[IndexedRun, Stream]], dict[int, str]]:
    streams: dict[int, tuple[IndexedRun, Stream]] = {}
    unknown: dict[int, str] = {}
    for source in np.unique(sources).tolist():
        try:
            streams[source] = run.find_stream(identities[source])
        except InputError as error:
            unknown[source] = str(error)
    return streams, unknown


def _dealt(plan: StepPlan, attempt: Attempt, known: bool) -> I64 | None:
    """[3, G]: rank, micro-batch and row of every place; None where they cannot be known. With document masks they
    follow from the documents of all sources."""
    size, world, micro_batch = len(plan.rows_N), attempt.dp, attempt.micro_batch
    if world is None or micro_batch is None or check_divides(size, world, micro_batch) is not None:
        return None
    if not known and attempt.document_mask and world > 1:
        return None
    places = assign(plan, world, micro_batch, attempt.document_mask)
    dealt = np.empty((3, size), np.int64)
    dealt[:, places] = np.indices(places.shape)
    return dealt


def _computed(
    plan: StepPlan, attempt: Attempt, seq_len: int, dealt_3G: I64 | None, known: bool
) -> Callable[[int], list[Stretches] | None]:
    """See :attr:`StepRead.computed`; a micro-batch is dealt out when one of its rows is asked for."""
    context, known = attempt.context, known or not attempt.document_mask
    if context is None or seq_len % context.unit or dealt_3G is None or not known:
        return lambda place: None
    ranks_G, micro_batches_G, rows_G = dealt_3G

    @lru_cache(maxsize=4)
    def dealt(rank: int, micro_batch: int) -> NDArray[np.int64]:
        """[ranks, B, l]: places in the micro-batch."""
        mine = np.flatnonzero((ranks_G == rank) & (micro_batches_G == micro_batch))
        in_order = mine[np.argsort(rows_G[mine])]
        cu_seqlens = cu_seqlens_of(plan, in_order, seq_len, attempt.document_mask)
        places_ABa = deal(document_starts(cu_seqlens), seq_len, context)
        return np.stack([tokens_of(own, places_ABa, context) for own in range(context.ranks)])

    def computed(place: int) -> list[Stretches]:
        places_RBl = dealt(int(ranks_G[place]), int(micro_batches_G[place]))
        found = []
        for positions in places_RBl[:, int(rows_G[place])] % seq_len:
            cut = np.flatnonzero(np.diff(positions) != 1)
            first, last = positions[np.append(0, cut + 1)], positions[np.append(cut, len(positions) - 1)]
            found.append(list(zip(first.tolist(), (last + 1).tolist(), strict=True)))
        return found

    return computed


def _parts(
    run: TrainingRun,
    attempt: Attempt,
    plan: StepPlan,
    streams: Mapping[int, tuple[IndexedRun, Stream]],
    spans: Mapping[int, Spans],
) -> DocumentParts:
    """Every document of every sequence. ``plan`` has its rows by source and start, as ``spans`` have theirs."""
    places_R = np.argsort(plan.rows_N)
    sources_R = plan.sources_N[places_R].astype(np.int64)
    rows_M = np.repeat(np.arange(len(plan.counts_R)), plan.counts_R)
    known_M = np.isin(sources_R[rows_M], list(streams))
    rows = rows_M[known_M]
    found = [spans[source] for source in sorted(spans)]

    def column(name: str, kind: type) -> NDArray[Any]:
        return np.concatenate([np.empty(0, kind), *(getattr(part, name) for part in found)])

    starts, lengths = column("starts", np.int64), column("lengths", np.int64)
    versions = (attempt.version_of(streams[source][1].identity) for source in sorted(spans))
    states = [own.purged_at(version) for own, version in zip(found, versions, strict=True)]
    purged = np.concatenate([np.empty(0, np.bool_), *states])
    part = parts(
        starts, starts + lengths, plan.windows_N[places_R][rows].astype(np.int64), run.seq_len,
        heads=np.ones(len(rows), np.bool_), purged=purged, document_mask=attempt.document_mask,
    )  # fmt: skip
    some = np.flatnonzero(part.any)
    some = some[np.argsort(places_R[rows[some]], kind="stable")]
    # where documents start in the source's own stream
    chosen = [(streams[source][1].chosen, spans[source].starts) for source in sorted(spans)]
    in_source = [begin if own is None else own.pieces(begin, begin + 1)[0] for own, begin in chosen]
    columns = {
        "sequences": places_R[rows], "sources": sources_R[rows], "numbers": column("numbers", np.int64),
        "starts": np.concatenate([np.empty(0, np.int64), *in_source]), "lengths": lengths, **vars(part),
        "purged": purged,
    }  # fmt: skip
    return DocumentParts(**{name: values[some] for name, values in columns.items()})
