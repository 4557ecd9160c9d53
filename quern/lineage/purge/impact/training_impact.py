"""Finds which training runs read purged documents: steps, tainted checkpoints, and the last clean one.

The training runs are those that are given and those that ``consumers.jsonl`` of the data run names. A training run is
judged by the order it read from and by the corpus version that each of its attempts read, so the answer is the same
before a purge and after one that masks. A rewrite gives a stream a new identity, and the old positions are lost; so a
purge computes the exposure first and keeps it in its audit entry. Exposures not recorded there are unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quern import storage
from quern.data_pipeline.execution.run_directory import read_id
from quern.errors import InputError, QuernError
from quern.lineage.exposure import Clean, Tally, clean, walk
from quern.lineage.purge.impact.earlier import settle
from quern.lineage.purge.impact.resume import VersionChange, resume
from quern.lineage.selection import Selection, select
from quern.lineage.store import IndexedRun
from quern.lineage.training import SeenCheckpoint, TrainingRun
from quern.train.history.consumers import CONSUMERS_FILE, read_consumers

__all__ = ["OTHERS", "Row", "VersionChange", "init_from", "not_proven", "training_impact"]

Row = dict[str, Any]

_NEVER = np.iinfo(np.int64).max

#: What no report can know.
OTHERS = (
    "training runs that are neither given nor registered, exports and copies of the corpus or of checkpoints are not "
    "known here"
)


def training_impact(
    run: str, doc_ids: Iterable[bytes], train_runs: Sequence[str] = (), *, change: VersionChange | None = None
) -> Row:  # fmt: skip
    """The known readers of documents of the data run ``run`` (local or on a store), as plain JSON data.

    ``doc_ids``: of the deletion set. ``train_runs``: folders, beside those that are registered. ``change``: the version
    that the purge makes or has made; None: it makes none.

    A training run that cannot be judged is in ``not_judged`` with the reason; nothing is raised for it. ``registered``
    counts those that the data run was told of; None where that is not known: ``unregistered`` says why.

    Raises:
        InputError: ``run`` is no data run.
    """
    run_id = read_id(run)
    ids = b"".join(doc_ids)
    given = {os.path.realpath(path): os.path.abspath(path) for path in train_runs}
    registered, unregistered = _registered(run)
    rows, not_judged = [], []
    for real, path in (given | registered).items():
        told: Row = {"path": path, "given": real in given, "registered": real in registered}
        try:
            rows.append(told | _judge(path, run, run_id, ids, change))
        except (QuernError, OSError) as error:
            not_judged.append(told | {"why": _why(path, error)})
    return {
        "run": run, "run_id": run_id, "documents": len(ids) // 16,
        "change": None if change is None else {
            "version": change.version, "mode": change.mode, "streams": sorted(change.streams),
        },
        "registered": None if unregistered else len(registered), "unregistered": unregistered,
        "train_runs": rows, "not_judged": not_judged, "others": OTHERS,
    }  # fmt: skip


def _registered(run: str) -> tuple[dict[str, str], str | None]:
    """Real path → path of every training run that has told the data run of itself; or why that is not known."""
    path = storage.join(run, CONSUMERS_FILE)
    if not storage.is_local(run):
        return {}, f"{path}: trainers read local copies, and told those of themselves; name their runs here"
    try:
        paths = dict.fromkeys(started.train_run for started in read_consumers(storage.split(run)[1]))
    except QuernError as error:
        return {}, str(error)
    return {os.path.realpath(path): path for path in paths}, None


def _why(path: str, error: Exception) -> str:
    if not os.path.isdir(path):
        return "is not there (any more), or stands on another machine"
    return str(error) if isinstance(error, QuernError) else f"cannot be read ({error})"


def _judge(path: str, run: str, run_id: str, doc_ids: bytes, change: VersionChange | None) -> Row:
    train = TrainingRun(path, {run_id: os.path.abspath(storage.split(run)[1])} if storage.is_local(run) else None)
    own = [identity for identity in train.identities if identity.startswith(f"{run_id}/")]
    unknown = {identity: why for identity, why in train.unknown().items() if identity in own}
    lineages = [lineage for lineage in train.lineages() if lineage.run_id == run_id] if own else []
    if unknown and not lineages:
        raise InputError(next(iter(unknown.values())))
    tally, documents = _tally(train, lineages, doc_ids)
    told = settle(tally, unknown, {run: doc_ids})
    verdict = clean(train, tally)
    newest = train.attempts[-1]
    steps = sorted(step for step, (_, applied) in tally.steps.items() if applied)
    return {
        "sources": own, "unknown_sources": unknown, "steps_complete": train.reached,
        "documents_read": documents, "exposures": tally.surviving, "applied": tally.applied, "purged": tally.purged,
        "skipped": tally.surviving - tally.applied - tally.purged, "abandoned": tally.abandoned,
        "of_unknown_version": tally.unsure,
        "steps": len(steps), "first_step": steps[0] if steps else None, "last_step": steps[-1] if steps else None,
        "not_proven": not_proven(tally), "ended": newest.ended, "document_mask": newest.document_mask,
        "tainted": [_checkpoint(seen, step) for seen, step in verdict.seen],
        "clean": [_checkpoint(seen) for seen in verdict.unseen],
        "unknown": [_checkpoint(seen) for seen in verdict.unknown], "audit": told,
        "last_clean": None if verdict.last is None else _checkpoint(verdict.last),
        "damaged_checkpoints": dict(train.damaged), "init_from": init_from(train),
        "resume": resume(train, lineages, verdict, _is_tainted(train, tally, verdict), change, run, doc_ids,
                         first=steps[0] if steps else None),
        "warnings": [*_warnings(train, tally, unknown, change), *told],
    }  # fmt: skip


def _tally(train: TrainingRun, lineages: Sequence[IndexedRun], doc_ids: bytes) -> tuple[Tally, int]:
    """All that the run read of the documents, counted; and how many of them are in its present weights."""
    tally, documents = Tally(train), set()
    for lineage in lineages:
        read = np.zeros(lineage.num_documents, np.bool_)
        for block in walk(train, [_own(train, lineage, doc_ids)], tally):
            read[block.numbers[block.surviving & block.applied & ~block.purged]] = True
        documents.update(lineage.documents(np.flatnonzero(read)).doc_ids)
    return tally, len(documents)


def _own(train: TrainingRun, lineage: IndexedRun, doc_ids: bytes) -> Selection:
    """The documents in the streams that the training run is taken to have read here: it may know another copy of the
    data run, at another version, that has some of the same streams."""
    chosen = select(lineage, lineage.find_docs(doc_ids))
    other = [
        number
        for number, stream in enumerate(lineage.streams)
        if any(_elsewhere(train, ident, lineage) for ident in train.identities_of(stream.identity))
    ]
    kept = ~np.isin(chosen.streams, other)
    columns = ("numbers", "streams", "starts", "stops", "heads", "purged_since")
    return replace(chosen, **{name: getattr(chosen, name)[kept] for name in columns})


def _elsewhere(train: TrainingRun, identity: str, lineage: IndexedRun) -> bool:
    """Whether a source is taken to be read from another data run; of one that cannot be opened, it is not known."""
    try:
        return train.find_stream(identity)[0] is not lineage
    except InputError:
        return False


def not_proven(tally: Tally) -> list[Row]:
    """Attempts with an unrecorded end: from which step on, and where they would next read one of the documents."""
    return [
        {
            "attempt": attempt.number, "from_step": attempt.stop,
            "next_step": None if (step := int(tally.next_unproven[attempt.number])) == _NEVER else step,
        }
        for attempt in tally.run.attempts
        if not attempt.ended
    ]  # fmt: skip


def _is_tainted(train: TrainingRun, tally: Tally, verdict: Clean) -> bool:
    """Whether what stands or runs now has taken something in, or may have: going on as before is no way out."""
    newest = train.attempts[-1]
    may_have = not newest.ended and int(tally.next_unproven[newest.number]) != _NEVER
    firsts = np.minimum(tally.first_applied, tally.first_unknown)
    may_have |= any(firsts[part.attempt.number] < part.stop for part in train.branch())
    return may_have or any(seen.abandoned is None for seen in (*dict(verdict.seen), *verdict.unknown))


def _checkpoint(seen: SeenCheckpoint, first: int | None = None) -> Row:
    row = {"step": seen.step, "path": seen.path, "abandoned": seen.abandoned}
    return row if first is None else row | {"first_step": first}


def init_from(train: TrainingRun) -> str | None:
    """The checkpoint with which the weights were initialised, if any: what it has read is not known here."""
    return train.of_config(lambda config: config.init_from, None)


def _warnings(train: TrainingRun, tally: Tally, unknown: Mapping[str, str], change: VersionChange | None) -> list[str]:
    newest, found = train.attempts[-1], []
    for reason in unknown.values():
        found.append(f"{reason}: what it read there is not known")
    if tally.unsure:
        found.append(
            f"{tally.unsure:,} exposures are of documents that an earlier version purged, and the ledger does not tell "
            "which version was read: the oldest is taken for it"
        )
    if not newest.ended:
        found.append(
            f"it did not say where it ended after step {newest.stop:,}: if it still runs, it goes on reading the old "
            "version until it is stopped"
        )
    if change is not None and change.mode == "mask" and not newest.document_mask and tally.windows:
        found.append(
            "document_mask is off: documents beside the purged ones attend to what stood there, so their context "
            "changes with it; order and places do not"
        )
    if (started := init_from(train)) is not None:
        found.append(f"the weights began as {started}; what they saw before is not known here")
    if train.of_config(lambda config: config.checkpoint.store, None) is not None:
        found.append("checkpoints that only its store has are not listed")
    found += [f"{path} is not judged: {why}" for path, why in train.damaged.items()]
    return found
