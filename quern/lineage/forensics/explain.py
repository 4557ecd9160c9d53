"""Resolves the trainer's record of a spike to documents, and ranks them.

What is *usual* for a source is the median loss of its sequences in the steps before, and the spread their median
absolute deviation (times 1.4826). A sequence's z is its loss above that in spreads. A document's is that of the targets
that are its own, by the losses that the file has along the sequence; the mean of n targets spreads √(T/n) times as far
as that of the T of a sequence, so a short document is not far out by its length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quern.errors import InputError, QuernError
from quern.lineage.forensics.advice import commands
from quern.lineage.forensics.cause import OUT, Cause, Key, Part, find_cause, findings
from quern.lineage.forensics.file import COLUMNS, StepRecord, read_record
from quern.lineage.steps import StepRead, inputs_of, read_step
from quern.lineage.training import TrainingRun

if TYPE_CHECKING:
    from quern.lineage.store import DocumentIdentities, IndexedRun, Stream

__all__ = ["NUM_DOCUMENTS", "NUM_SEQUENCES", "TEXT_CHARS", "explain", "read_of"]

NUM_DOCUMENTS, NUM_SEQUENCES = 10, 20
"""That are named; the file has all sequences."""
TEXT_CHARS = 500

_MIN_KNOWN = 8
"""Sequences by which a source's usual loss can be told."""
_SIGMA_PER_MAD = 1.482602218505602
_RELATIVE_FLOOR = 1e-3

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Usual:
    """The usual loss of a source's sequences, in nats per target."""

    loss: float
    spread: float
    targets: float
    """Of a sequence."""
    known_by: str
    """The sequences it is taken from."""


@dataclass
class _Document:
    """Its part in a step."""

    lineage: IndexedRun
    stream: Stream
    number: int
    start: int
    length: int
    source: int
    nats: float = 0.0
    targets: int = 0
    along: bool = True
    """Whether its own targets' losses are known, and not only its sequence's."""
    places: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.lineage.run, self.number

    @property
    def named(self) -> tuple[str, str]:
        """Data run and doc_id."""
        return self.lineage.run, self.lineage.documents([self.number]).doc_ids[0].hex()


def explain(run: TrainingRun, step: int, attempt: int | None = None) -> dict[str, Any]:
    """What the trainer wrote down of a step, with its documents: plain data, for a terminal, a page or a program.

    ``attempt``: which attempt's; None = the newest that wrote it down.

    Raises:
        InputError: there is no file of the step, it is damaged, or it is not of this run.
    """
    record = read_record(run.path, step, attempt)
    steps, last = record.steps, record.steps[-1]
    reads = [read_of(run, own, record.attempt, record.path) for own in steps]
    usual = _usual(steps)
    z_S, excess_S = _outlying(last, usual)
    held = [_documents(own, read) for own, read in zip(steps, reads, strict=True)]
    ranked = _ranked(held[-1], usual)
    cause = _cause(last, reads[-1], ranked, usual, z_S, excess_S)
    shown = [item for place, item in enumerate(ranked) if place < NUM_DOCUMENTS or item[1].key in cause.keys]
    broad = cause.kind in ("step", "unclear")
    before = _ranked(held[-2], usual) if broad and len(held) > 1 else []
    unknown = {read.identities[source]: why for read in reads for source, why in read.unknown.items()}
    largest = sorted(record.parameters.items(), key=lambda item: -np.inf if item[1] is None else -item[1])
    found = {
        "file": record.path, "step": last.step, "data_step": last.data_step, "attempt": record.attempt,
        "surviving": reads[-1].surviving, "reasons": record.reasons, "decision": record.decision,
        "policy": record.policy, "layout": record.layout,
        "first_non_finite": record.first and _first(record.first, reads[-1]),
        "steps": [_step_row(own, usual) for own in steps],
        "layers": _layers(steps),
        "parameters": dict(largest[:10]),
        "sources": _sources(last, usual, excess_S, record.sources),
        "sequences": _sequences(last, z_S, excess_S, ranked, record.sources),
        "documents": [_document_row(z, own, usual, held, steps, cause) for z, own in shown],
        "documents_before": [_document_row(z, own, usual, held[:-1], steps[:-1], None) for z, own in before[:5]],
        "broad": broad,
        "cause": {"kind": cause.kind, "share": cause.share, "rest": cause.rest},
        "unknown": unknown, "source_names": run.source_names(reads[-1].attempt),
        "commands": commands(
            run, record, last, reads[-1], [own.named for _, own in ranked if own.key in cause.keys], cause.kind
        ),
    }  # fmt: skip
    found["findings"] = list(findings(found, z_S, excess_S))
    return found


def read_of(run: TrainingRun, own: StepRecord, attempt: int, path: str) -> StepRead:
    """What a step of the file at ``path`` read. Raises :class:`InputError` where the ledger says otherwise."""
    read = read_step(run, own.step, attempt)
    same = (read.data_step, read.global_batch) == (own.data_step, len(own.column("place"))) and all(
        np.array_equal(getattr(read, f"{name}s_G")[own.column("place")], own.column(name))
        for name in ("source", "epoch", "window")
    )
    if not same:
        raise InputError(f"{path}: step {own.step} read other windows than the ledger says; it is of another run")
    return read


def _first(first: Mapping[str, Any], read: StepRead) -> dict[str, Any]:
    """Where what is not finite came first, with the documents that are input there."""
    named = list[dict[str, Any]]()
    for row in first["sequences"]:
        named += [who for _, who in inputs_of(read, row["place"], row["position"], row["position"] + 1)]
    return {**first, "documents": named}


# ---- what is usual


def _usual(steps: Sequence[StepRecord]) -> dict[int, Usual]:
    """By the steps before the last, which may be what spoils it; by all sources where one is not seen often enough."""
    before, last = steps[:-1], steps[-1]
    found = {}
    for source in np.unique(last.column("source")).tolist():
        taken = [
            (before, source, "its sequences in the steps before"), (before, None, "all sequences in the steps before"),
            (steps[-1:], source, "its sequences in this step"), (steps, None, "all sequences"),
        ]  # fmt: skip
        for chosen, only, known_by in taken:
            losses, targets = _known(chosen, only)
            if len(losses) >= _MIN_KNOWN or known_by == "all sequences":
                found[source] = _of(losses, targets, known_by)
                break
    return found


def _known(steps: Sequence[StepRecord], source: int | None) -> tuple[F64, F64]:
    losses, targets = [np.empty(0)], [np.empty(0)]
    for step in steps:
        fits = np.isfinite(step.losses)
        if source is not None:
            fits &= step.column("source") == source
        losses.append(step.losses[fits])
        targets.append(step.column("targets")[fits].astype(np.float64))
    return np.concatenate(losses), np.concatenate(targets)


def _of(losses: F64, targets: F64, known_by: str) -> Usual:
    if not len(losses):
        return Usual(0.0, 1.0, 1.0, "nothing: no loss is finite")
    middle = float(np.median(losses))
    spread = _SIGMA_PER_MAD * float(np.median(np.abs(losses - middle)))
    return Usual(middle, max(spread, _RELATIVE_FLOOR * abs(middle), 1e-6), float(np.median(targets)), known_by)


def _outlying(step: StepRecord, usual: Mapping[int, Usual]) -> tuple[F64, F64]:
    """z of each sequence, and its nats above the usual; infinite where the loss is not finite, 0 without targets."""
    sources = step.column("source").tolist()
    own = [usual.get(source) or _of(*_known([step], None), "") for source in sources]
    above = step.losses - np.array([u.loss for u in own])
    z_S = above / np.array([u.spread for u in own])
    excess_S = above * step.column("targets")
    for values in (z_S, excess_S):
        values[step.column("targets") == 0] = 0.0
        values[~step.finite] = np.inf
    return z_S, excess_S


def _cause(
    last: StepRecord,
    read: StepRead,
    ranked: Sequence[tuple[float, _Document]],
    usual: Mapping[int, Usual],
    z_S: F64,
    excess_S: F64,
) -> Cause:
    out = z_S > OUT
    if not out.any():
        return Cause("", float(np.maximum(excess_S, 0).sum()))
    parts = [Part(own.key, own.nats - own.targets * usual[own.source].loss, own.targets, z) for z, own in ranked]
    other = np.isin(last.column("source"), list(read.unknown))
    targets = int(last.column("targets")[other].sum())
    return find_cause(parts, float(excess_S[other].sum()), targets, float(out.mean()) >= 0.5)


# ---- documents


def _documents(step: StepRecord, read: StepRead) -> dict[Key, _Document]:
    """Every document that has targets in a step, with the loss of those."""
    parts, found = read.documents, dict[Key, _Document]()
    at = {place: s for s, place in enumerate(step.column("place").tolist())}
    for m in np.flatnonzero(parts.target_stops > parts.target_starts).tolist():
        place, source = int(parts.sequences[m]), int(parts.sources[m])
        lineage, stream = read.streams[source]
        key = (lineage.run, int(parts.numbers[m]))
        own = found.setdefault(
            key, _Document(lineage, stream, key[1], int(parts.starts[m]), int(parts.lengths[m]), source)
        )
        s, start, stop = at[place], int(parts.target_starts[m]), int(parts.target_stops[m])
        nats = step.nats_between(place, start, stop)
        if nats is None:
            own.along, nats = False, float(step.losses[s] if step.finite[s] else np.inf) * (stop - start)
        own.nats += nats
        own.targets += stop - start
        own.places.append(place)
        own.epochs.append(int(step.column("epoch")[s]))
    return found


def _ranked(held: Mapping[Key, _Document], usual: Mapping[int, Usual]) -> list[tuple[float, _Document]]:
    """z and document, the highest first."""
    scored = [(_z(own, usual), own) for own in held.values()]
    return sorted(scored, key=lambda item: (-item[0], item[1].key))


def _z(own: _Document, usual: Mapping[int, Usual]) -> float:
    normal = usual.get(own.source)
    if not np.isfinite(own.nats):
        return np.inf
    if normal is None:
        return 0.0
    return (own.nats / own.targets - normal.loss) / normal.spread * (own.targets / max(normal.targets, 1.0)) ** 0.5


def _document_row(
    z: float,
    own: _Document,
    usual: Mapping[int, Usual],
    held: Sequence[Mapping[Key, _Document]],
    steps: Sequence[StepRecord],
    cause: Cause | None,
) -> dict[str, Any]:
    who, name = _named(own)
    normal = usual.get(own.source)
    excess = own.nats - own.targets * normal.loss if normal else None
    total = 0.0 if cause is None else cause.total
    text, whole = _text(own)
    return {
        "url": who.urls[0], "name": name, "doc_id": who.doc_ids[0].hex(),
        "run": own.lineage.run, "stream": own.stream.name, "source": own.stream.identity,
        "z": _finite(z), "loss": _finite(own.nats / own.targets), "usual": normal.loss if normal else None,
        "targets": own.targets, "tokens": own.length, "start": own.start, "excess_nats": _finite(excess),
        "share": _finite(excess / total) if excess is not None and total > 0 else None,
        "targets_share": own.targets / int(steps[-1].column("targets").sum()),
        "cause": cause is not None and own.key in cause.keys,
        "by": "its own targets" if own.along else "its sequences", "places": own.places, "epochs": own.epochs,
        "repeats": list(_repeats(own, held, steps)), "text": text, "text_is_whole": whole,
    }  # fmt: skip


def _repeats(
    own: _Document, held: Sequence[Mapping[Key, _Document]], steps: Sequence[StepRecord]
) -> Iterator[dict[str, Any]]:
    """Where the document, or one of its cluster of duplicates, was read before in the window."""
    cluster = {(own.lineage.run, number) for number in own.lineage.cluster(own.number).tolist()} | {own.key}
    for step, documents in zip(steps, held, strict=True):
        for key in sorted(cluster & documents.keys()):
            if step is steps[-1] and key == own.key:
                continue
            same = key == own.key
            yield {
                "step": step.step, "places": documents[key].places, "what": "itself" if same else "a duplicate",
                "doc_id": own.lineage.documents([key[1]]).doc_ids[0].hex(),
            }  # fmt: skip


def _text(own: _Document) -> tuple[str | None, bool]:
    """The beginning of what the model read, and whether that is all; None where it was purged since, or the encoding
    cannot be had."""
    length, reader = own.length - 1, own.stream.reader
    try:
        tokens = reader.tokens(own.start, own.start + min(length, 4 * TEXT_CHARS))
        if len(tokens) and (tokens == reader.eot_id).all():
            return None, False
        return own.stream.text(own.start, length, TEXT_CHARS)
    except (QuernError, KeyError):
        return None, False


# ---- rows


def _step_row(step: StepRecord, usual: Mapping[int, Usual]) -> dict[str, Any]:
    z_S, _ = _outlying(step, usual)
    return {**step.figures, "sequences": len(z_S), "out": int((z_S > OUT).sum())}


def _layers(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Norm of each layer's gradient, and its median in the steps before."""
    rows = []
    for name, norm in steps[-1].layers.items():
        known = [value for own in steps[:-1] if (value := own.layers.get(name)) is not None]
        before = float(np.median(known)) if known else None
        ratio = norm / before if norm is not None and before else None
        rows.append({"name": name, "norm": norm, "before": before, "ratio": ratio})
    return rows


def _sources(
    last: StepRecord, usual: Mapping[int, Usual], excess_S: F64, identities: Sequence[str]
) -> list[dict[str, Any]]:
    rows = []
    total = float(excess_S[np.isfinite(excess_S) & (excess_S > 0)].sum())
    for source, normal in usual.items():
        mine = last.column("source") == source
        losses, excess = last.losses[mine], excess_S[mine]
        losses, excess = losses[np.isfinite(losses)], excess[np.isfinite(excess) & (excess > 0)]
        rows.append(
            {
                "source": identities[source], "sequences": int(mine.sum()), "share": float(mine.mean()),
                "loss": float(np.median(losses)) if len(losses) else None, "usual": normal.loss,
                "spread": normal.spread, "known_by": normal.known_by,
                "excess_share": float(excess.sum()) / total if total > 0 else None,
            }
        )  # fmt: skip
    return rows


def _sequences(
    last: StepRecord,
    z_S: F64,
    excess_S: F64,
    ranked: Sequence[tuple[float, _Document]],
    identities: Sequence[str],
) -> list[dict[str, Any]]:
    by_place: dict[int, list[_Document]] = {}
    for _, own in ranked:
        for place in own.places:
            by_place.setdefault(place, []).append(own)
    rows = []
    for s in np.argsort(-z_S, kind="stable")[:NUM_SEQUENCES].tolist():
        values = {name: int(last.column(name)[s]) for name in COLUMNS}
        held = list({document.key: document for document in by_place.get(values["place"], [])}.values())
        rows.append(
            {
                **values, "source": identities[values["source"]], "loss": _finite(float(last.losses[s])),
                "finite": bool(last.finite[s]), "z": _finite(float(z_S[s])),
                "excess_nats": _finite(float(excess_S[s])),
                "along": last.along(values["place"]), "num_documents": len(held),
                "documents": [
                    {"url": who.urls[0], "name": name, "doc_id": who.doc_ids[0].hex()}
                    for who, name in map(_named, held[:5])
                ],
            }
        )  # fmt: skip
    return rows


def _named(own: _Document) -> tuple[DocumentIdentities, str | None]:
    who = own.lineage.documents([own.number])
    return who, own.lineage.names(who)[0]


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
