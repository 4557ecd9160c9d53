"""A purge from beginning to end, such that one that is cut off anywhere is finished or undone afterwards.

What will be done is written down (:mod:`.journal`) before anything is. The new generations of shards are listed by
nobody until ``VERSION.json`` is replaced: that is the moment of the purge. Up to it recovery undoes; after it
everything that is left to do may be done again, and recovery does it.
"""

from __future__ import annotations

import datetime as dt
import errno
import gc
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.run_directory import is_complete, sole_driver
from quern.errors import InputError, QuernError
from quern.lineage.purge import journal, version
from quern.lineage.purge.journal import Intent
from quern.lineage.purge.superseded import Swept, sweep
from quern.lineage.purge.version import Corpus, Plan, Restoration
from quern.tokenize.corpus_version import read_version

__all__ = ["Parts", "Request", "purge", "recover", "recover_held"]

Mode = Literal["mask", "rewrite"]


@dataclass(frozen=True)
class Parts:
    """What a purge does beside the tokens, after the new version holds. Each is told the run, the intent and the
    condemned, may be called again after it was cut off, and returns what is to be reported of it (plain data)."""

    remember: Callable[[str, Intent, pa.Table], Any]
    clean: Callable[[str, Intent, pa.Table], Any]
    forensics: Callable[[str, Intent, pa.Table], Any]
    audit: Callable[[str, Intent, pa.Table], Any]

    def steps(self) -> Iterator[tuple[str, Callable[[str, Intent, pa.Table], Any]]]:
        """In the order in which they are done."""
        for name in ("remember", "clean", "forensics", "audit"):
            yield name, getattr(self, name)


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    run: str
    mode: Mode
    condemn: Callable[[str], pa.Table]
    """The condemned of a run (``CONDEMNED_SCHEMA``)."""
    selection: Mapping[str, Any]
    """As given."""
    duplicates: Literal["purge", "restore"] = "purge"
    reconsider: Callable[[str, pa.Table], Sequence[Restoration]] | None = None
    """With ``restore``: what comes back, of a run and its condemned."""
    reason: str | None = None
    purge_list: str = ""
    """The folder of tombstones."""
    train_runs: tuple[str, ...] = ()
    signatures: bool = False
    workers: int = 4


def purge(request: Request, parts: Parts, *, dry_run: bool = False) -> dict[str, Any]:
    """Carry out a request; what was done, or with ``dry_run`` would be, as plain data.

    Raises:
        InputError: the run is not complete, or damaged; nothing is selected; ``restore`` with ``mask``.
        QuernError: somebody else is at work in the run; or it failed, and the message says whether it was undone.
    """
    if request.duplicates == "restore" and request.mode == "mask":
        raise InputError("--duplicates restore: a restored document needs room among the others; use --mode rewrite")
    run = request.run
    if not is_complete(run):
        raise InputError(f"{run}: expected a complete data run; only what has all of its tokens can be purged of some")
    with nullcontext() if dry_run else sole_driver(run):
        recovered = None if dry_run else recover_held(run, parts)
        if dry_run and journal.read_intent(run) is not None:
            raise QuernError(f"{run}: an earlier purge was cut off; purge or verify the run without --dry-run first")
        corpus = version.open_corpus(run)
        condemned = request.condemn(run)
        if not len(condemned):
            raise InputError(f"{run}: no document is selected; nothing to purge")
        restorations = request.reconsider(run, condemned) if request.reconsider is not None else ()
        plan = version.make_plan(corpus, condemned, restorations, workers=request.workers)
        intent = _intent(request, corpus, condemned, plan)
        report = {"run": run, "dry_run": dry_run, "recovered": recovered, **_told(intent)}
        if dry_run:
            return report
        _carry_out(run, corpus, plan, intent, condemned, restorations, request.workers)
        return {**report, **_finish(run, intent, condemned, parts)}


def _intent(request: Request, corpus: Corpus, condemned: pa.Table, plan: Plan) -> Intent:
    whys = {row["values"]: row["counts"] for row in pc.value_counts(condemned["why"]).to_pylist()}
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
        purge_list=request.purge_list,
        purge_list_name=_free_name(request.purge_list, f"{record['id']}.v{after}"),
        train_runs=request.train_runs,
        signatures=request.signatures,
        touched=plan.touched,
        counts={
            "condemned": len(condemned),
            **{f"condemned_{why}": whys.get(why, 0) for why in ("selected", "url", "text", "duplicate")},
            "documents_purged": len(plan.purged),
            "tokens_purged": plan.tokens_purged,
            "documents_purged_before": plan.already,
            "documents_restored": len(plan.restored),
            "tokens_restored": plan.tokens_restored,
            "shards_touched": len(plan.changes),
            "bytes_read": plan.bytes_read,
        },
    )


def _free_name(folder: str, stem: str) -> str:
    """A file's name that the purge list does not have yet."""
    there = {path.rpartition("/")[2] for path in storage.list_files(folder)} if folder else set()
    name, number = f"{stem}.parquet", 1
    while name in there:
        number += 1
        name = f"{stem}-{number}.parquet"
    return name


def _told(intent: Intent) -> dict[str, Any]:
    """What a report says of an intent."""
    return {
        "mode": intent.mode,
        "duplicates": intent.duplicates,
        "selection": dict(intent.selection),
        "reason": intent.reason,
        "version": {"before": intent.before, "after": intent.after},
        "touched": dict(intent.touched),
        **intent.counts,
        "purge_list": storage.join(intent.purge_list, intent.purge_list_name),
    }


def _carry_out(
    run: str,
    corpus: Corpus,
    plan: Plan,
    intent: Intent,
    condemned: pa.Table,
    restorations: Sequence[Restoration],
    workers: int,
) -> None:
    """Up to the moment of the purge; an error before it leaves the run as it was."""
    restored = None
    if restorations:
        rows = [{"doc_id": own.doc_id, "stream": own.stream} for own in restorations]
        restored = pa.Table.from_pylist(rows, pa.schema([("doc_id", pa.binary(16)), ("stream", pa.string())]))
    try:
        journal.write_intent(run, intent, condemned, restored)
        if intent.makes_version:
            written = version.write_shards(corpus, plan, intent.mode, workers=workers)
            version.publish(corpus, plan, intent.mode, written)
    except Exception as error:
        try:
            done = intent.makes_version and read_version(corpus.tokens)["version"] == intent.after
            if not done:
                _undo(run, intent)
        except Exception as second:
            raise QuernError(
                f"{run}: the purge failed ({_line(error)}), and could not be undone ({_line(second)}); the next purge, "
                "verify or data run does so first; the corpus is as it was"
            ) from error
        if not done:
            raise _failed(run, error) from error


def _failed(run: str, error: Exception) -> QuernError:
    if isinstance(error, InputError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return QuernError(
            f"{run}: no space left on the device ({_line(error)}); the purge was undone, nothing is changed"
        )
    return QuernError(f"{run}: the purge failed ({_line(error)}); it was undone, nothing is changed")


def _finish(run: str, intent: Intent, condemned: pa.Table, parts: Parts) -> dict[str, Any]:
    """All that is left to do once the version holds. Every step may be done again."""
    report: dict[str, Any] = {}
    step = ""
    try:
        for step, act in parts.steps():
            report[step] = act(run, intent, condemned)
        step = "removing what no version lists"
        report["superseded"] = _sweep(run)
        step = "removing the record of the purge"
        journal.discard(run)
    except QuernError:
        raise
    except Exception as error:
        raise QuernError(
            f"{run}: corpus version {intent.after} holds, but the purge is not at its end ({step}: {_line(error)}); "
            "the next purge, verify or data run goes on with it"
        ) from error
    return report


def _sweep(run: str) -> dict[str, Any]:
    gc.collect()  # readers of the old version that this process has forgotten
    swept: Swept = sweep(storage.join(run, "tokens"))
    return {"removed": swept.removed, "held": dict(swept.held)}


def recover(run: str, parts: Parts) -> str | None:
    """Finish or undo what a purge left that was cut off; what was done, in words. None: there was nothing.

    Raises:
        QuernError: somebody is at work in the run.
    """
    with sole_driver(run):
        return recover_held(run, parts)


def recover_held(run: str, parts: Parts) -> str | None:
    """As :func:`recover`, for who holds the run already."""
    intent = journal.read_intent(run)
    if intent is None:
        journal.discard(run)
        return None
    now = read_version(storage.join(run, "tokens"))["version"]
    if now == intent.after:
        condemned = journal.read_table(run, "condemned")
        if condemned is None:
            raise QuernError(f"{run}: a purge was cut off, and its list of documents is gone; purge them again")
        _finish(run, intent, condemned, parts)
        return f"the purge of {intent.at} had been cut off; it is finished: corpus version {intent.after}"
    if now == intent.before:
        _undo(run, intent)
        return f"the purge of {intent.at} had been cut off; it is undone: corpus version {intent.before}"
    raise QuernError(
        f"{run}: a purge from version {intent.before} to {intent.after} was cut off, but the corpus is at version {now}"
    )


def _undo(run: str, intent: Intent) -> None:
    if intent.makes_version:
        version.undo(storage.join(run, "tokens"), intent.after)
    journal.discard(run)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
