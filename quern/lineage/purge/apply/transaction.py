"""Runs a purge as a transaction: an interrupted one is later finished or undone.

The plan is written (:mod:`quern.lineage.purge.record.journal`) before anything changes. The new generations of shards
are not listed until ``VERSION.json`` is replaced: that is the moment of the purge. Before it, recovery undoes the
purge; after it, the remaining steps are idempotent, and recovery completes them.
"""

from __future__ import annotations

import datetime as dt
import errno
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.execution.run_directory import BusyError, is_complete, remove_torn, sole_driver
from quern.errors import InputError, QuernError, one_line
from quern.lineage.index.changes import Purges
from quern.lineage.purge.apply import version
from quern.lineage.purge.apply.finish import (
    TRAINING_IMPACT,
    VERSION_BEFORE,
    Clock,
    clear,
    finish,
    holds_sketches,
    is_remembered,
)
from quern.lineage.purge.apply.version import OpenCorpus, PurgePlan
from quern.lineage.purge.impact.resume import VersionChange
from quern.lineage.purge.impact.training_impact import training_impact
from quern.lineage.purge.record import audit, journal
from quern.lineage.purge.record.journal import Intent
from quern.lineage.purge.record.remember import Signatures, purge_list_of, tombstones_name
from quern.lineage.purge.restoration.affected import capped_bands
from quern.lineage.purge.restoration.restore import Restored, reconsider
from quern.lineage.purge.restoration.restored_tokens import write_tokens
from quern.lineage.purge.selection.deletion_set import WHY
from quern.lineage.purge.selection.kept_copies import kept_copies, told
from quern.lineage.purge.tables.whole import without_texts
from quern.tokenize.corpus_version import read_version
from quern.tokenize.shard_format import VERSION_FILE

__all__ = ["Request", "purge", "recover", "recover_held", "take_up"]

Mode = Literal["mask", "rewrite"]


@dataclass(frozen=True)
class Request:
    """The options of a purge."""

    run: str
    mode: Mode
    find_deletion_set: Callable[[str], pa.Table]
    """The deletion set of a run (``DELETION_SET_SCHEMA``)."""
    selection: Mapping[str, Any]
    """As given."""
    duplicates: Literal["purge", "restore"] = "purge"
    reason: str | None = None
    purge_list: str | None = None
    """The folder of tombstones; None: the run's own, or one beside it."""
    similar: bool = False
    """Whether the tombstones keep out what is similar, too."""
    train_runs: tuple[str, ...] = ()
    """Given, beside those that are registered."""
    workers: int = 4


def purge(request: Request, *, dry_run: bool = False) -> dict[str, Any]:
    """Carry out a request; return what was done, or with ``dry_run`` would be done, as plain data.

    Raises:
        InputError: the run is not complete, or damaged; nothing is selected; ``restore`` with ``mask``, or
            with a purge list that keeps out what is similar.
        QuernError: somebody else is at work in the run; or it failed, and the message says whether it was undone.
    """
    if request.duplicates == "restore" and request.mode == "mask":
        raise InputError("--duplicates restore: a restored document needs room among the others; use --mode rewrite")
    run = request.run
    if not is_complete(run):
        raise InputError(f"{run}: expected a complete data run; only what has all of its tokens can be purged of some")
    purge_list, why = purge_list_of(run, request.purge_list)
    if request.similar:
        Signatures(run)  # a run that has none is an error now
    if request.duplicates == "restore" and (request.similar or holds_sketches(purge_list)):
        raise InputError(
            f"--duplicates restore: {purge_list} keeps out what is similar to purged documents (--similar), which is "
            "what would come back; use --duplicates purge"
        )
    with nullcontext() if dry_run else sole_driver(run):
        recovered = None if dry_run else recover_held(run)
        if dry_run and journal.read_intent(run) is not None:
            raise QuernError(f"{run}: an earlier purge was cut off; purge or verify the run without --dry-run first")
        clock = Clock()
        corpus = version.open_corpus(run)
        if (fault := audit.check_anchor(corpus.record, audit.last_entry(run))) is not None:
            raise InputError(f"{storage.join(corpus.tokens, VERSION_FILE)}: {fault}; nothing is purged")
        deletion_set = request.find_deletion_set(run)
        clock.lap("select")
        if not len(deletion_set):
            raise InputError(f"{run}: no document is selected; nothing to purge")
        moved = reconsider(run, deletion_set) if request.duplicates == "restore" else None
        clock.lap("restore")
        plan = version.make_plan(corpus, deletion_set, moved, workers=request.workers)
        clock.lap("plan")
        intent = _intent(request, purge_list, corpus, deletion_set, plan)
        impact = _training_impact(request, intent, deletion_set)
        intent = replace(intent, train_runs=_readers(impact))
        clock.lap("taint")
        copies = kept_copies(run, deletion_set, Purges(corpus.tokens, corpus.version))
        report = {
            "run": run, "dry_run": dry_run, "recovered": recovered, **_told(intent), "purge_list_why": why,
            "near_copies_kept": copies,
            "warnings": [*_warnings(run, request), *without_texts(run, deletion_set), *told(run, request.mode, copies)],
            "taint": impact, "seconds": clock.seconds,
        }  # fmt: skip
        if dry_run:
            return report
        _carry_out(run, corpus, plan, intent, deletion_set, moved, impact, request.workers)
        clock.lap("shards")
        if moved is not None:
            report["tokens_restored"] = journal.read_note(run, "restored_tokens")
        return {**report, **finish(run, intent, deletion_set, clock)}


def _intent(request: Request, purge_list: str, corpus: OpenCorpus, deletion_set: pa.Table, plan: PurgePlan) -> Intent:
    whys = {row["values"]: row["counts"] for row in pc.value_counts(deletion_set["why"]).to_pylist()}
    after = corpus.version + 1 if plan.changes else corpus.version
    record = storage.read_json(storage.join(request.run, "run.json"))
    return Intent(
        id=uuid.uuid4().hex,
        before=corpus.version,
        after=after,
        mode=request.mode,
        duplicates=request.duplicates,
        selection=dict(request.selection),
        reason=request.reason,
        at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        purge_list=purge_list,
        purge_list_name=tombstones_name(record["id"], after, deletion_set, similar=request.similar),
        similar=request.similar,
        remembers=request.similar or not is_remembered(purge_list, deletion_set),
        touched=plan.touched,
        counts={
            "condemned": len(deletion_set),
            **{f"condemned_{why}": whys.get(why, 0) for why in WHY},
            "documents_purged": len(plan.purged),
            "tokens_purged": plan.tokens_purged,
            "documents_purged_before": plan.already,
            "documents_restored": len(plan.restored),
            "documents_displaced": plan.displaced,
            "shards_touched": len(plan.changes),
            "bytes_read": plan.bytes_read,
        },
    )


def _training_impact(request: Request, intent: Intent, deletion_set: pa.Table) -> dict[str, Any]:
    """Compute the exposure, before anything is changed, since a rewrite makes it unknown."""
    change = None
    if intent.makes_version:
        change = VersionChange(intent.after, request.mode, frozenset(intent.touched))
    return training_impact(request.run, deletion_set["doc_id"].to_pylist(), request.train_runs, change=change)


def _readers(impact: Mapping[str, Any]) -> tuple[str, ...]:
    """The training runs that were given or are registered."""
    rows = [*impact["train_runs"], *impact["not_judged"]]
    return tuple(dict.fromkeys(row["path"] for row in rows if row["given"] or row["registered"]))


def _warnings(run: str, request: Request) -> list[str]:
    if request.duplicates == "purge" and (bands := capped_bands(run)):
        return [
            f"{bands:,} bands were shared by more documents than are compared with each other: a run without the "
            "purged ones may compare pairs that were never compared, and keep or remove other duplicates"
        ]
    return []


def _told(intent: Intent) -> dict[str, Any]:
    """What a report says of an intent."""
    own = {name: getattr(intent, name) for name in ("mode", "duplicates", "selection", "reason", "touched")}
    version = {"before": intent.before, "after": intent.after}
    return {**own, "version": version, **intent.counts, "purge_list": intent.purge_list}


def _carry_out(
    run: str,
    corpus: OpenCorpus,
    plan: PurgePlan,
    intent: Intent,
    deletion_set: pa.Table,
    moved: Restored | None,
    impact: Mapping[str, Any],
    workers: int,
) -> None:
    """Up to the moment of the purge; an error before it leaves the run as it was."""
    restored_tokens = journal.path_of(run, journal.RESTORED_TOKENS)
    tables = {"condemned": deletion_set}
    notes: dict[str, Any] = {VERSION_BEFORE: corpus.record, TRAINING_IMPACT: impact}
    try:
        if moved is not None:
            tables |= {"restored": moved.restored, "displaced": moved.displaced}
            notes["restored_tokens"] = write_tokens(run, moved.restored, restored_tokens)
        journal.write_intent(run, intent, tables, notes)
        if intent.makes_version:
            written = version.write_shards(corpus, plan, intent.mode, restored_tokens, workers=workers)
            version.publish(corpus, plan, intent.mode, written)
    except Exception as error:
        try:
            storage.check_guards()
            done = intent.makes_version and read_version(corpus.tokens)["version"] == intent.after
            if not done:
                _undo(run, intent)
        except Exception as second:
            raise QuernError(
                f"{run}: the purge failed ({one_line(error)}), and could not be undone ({one_line(second)}); the next "
                "command that may write to the run does so first; the corpus is as it was"
            ) from error
        if not done:
            raise _failed(run, error) from error


def _failed(run: str, error: Exception) -> QuernError:
    if isinstance(error, InputError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        told = f"{error.filename}: {error.strerror}" if isinstance(error, storage.FullError) else one_line(error)
        return QuernError(f"{run}: no space left on the device ({told}); the purge was undone, nothing is changed")
    return QuernError(f"{run}: the purge failed ({one_line(error)}); it was undone, nothing is changed")


def recover(run: str) -> str | None:
    """Finish or undo an interrupted purge; return a description of what was done. None: there was nothing.

    Raises:
        QuernError: somebody is at work in the run.
    """
    if not journal.is_there(run):
        return None
    with sole_driver(run):
        return recover_held(run)


def recover_held(run: str) -> str | None:
    """Like :func:`recover`, for a caller that holds the run's lock already."""
    if journal.is_there(run):
        remove_torn(run)
    intent = journal.read_intent(run)
    if intent is None:
        clear(run)
        return None
    now = read_version(storage.join(run, "tokens"))["version"]
    if now == intent.after:
        finish(run, intent, journal.read_deletion_set(run))
        return f"the purge of {intent.at} had been cut off; it is finished: corpus version {intent.after}"
    if now == intent.before:
        _undo(run, intent)
        return f"the purge of {intent.at} had been cut off; it is undone: corpus version {intent.before}"
    raise QuernError(
        f"{run}: a purge from version {intent.before} to {intent.after} was cut off, but the corpus is at version {now}"
    )


def take_up(run: str) -> None:
    """:func:`recover` before a run is read in which a purge was cut off, if the run can be written to; one line on
    stderr tells of it."""
    try:
        told = recover(run)
    except (BusyError, InputError):
        return
    except (QuernError, OSError) as error:  # what is there can be read all the same
        told = one_line(error)
    if told is not None:
        print(told, file=sys.stderr)


def _undo(run: str, intent: Intent) -> None:
    storage.check_guards()  # of another process that has taken the run over these may be the files
    if intent.makes_version:
        version.undo(storage.join(run, "tokens"), intent.after)
    journal.discard(run)
