"""What the audit log says about a training run's reads of sources that can no longer be opened.

A rewrite gives a stream a new identity, and the positions of documents in the old one are lost. But a purge computes
the exposure before it writes: its audit entry says which training runs had read purged documents, and from which step.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from quern import storage
from quern.data_pipeline.page.keys import KEY, contains, key_set, keys_of
from quern.errors import InputError
from quern.lineage.exposure import Tally
from quern.lineage.index.changes import Purges
from quern.lineage.purge.record import audit
from quern.lineage.purge.tables.rows import batches
from quern.lineage.training import Attempt, Stretch, TrainingRun
from quern.words import counted

__all__ = ["settle"]


class _Told(NamedTuple):
    sources: Collection[str]
    """Those that the purge could open."""
    clean: tuple[Stretch, ...]
    tainted: tuple[Stretch, ...]
    """Ends with the first step that took something in; empty where others than the documents asked for went, too."""
    text: str


def settle(tally: Tally, unknown: Collection[str], asked: Mapping[str, bytes]) -> list[str]:
    """Note in ``tally`` from which step on it is not known whether the sources ``unknown`` gave one of the documents,
    and which step did as the audit logs of their data runs say. Returns what those say, a sentence an entry.

    ``asked``: data run → doc_ids of the documents asked for in it.

    Raises:
        InputError: an entry, or its table of documents, is damaged.
    """
    told = [own for run, doc_ids in asked.items() for own in _told(run, tally.run, doc_ids)] if unknown else []
    for attempt in tally.run.attempts:
        for identity in unknown:
            clean = [part for own in told if identity in own.sources for part in own.clean if part.attempt is attempt]
            first = max([_first_read(tally.run, attempt, identity), *(part.stop for part in clean)])
            tally.first_unknown[attempt.number] = min(tally.first_unknown[attempt.number], first)
    for part in (part for own in told for part in own.tainted):
        tally.first_applied[part.attempt.number] = min(tally.first_applied[part.attempt.number], part.stop - 1)
    return [own.text for own in told]


def _first_read(run: TrainingRun, attempt: Attempt, identity: str) -> int:
    """The first step of an attempt that may have read from a source; a number beyond all steps if none."""
    order = run.order_of(attempt)
    ends = [*(phase.first_step for phase in order.phases[1:]), None]
    for phase, end in zip(order.phases, ends, strict=True) if identity in order.ids else ():
        if phase.weights[order.ids.index(identity)] and (end is None or end > attempt.data_step):
            return attempt.step + max(0, phase.first_step - attempt.data_step)
    return int(np.iinfo(np.int64).max)


def _told(run: str, train: TrainingRun, doc_ids: bytes) -> Iterator[_Told]:
    """Of every purge of all these documents, and maybe of others, that knew the training run."""
    wanted = np.unique(np.frombuffer(doc_ids, KEY))
    for number in audit.numbers(run) if len(wanted) else ():
        path, record = audit.path_of(run, number), audit.read_entry(run, number).record
        table = batches(audit.path_of(run, number, ".parquet"), ["doc_id"])
        try:
            for row in record["taint"]["train_runs"] if record["taint"] is not None else ():
                lines = _lines_before(train, record)
                same = os.path.realpath(row["path"]) == os.path.realpath(train.path)
                if not same or lines <= train.attempts[0].line:  # at its start another run stood there, or none
                    continue
                purged = key_set(keys_of(part["doc_id"]) for part in table)
                if contains(purged, wanted).all():
                    had_tokens = Purges(storage.join(run, "tokens"), record["version_after"]).purged_ids()
                    others = int((contains(had_tokens, purged) & ~contains(wanted, purged)).sum())
                    yield _of_row(path, train, lines, row, others)
        except (KeyError, TypeError):
            raise InputError(f"{path}: taint: expected what a purge finds out of training runs") from None


def _lines_before(train: TrainingRun, record: Mapping[str, Any]) -> int:
    """How many lines of the ledger stood when a purge was begun, by its entry: it tells the second, and the version."""
    begun, before, family = str(record["time"])[:19], record["version_before"], f"{record['taint']['run_id']}/"
    for own in train.attempts:
        versions = [version for identity, version in own.versions.items() if identity.startswith(family)]
        if str(train.entries[own.line].get("time"))[:19] > begun or max(versions, default=0) > before:
            return own.line
    return len(train.entries)


def _of_row(path: str, train: TrainingRun, lines: int, row: Mapping[str, Any], others: int) -> _Told:
    first, complete = row["first_step"], row["steps_complete"]
    what = f"one of them or of {counted(others, 'document')} purged with them" if others else "them"
    found = "none" if first is None else f"step {first:,} was the first that"
    text = f"{path}: of {counted(complete, 'step')} that were complete before this purge, {found} had read {what}"
    clean = train.branch(complete if first is None else first, lines)
    tainted = () if first is None or others else train.branch(first + 1, lines)[-1:]
    return _Told(set(row["sources"]) - set(row["unknown_sources"]), clean, tainted, text)
