"""``quern tokens export`` and ``quern tokens import``: convert shards to and from other trainers' formats."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from quern.cli.output import JSON, json_stdout, plain_line, reports_errors, say
from quern.errors import InputError
from quern.words import counted

__all__ = ["export", "import_"]

FORMAT = Annotated[str, typer.Option("--format", help="megatron, datatrove, or bin: raw ids, as nanoGPT reads them.")]


@reports_errors
def export(
    run: Annotated[str, typer.Argument(help="A data run, on this machine.", metavar="RUN")],
    format: FORMAT,
    out: Annotated[str, typer.Option(help="The folder to write; it must be new or empty.", metavar="DIR")],
    source: Annotated[list[str] | None, typer.Option(help="A source; may be repeated. Otherwise all.")] = None,
    val: Annotated[bool, typer.Option("--val", help="Export the held-out documents instead.")] = False,
    eot: Annotated[bool, typer.Option("--eot/--no-eot", help="Keep the EOT after each document.")] = True,
    merge: Annotated[bool, typer.Option("--merge", help="Write one file per source instead of one per shard.")] = False,
    json: bool = JSON,
) -> None:
    """Write the tokens of RUN in another trainer's format, with a table of the place of each document.

    Purged documents are left out. Every shard is verified while it is read."""
    from quern.tokenize.exchange.export import EXPORT_FILE
    from quern.tokenize.exchange.export import export as write

    with json_stdout(json) as emit:
        report = write(run, _format(format), out, sources=source or (), held_out=val, eot=eot, merge=merge)
        emit(asdict(report))
        if not json:
            documents, tokens = (sum(getattr(own, name) for own in report.files) for name in ("documents", "tokens"))
            _print("format", f"{report.format}, {report.dtype}, {'with' if eot else 'without'} EOT")
            _print("files", f"{len(report.files):,} of {counted(documents, 'document')}, {counted(tokens, 'token')}")
            _print(
                "purged",
                f"{counted(report.purged_documents, 'document')} left out" if report.purged_documents else None,
            )
            _print("written", f"{out}; what it holds: {EXPORT_FILE}")


@reports_errors
def import_(
    files: Annotated[
        list[str], typer.Argument(help="Files of tokens; NAME=FILE or NAME=GLOB: of the source NAME.", metavar="FILE…")
    ],
    format: FORMAT,
    out: Annotated[str, typer.Option(help="The data run to make; it must be new or empty.", metavar="RUN")],
    encoding: Annotated[
        str, typer.Option(help="The encoding of the ids: a tiktoken encoding, or with --ranks any name.")
    ],
    ranks: Annotated[str | None, typer.Option(help="A tiktoken ranks file.")] = None,
    eot: Annotated[int | None, typer.Option(help="The id that ends documents; otherwise the encoding's EOT.")] = None,
    source: Annotated[str, typer.Option(help="The source in RUN of files without NAME=.")] = "imported",
    root: Annotated[
        str | None, typer.Option(help="Paths in documents' identities are relative to this folder.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="uint16 or uint32, for files that do not record it.")] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="A longer file is cut into shards.")] = 2**30,
    sidecar: Annotated[
        bool, typer.Option("--sidecar/--no-sidecar", help="Read the tables of documents that stand beside the files.")
    ] = True,
    json: bool = JSON,
) -> None:
    """Make a data run from another trainer's token files; the trainer and lineage read it like any other.

    A document is identified by its file and first byte, or by its crawl record if quern exported it."""
    from quern.tokenize.exchange.ingest import ImportOptions, ingest

    options = ImportOptions(
        _format(format), encoding, ranks, eot=eot, source=source, root=root, dtype=dtype, shard_tokens=shard_tokens,
        sidecars=sidecar,
    )  # fmt: skip
    with json_stdout(json) as emit:
        report = ingest(files, out, options)
        emit(asdict(report))
        if not json:
            restored = sum(own.documents for own in report.files if own.sidecar)
            _print("documents", f"{report.documents:,}, {restored:,} of them known by their crawl record")
            _print("tokens", f"{report.tokens:,} in {counted(report.shards, 'shard')}")
            for name, noun, what in (
                ("eots_added", "document", "got an EOT"),
                ("empty", "document", "without a token left out"),
                ("passed_over_bytes", "byte", "that no document holds left out"),
            ):
                count = sum(getattr(own, name) for own in report.files)
                _print("", f"{counted(count, noun)} {what}" if count else None)
            for name in report.source.split(", "):
                _print("written", f"{out}/tokens/{name}")


def _format(name: str) -> Any:
    from quern.tokenize.exchange.foreign import FORMATS

    if name not in FORMATS:
        raise InputError(f"--format: expected one of {', '.join(FORMATS)}, got {name!r:.60}")
    return name


def _print(name: str, value: str | None) -> None:
    if value is not None:
        say(f"{name:<10}{plain_line(value)}")
