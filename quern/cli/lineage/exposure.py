"""``quern lineage exposure``: the training steps that read documents, and the last checkpoint before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from quern.cli.output import JSON, err_console, json_stdout, plain, plain_line, reports_errors, say
from quern.errors import InputError
from quern.words import counted

__all__ = ["exposure"]

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
    from quern.lineage.answers.exposure import exposure_answer
    from quern.lineage.answers.opened import open_training_run

    with json_stdout(json) as emit:
        answer = exposure_answer(open_training_run(train_run), given, limit=limit, abandoned=all_, store=store)
        emit(answer)
        if not json:
            _print(answer)
        for reason in [*answer["unknown_sources"].values(), *answer["audit"], *answer["damaged_checkpoints"].values()]:
            say(reason, err_console())


def _print(answer: Row) -> None:
    never = answer["never_read"]
    count = answer["documents"]
    print(f"{plain(answer['train_run'])}: {counted(answer['steps_complete'], 'step')} complete")
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
    _print_rows(answer)


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
        "spans_not_chosen": f"{count('spans_not_chosen', 'document')} that no where of the run chooses",
    }
    return [text for name, text in texts.items() if never[name]]


def _print_checkpoints(answer: Row) -> None:
    if answer["trainer"] == "other":
        first = answer["first_step"]
        which = f"those after at most {first:,} steps are clean" if first is not None else "none has seen them"
        print(f"checkpoints  the other trainer's own: {which if answer['known'] else 'not known'}")
        return
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


def _print_rows(answer: Row) -> None:
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
