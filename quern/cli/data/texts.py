"""``quern data export``: the texts of a corpus as files for other programs."""

from __future__ import annotations

from typing import Annotated

import typer

from quern.cli.output import JSON, json_stdout, reports_errors, say
from quern.errors import InputError
from quern.words import counted, size

__all__ = ["export"]


@reports_errors
def export(
    run: Annotated[str, typer.Argument(help="A data run, on this machine.", metavar="RUN")],
    format: Annotated[
        str, typer.Option("--format", help="jsonl (gzipped), parquet, or hf: a folder that datasets loads.")
    ],
    out: Annotated[str, typer.Option(help="The folder to write, here or on a store; it must be empty.", metavar="DIR")],
    source: Annotated[list[str] | None, typer.Option(help="A source; may be repeated. Otherwise all.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="A column of the verdicts to add, such as gopher.num_words; may be repeated."),
    ] = None,
    json: bool = JSON,
) -> None:
    """Write the texts that are in the corpus's current version, with id, URL, date, language and source.

    Texts are those that were tokenized; duplicates, dropped and purged pages are left out."""
    from quern.cli.open_run import open_run
    from quern.lineage.texts import FORMATS, RECORD_FILE, export_texts

    if format not in FORMATS:
        raise InputError(f"--format: expected one of {', '.join(FORMATS)}, got {format!r:.60}")
    with json_stdout(json) as emit:
        done = export_texts(open_run(run), format, out, sources=source or (), columns=column or ())
        emit(vars(done))
        if not json:
            bytes_ = sum(record["bytes"] for record in done.files)
            told = f"{counted(done.documents, 'document')} in {counted(len(done.files), 'file')}, {size(bytes_)}"
            say(f"{told}; {out}/{RECORD_FILE} lists the files")
