"""``quern lineage purge``: removes documents from a data run, its later versions, and all later runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quern.cli.lineage.training_impact import training_impact_lines
from quern.cli.output import JSON, err_console, json_stdout, plain_line, reports_errors, say
from quern.words import counted

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["purge"]

Row = dict[str, Any]
Several = list[str] | None

_NOTES = 12
"""So many notes of one kind are shown one by one."""


@reports_errors
def purge(
    run: Annotated[str, typer.Argument(help="A complete data run, here or on a store.", metavar="RUN")],
    mode: Annotated[
        Literal["mask", "rewrite"],
        typer.Option(
            help="mask: purged tokens become EOT in place; the order and every other sample stay. rewrite: they are "
            "removed; the source changes, and a trainer reads it after data.N.accept_version."
        ),
    ],
    url: Annotated[Several, typer.Option(help="A page's URL, in any spelling; may be given again.")] = None,
    domain: Annotated[Several, typer.Option(help="A host, and all hosts below it; may be given again.")] = None,
    doc: Annotated[Several, typer.Option(help="A doc_id, 32 hex digits; may be given again.")] = None,
    urls_file: Annotated[
        Several, typer.Option("--urls-file", help="A file with one URL per line; - is standard input.", metavar="FILE")
    ] = None,
    match: Annotated[
        Several,
        typer.Option(
            help="What matches a benchmark: its items, a JSONL file, or what quern lineage match --out kept.",
            metavar="FILE",
        ),
    ] = None,
    sql: Annotated[
        Several, typer.Option(help="What a query finds, which has a column doc_id.", metavar="QUERY")
    ] = None,
    train_run: Annotated[
        Several,
        typer.Option("--train-run", help="A training run to report on, beside those registered.", metavar="DIR"),
    ] = None,
    duplicates: Annotated[
        Literal["purge", "restore"],
        typer.Option(
            help="What was removed as a duplicate of a purged document goes with it (purge), or the best of what is "
            "not selected takes its place (restore, with --mode rewrite)."
        ),
    ] = "purge",
    reason: Annotated[str | None, typer.Option(help="Why, for the audit log.", metavar="TEXT")] = None,
    purge_list: Annotated[
        str | None,
        typer.Option("--purge-list", help="The folder of tombstones (the run's own, or one beside it).", metavar="DIR"),
    ] = None,
    similar: Annotated[
        bool, typer.Option("--similar", help="Tombstones keep near-duplicates out of later runs, too.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of shards written in parallel.")] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and purge nothing.")] = False,
    json: bool = JSON,
) -> None:
    """Remove documents from RUN permanently: from its tokens (a new corpus version), its texts, and every later run.

    With them go pages of the same URL or text, and (--duplicates purge) what was removed as their duplicates.
    """
    from quern.lineage.purge.apply.transaction import Request
    from quern.lineage.purge.apply.transaction import purge as carry_out
    from quern.lineage.purge.selection.deletion_set import find_deletion_set
    from quern.lineage.purge.selection.select import select

    values = (url, domain, doc, urls_file, match, sql)
    names = ("url", "domain", "doc", "urls-file", "match", "sql")
    given = {name: own for name, own in zip(names, values, strict=True) if own}
    notes: list[str] = []

    def deletion_set(path: str) -> pa.Table:
        return find_deletion_set(path, select(path, given, note=notes.append), duplicates, note=notes.append)

    with json_stdout(json) as emit:
        report = carry_out(
            Request(
                run=run, mode=mode, find_deletion_set=deletion_set, selection=given, duplicates=duplicates,
                reason=reason, purge_list=purge_list, similar=similar, train_runs=tuple(train_run or ()),
                workers=workers,
            ),
            dry_run=dry_run,
        )  # fmt: skip
        report["notes"] = notes
        emit(report)
        for note in (*notes, *report["warnings"]):
            say(note, err_console())
        if not json:
            for line in _lines(report):
                print(plain_line(line))


def _lines(report: Row) -> Iterator[str]:
    """The report for a person."""
    if report["recovered"]:
        yield report["recovered"]
    would = "would be " if report["dry_run"] else ""
    whys = [f"{report[f'condemned_{why}']:,} {words}" for why, words in _WHY.items() if report[f"condemned_{why}"]]
    yield f"condemned   {counted(report['condemned'], 'document')}: {', '.join(whys)}"
    yield from _tokens(report, would)
    if not report["dry_run"]:
        yield from _done(report)
    else:
        yield f"tombstones  would go to {report['purge_list']} ({report['purge_list_why']})"
    yield from training_impact_lines(report["taint"])
    if report["dry_run"]:
        yield "nothing was done (--dry-run)"


_WHY = {
    "selected": "selected",
    "url": "of the same URL",
    "text": "of the same text",
    "duplicate": "removed as their duplicates",
}


def _tokens(report: Row, would: str) -> Iterator[str]:
    version, before = report["version"], report["documents_purged_before"]
    if version["after"] == version["before"]:
        what = "purged before" if before else "they have no tokens"
        yield f"tokens      none to purge ({what}); the corpus stays at version {version['before']}"
        return
    yield (
        f"tokens      {report['tokens_purged']:,} of {counted(report['documents_purged'], 'document')} "
        f"{would}purged by "
        f"{report['mode']}; corpus version {version['before']} → {version['after']}"
    )
    if report["duplicates"] == "restore":
        count = f"{report['tokens_restored']:,} tokens of " if "tokens_restored" in report else ""
        displaced = report["documents_displaced"]
        others = f"; {displaced:,} that are duplicates of these leave the tokens" if displaced else ""
        yield f"restored    {count}{counted(report['documents_restored'], 'document')}{others}"
    for stream, shards in sorted(report["touched"].items()):
        yield f"shards      {stream}: {len(shards):,} {would}written again"


def _done(report: Row) -> Iterator[str]:
    texts, held = report["texts"], report["superseded"]["held"]
    yield f"texts       of {counted(texts['documents'], 'document')} gone"
    if report["tombstones"] is not None:
        yield f"tombstones  {report['tombstones']} ({report['purge_list_why']})"
    else:
        yield f"tombstones  {report['purge_list']} held them all before"
    yield f"audit       {report['audit'] or 'nothing was changed, nothing is noted'}"
    for note in _some([*texts["notes"], *report["pages"]["notes"]]):
        yield f"note        {note}"
    for stream in sorted(held):
        yield (
            f"held        old shards of {stream} are being read, and stay until the next purge, verify or data run "
            "after the reader has gone"
        )


def _some(notes: list[str]) -> Iterator[str]:
    yield from notes[:_NOTES]
    if len(notes) > _NOTES:
        yield f"… and {len(notes) - _NOTES:,} more"
