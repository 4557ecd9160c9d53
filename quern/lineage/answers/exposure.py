"""Answers which training steps read documents, as plain data: ``quern lineage exposure --json``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quern.data_pipeline.page.url import canonicalize
from quern.errors import InputError
from quern.lineage.exposure import Clean, Exposures, Tally, clean, walk
from quern.lineage.match import Matches, match, read_index
from quern.lineage.purge.impact.earlier import settle
from quern.lineage.purge.impact.training_impact import init_from, not_proven
from quern.lineage.selection import Selection, select, select_parts
from quern.lineage.store import IndexedRun
from quern.lineage.training import SeenCheckpoint, TrainingRun
from quern.tokenize.selection.chosen import Identity

__all__ = ["exposure_answer", "positions"]

Row = dict[str, Any]


def exposure_answer(
    run: TrainingRun, asked: Mapping[str, str | None], *, limit: int | None, abandoned: bool, store: bool
) -> Row:
    """Every step of ``run`` whose batch held a token of the documents, checkpoints that have seen them, and the last
    clean one.

    ``asked``: one of ``url``, ``domain``, ``doc`` (32 hex digits) and ``match`` (a benchmark, or a saved result of a
    match), which says which documents. ``limit``: exposures listed one by one in ``rows`` (None: all); counts and steps
    are of all. ``abandoned``: ``rows`` has those of branches that the run has left too. ``store``: also checkpoints
    that only the run's store has.

    Raises:
        InputError: none or several of the four are given, or no document is meant.
    """
    given = {name: text for name, text in asked.items() if text}
    if len(given) != 1:
        raise InputError(f"expected one of url, domain, doc and match, got {len(given)}")
    unknown = run.unknown()
    selections = _selections(run, given, unknown)
    tally = Tally(run)
    kept = _first_rows(walk(run, selections, tally), limit, abandoned)
    wanted = {own.lineage.run: own.lineage.documents(own.documents).doc_ids for own in selections} if unknown else {}
    told = settle(tally, unknown, {data_run: b"".join(doc_ids) for data_run, doc_ids in wanted.items()})
    answer = _answer(run, given, tally, clean(run, tally, store=store), unknown)
    left_out = tally.surviving + (tally.abandoned if abandoned else 0) - len(kept)
    rows = _rows(run, selections, kept)
    return {**answer, "limit": limit, "rows": rows, "rows_left_out": left_out, "audit": told}


def _selections(run: TrainingRun, given: Mapping[str, str], unknown: dict[str, str]) -> list[Selection]:
    ((kind, text),) = given.items()
    lineages = run.lineages()
    if not lineages:
        raise InputError(next(iter(unknown.values()), f"{run.path}: no data run of its sources can be opened"))
    if kind == "match":
        return list(_matches(run, lineages, text, unknown))
    selections = [select(lineage, lineage.find(**{kind: text})) for lineage in lineages]
    having = {own.lineage.run_id for own in selections if len(own.documents)}
    for identity in [*unknown]:  # also after a rewrite a data run knows which documents it never had
        if identity.split("/")[0] in {lineage.run_id for lineage in lineages} - having:
            del unknown[identity]
    if not having and not unknown:
        runs = ", ".join(lineage.run for lineage in lineages)
        bare = " (it is no http or https URL)" if kind == "url" and canonicalize(text) is None else ""
        raise InputError(f"{runs}: has no document with {kind} {text}{bare}")
    return selections


def _matches(
    run: TrainingRun, lineages: Sequence[IndexedRun], path: str, unknown: dict[str, str]
) -> Iterator[Selection]:
    """The spans of every match. A saved result is of one data run: sources of others, of which it says nothing, become
    ``unknown``."""
    if not Matches.is_saved(path):
        read_index(path)  # a wrong one is an error at once
        for lineage in lineages:
            found = match(lineage, path)
            yield select_parts(lineage, found.numbers, found.streams, found.starts, found.stops)
        return
    saved = Matches.load(path)
    if saved.run_id not in [*(lineage.run_id for lineage in lineages), *(ident.split("/")[0] for ident in unknown)]:
        raise InputError(f"{path}: is of data run {saved.run_id}, and no source that {run.path} reads is of it")
    for lineage in lineages:
        if saved.run_id == lineage.run_id:
            parts = select_parts(lineage, *saved.in_run(lineage, {Identity(own).stream for own in unknown}))
            yield replace(parts, documents=lineage.find_docs(b"".join(saved.doc_ids)))
            continue
        for stream in lineage.streams:
            for identity in run.identities_of(stream.identity):
                unknown[identity] = f"{identity}: {path} is of another data run, and says nothing of it"


# ---- rows


def _first_rows(blocks: Iterable[Exposures], limit: int | None, abandoned: bool) -> Exposures:
    """The first ``limit`` exposures by step (None: all); the others are counted and forgotten."""
    held: list[Exposures] = []
    for block in blocks:
        wanted = block if abandoned else block.take(block.surviving)
        if len(wanted) and limit != 0:
            held.append(wanted)
        if limit is not None and len(held) > 1:
            kept = Exposures.join(held)
            held = [kept.take(range(min(limit, len(kept))))]
    kept = Exposures.join(held)
    return kept if limit is None else kept.take(range(min(limit, len(kept))))


def _rows(run: TrainingRun, selections: Sequence[Selection], kept: Exposures) -> list[Row]:
    columns = {name: column.tolist() for name, column in vars(kept).items()}
    names: dict[tuple[int, int], tuple[bytes, str | None]] = {}
    for index in np.unique(kept.lineages).tolist():
        numbers = np.unique(kept.numbers[kept.lineages == index])
        documents = selections[index].lineage.documents(numbers)
        for number, doc_id, url in zip(numbers.tolist(), documents.doc_ids, documents.urls, strict=True):
            names[index, number] = doc_id, url
    rows = []
    for row in range(len(kept)):
        doc_id, url = names[columns["lineages"][row], columns["numbers"][row]]
        inputs, targets = positions(columns, "input", row), positions(columns, "target", row)
        rows.append({
            "step": columns["steps"][row], "data_step": columns["data_steps"][row],
            "attempt": columns["attempts"][row], "sequence": columns["sequences"][row],
            "source": run.order_of(run.attempts[columns["attempts"][row]]).ids[columns["sources"][row]],
            "epoch": columns["epochs"][row],
            "window": columns["windows"][row], "doc_id": doc_id.hex(), "url": url,
            "kind": "both" if inputs and targets else "input" if inputs else "target",
            "inputs": inputs, "targets": targets, "applied": columns["applied"][row],
            "purged": columns["purged"][row], "surviving": columns["surviving"][row],
        })  # fmt: skip
    return rows


def positions(columns: Mapping[str, list[int]], kind: str, row: int) -> list[int] | None:
    """[first, end) of a row's ``kind``, input or target; None where it has none."""
    start, stop = columns[f"{kind}_starts"][row], columns[f"{kind}_stops"][row]
    return [start, stop] if stop > start else None


# ---- the answer


def _answer(
    run: TrainingRun, given: Mapping[str, str], tally: Tally, verdict: Clean, unknown: Mapping[str, str]
) -> Row:
    steps = [
        {"step": step, "exposures": count, "applied": applied} for step, (count, applied) in sorted(tally.steps.items())
    ]
    real = [row["step"] for row in steps if row["applied"]]
    checkpoints = [_checkpoint(seen, True, first) for seen, first in verdict.seen]
    checkpoints += [_checkpoint(seen, False) for seen in verdict.unseen]
    checkpoints += [_checkpoint(seen, None) for seen in verdict.unknown]
    return {
        "train_run": run.path, "trainer": "other" if run.of_other_trainer else "quern",
        "asked": dict(given), "steps_complete": run.reached,
        "documents": tally.documents, "documents_without_tokens": tally.without_tokens, "spans": tally.spans,
        "exposures": tally.surviving, "applied": tally.applied, "purged": tally.purged, "abandoned": tally.abandoned,
        "of_unknown_version": tally.unsure,
        "steps": steps, "first_step": real[0] if real else None, "last_step": real[-1] if real else None,
        "checkpoints": sorted(checkpoints, key=lambda row: int(row["step"])),
        "last_clean": None if verdict.last is None else _checkpoint(verdict.last, False),
        "never_read": {
            "windows": tally.windows, "windows_not_reached": tally.unreached, "skipped_by_rollbacks": tally.left_out,
            "tail_tokens": tally.tail_tokens, "first_tokens": tally.first_tokens, "held_out_spans": tally.held_out,
            "spans_of_other_streams": tally.foreign, "spans_not_chosen": tally.not_chosen,
        },
        "unproven": not_proven(tally), "known": not unknown, "unknown_sources": dict(unknown),
        "damaged_checkpoints": dict(run.damaged), "init_from": init_from(run),
    }  # fmt: skip


def _checkpoint(seen: SeenCheckpoint, saw: bool | None, first: int | None = None) -> Row:
    return {"step": seen.step, "path": seen.path, "abandoned": seen.abandoned, "saw": saw, "first_step": first}
