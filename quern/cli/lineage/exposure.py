"""``quern lineage exposure``: the training steps that read documents, and the last checkpoint before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quern.cli.open_run import open_training
from quern.cli.output import JSON, err_console, json_stdout, plain, plain_line, reports_errors
from quern.errors import InputError
from quern.words import counted

if TYPE_CHECKING:
    from quern.lineage.exposure import Clean, Exposures, Selection, Tally
    from quern.lineage.store import Lineage
    from quern.lineage.training import SeenCheckpoint, TrainingRun

__all__ = ["exposure", "positions"]

Row = dict[str, Any]

_SHOWN_STEPS = 12


@reports_errors
def exposure(
    train_run: Annotated[str, typer.Argument(help="A training run.", metavar="TRAIN_RUN")],
    url: Annotated[str | None, typer.Option(help="Of a document with this URL, in any spelling.")] = None,
    domain: Annotated[str | None, typer.Option(help="Of every document of this host and those below it.")] = None,
    doc: Annotated[str | None, typer.Option(help="Of the document with this doc_id: 32 hex digits.")] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help="Of what matches a benchmark: its items, a JSONL file, or what quern lineage match --out kept.",
            metavar="FILE",
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also print the steps of abandoned branches.")] = False,
    store: Annotated[
        bool, typer.Option("--store", help="Also print checkpoints that only the run's store has.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=0, help="Exposures that are listed one by one; 0: none. Counts and steps are of all.")
    ] = 100,
    json: bool = JSON,
) -> None:
    """Print every step of TRAIN_RUN whose batch held a token of the documents, as input or as target, the checkpoints
    trained on them, and the last clean one."""
    given = {name: text for name, text in (("url", url), ("domain", domain), ("doc", doc), ("match", match)) if text}
    if len(given) != 1:
        raise InputError(f"expected one of --url, --domain, --doc and --match, got {len(given)}")
    from quern.lineage.exposure import Tally, clean, walk
    from quern.lineage.purge.impact.earlier import settle

    with json_stdout(json) as emit:
        run = open_training(train_run)
        unknown = run.unknown()
        selections = _selections(run, given, unknown)
        tally = Tally(run)
        kept = _first_rows(walk(run, selections, tally), limit, all_)
        documents = {own.lineage.run: own.lineage.documents(own.documents) for own in selections}
        told = settle(tally, unknown, {data_run: b"".join(own.doc_ids) for data_run, own in documents.items()})
        verdict = clean(run, tally, store=store)
        answer = _answer(run, given, tally, verdict, unknown)
        answer |= {"limit": limit, "rows": _rows(selections, kept), "rows_left_out": _left_out(tally, kept, all_)}
        answer["audit"] = told
        emit(answer)
        if not json:
            _print(answer, run, all_)
        for reason in [*unknown.values(), *told, *run.damaged.values()]:
            err_console().print(plain(reason), markup=False, soft_wrap=True)


def _selections(run: TrainingRun, given: Mapping[str, str], unknown: dict[str, str]) -> list[Selection]:
    from quern.data_pipeline.page.url import canonicalize
    from quern.lineage.exposure import select

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
        raise InputError(f"{runs}: has no document with {kind} {plain_line(text)}{bare}")
    return selections


def _matches(run: TrainingRun, lineages: Sequence[Lineage], path: str, unknown: dict[str, str]) -> Iterator[Selection]:
    """The spans of every match. A saved result is of one data run: sources of others, of which it says nothing, become
    ``unknown``."""
    from quern.lineage.exposure import select_parts
    from quern.lineage.match import Matches, match, read_index

    if not Matches.is_saved(path):
        read_index(path)  # a wrong one is an error at once
        for lineage in lineages:
            found = match(lineage, path)
            yield select_parts(lineage, found.numbers, found.streams, found.starts, found.stops)
        return
    saved = Matches.load(path)
    if saved.run_id not in [*(lineage.run_id for lineage in lineages), *(ident.split("/")[0] for ident in unknown)]:
        raise InputError(
            f"{path}: is of data run {plain_line(saved.run_id)}, and no source that {run.path} reads is of it"
        )
    for lineage in lineages:
        if saved.run_id == lineage.run_id:
            parts = select_parts(lineage, *saved.in_run(lineage, unknown))
            yield replace(parts, documents=lineage.find_docs(b"".join(saved.doc_ids)))
            continue
        for stream in lineage.streams:
            if any(stream.identity in run.order_of(attempt).ids for attempt in run.attempts):
                unknown[stream.identity] = f"{stream.identity}: {path} is of another data run, and says nothing of it"


# ---- rows


def _first_rows(blocks: Any, limit: int, all_: bool) -> Exposures:
    """The first ``limit`` exposures by step; the others are counted and forgotten."""
    from quern.lineage.exposure import Exposures

    kept = Exposures.join([])
    for block in blocks:
        wanted = block if all_ else block.take(block.surviving)
        if len(wanted) and limit:
            kept = Exposures.join([kept, wanted]).take(range(min(limit, len(kept) + len(wanted))))
    return kept


def _left_out(tally: Tally, kept: Exposures, all_: bool) -> int:
    return tally.surviving + (tally.abandoned if all_ else 0) - len(kept)


def _rows(selections: Sequence[Selection], kept: Exposures) -> list[Row]:
    import numpy as np

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
        lineage = selections[columns["lineages"][row]].lineage
        inputs, targets = positions(columns, "input", row), positions(columns, "target", row)
        rows.append({
            "step": columns["steps"][row], "data_step": columns["data_steps"][row],
            "attempt": columns["attempts"][row], "sequence": columns["sequences"][row],
            "source": lineage.streams[columns["streams"][row]].identity, "epoch": columns["epochs"][row],
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
    from quern.lineage.purge.impact.training_impact import init_from, not_proven

    steps = [
        {"step": step, "exposures": count, "applied": applied} for step, (count, applied) in sorted(tally.steps.items())
    ]
    real = [row["step"] for row in steps if row["applied"]]
    checkpoints = [_checkpoint(seen, True, first) for seen, first in verdict.seen]
    checkpoints += [_checkpoint(seen, False) for seen in verdict.unseen]
    checkpoints += [_checkpoint(seen, None) for seen in verdict.unknown]
    return {
        "train_run": run.path, "asked": dict(given), "steps_complete": run.reached,
        "documents": tally.documents, "documents_without_tokens": tally.without_tokens, "spans": tally.spans,
        "exposures": tally.surviving, "applied": tally.applied, "purged": tally.purged, "abandoned": tally.abandoned,
        "of_unknown_version": tally.unsure,
        "steps": steps, "first_step": real[0] if real else None, "last_step": real[-1] if real else None,
        "checkpoints": sorted(checkpoints, key=lambda row: int(row["step"])),
        "last_clean": None if verdict.last is None else _checkpoint(verdict.last, False),
        "never_read": {
            "windows": tally.windows, "windows_not_reached": tally.unreached, "skipped_by_rollbacks": tally.left_out,
            "tail_tokens": tally.tail_tokens, "first_tokens": tally.first_tokens, "held_out_spans": tally.held_out,
            "spans_of_other_streams": tally.foreign,
        },
        "unproven": not_proven(tally), "known": not unknown, "unknown_sources": dict(unknown),
        "damaged_checkpoints": dict(run.damaged), "init_from": init_from(run),
    }  # fmt: skip


def _checkpoint(seen: SeenCheckpoint, saw: bool | None, first: int | None = None) -> Row:
    return {"step": seen.step, "path": seen.path, "abandoned": seen.abandoned, "saw": saw, "first_step": first}


def _print(answer: Row, run: TrainingRun, all_: bool) -> None:
    never = answer["never_read"]
    count = answer["documents"]
    print(f"{plain(run.path)}: {counted(answer['steps_complete'], 'step')} complete")
    without = answer["documents_without_tokens"]
    print(
        f"documents    {count:,}"
        + (f", {without:,} of them without tokens: purged, dropped, or duplicates" if without else "")
    )
    if "match" in answer["asked"]:
        print("matches      only the matched spans count; purge --match takes, and counts, the documents whole")
    skipped = answer["exposures"] - answer["applied"] - answer["purged"]
    notes = [f"{skipped:,} in steps whose update was skipped"] if skipped else []
    notes += [f"{answer['purged']:,} of purged documents, of which nothing was left"] if answer["purged"] else []
    less = "" if answer["known"] else "not known; in the sources that can be opened: "
    print(f"exposures    {less}{answer['exposures']:,}" + (f" ({'; '.join(notes)})" if notes else ""))
    if answer["of_unknown_version"]:
        print(
            f"not sure     {answer['of_unknown_version']:,} of documents that were purged since: the ledger does not "
            "tell which corpus version was read, and the oldest is taken for it"
        )
    if answer["abandoned"]:
        print(f"abandoned    {answer['abandoned']:,} more, in steps that the run went back behind")
    if answer["first_step"] is not None:
        print(f"steps        {answer['first_step']:,} to {answer['last_step']:,}: {_steps(answer['steps'])}")
    for text in _never(never):
        print(f"never read   {text}")
    for row in answer["unproven"]:
        text = f"attempt {row['attempt']} from step {row['from_step']:,} on; it did not say where it ended"
        if row["next_step"] is not None:
            text += f", and would next have read them at step {row['next_step']:,}"
        print(f"not proven   {text}")
    _print_checkpoints(answer)
    _print_rows(answer, all_)


def _steps(steps: Sequence[Row]) -> str:
    shown = [f"{row['step']:,}" + (f" ×{row['exposures']:,}" if row["exposures"] > 1 else "") for row in steps]
    more = len(shown) - _SHOWN_STEPS
    return ", ".join(shown[:_SHOWN_STEPS]) + (f" and {counted(more, 'step')} more" if more > 0 else "")


def _never(never: Row) -> list[str]:
    def count(name: str, noun: str) -> str:
        return counted(never[name], noun)

    texts = {
        "windows_not_reached": f"{never['windows_not_reached']:,} of {count('windows', 'window')} not reached yet",
        "skipped_by_rollbacks": f"{count('skipped_by_rollbacks', 'place')} of the order that a rollback skipped",
        "tail_tokens": f"{count('tail_tokens', 'token')} behind the last window of a stream",
        "first_tokens": f"{count('first_tokens', 'token')} at the start of a stream, which is no target",
        "held_out_spans": f"{count('held_out_spans', 'document')} held out",
        "spans_of_other_streams": f"{count('spans_of_other_streams', 'document')} of sources the run does not read",
    }
    return [text for name, text in texts.items() if never[name]]


def _print_checkpoints(answer: Row) -> None:
    rows = answer["checkpoints"]
    seen = [row for row in rows if row["saw"]]
    unknown = [row for row in rows if row["saw"] is None]
    told = [f"{len(seen):,} of {len(rows):,} have seen them"] if seen or not unknown else []
    told += [f"of {len(unknown):,} of {len(rows):,} it is not known whether they have seen them"] if unknown else []
    print(f"checkpoints  {'; '.join(told)}")
    for row in seen:
        left = "  (abandoned branch)" if row["abandoned"] else ""
        print(f"  step {row['step']:,}  first at step {row['first_step']:,}{left}  {plain(row['path'])}")
    clean = answer["last_clean"]
    none = "not known" if unknown else "none"
    print("last clean   " + (none if clean is None else f"step {clean['step']:,}  {plain(clean['path'])}"))
    if answer["init_from"] is not None:
        print(f"the weights began as {plain(answer['init_from'])}; what they saw before is not known here")


def _print_rows(answer: Row, all_: bool) -> None:
    if answer["rows"]:
        print()
    for row in answer["rows"]:
        part = "  ".join(
            f"{name} {row[name][0]}–{row[name][1] - 1}" for name in ("inputs", "targets") if row[name] is not None
        )
        notes = [] if row["applied"] else ["skipped"]
        notes += ["purged"] if row["purged"] else []
        notes += [f"abandoned, attempt {row['attempt']}"] if not row["surviving"] else []
        told = f"  ({', '.join(notes)})" if notes else ""
        name = plain_line(row["url"]) if row["url"] is not None else row["doc_id"]
        print(f"step {row['step']:,}  sequence {row['sequence']}  epoch {row['epoch']}  {part}{told}  {name}")
    if answer["rows_left_out"]:
        print(f"and {counted(answer['rows_left_out'], 'exposure')} more (--limit)")
