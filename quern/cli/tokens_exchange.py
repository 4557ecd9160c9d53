"""``quern tokens export`` and ``quern tokens import``: convert shards to and from other trainers' formats."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quern.cli.output import JSON, json_stdout, one_line, out_console, reports_errors
from quern.errors import InputError
from quern.words import counted

__all__ = ["export", "import_"]

FORMAT = Annotated[str, typer.Option("--format", help="megatron, datatrove, or bin: raw ids, as nanoGPT reads them.")]


@reports_errors
def export(
    run: Annotated[str, typer.Argument(help="A data run, on this machine.", metavar="RUN")],
    format: FORMAT,
    out: Annotated[str, typer.Option(help="The folder to write, which must not be there.", metavar="DIR")],
    source: Annotated[list[str] | None, typer.Option(help="A source; may be repeated. Otherwise all.")] = None,
    val: Annotated[bool, typer.Option("--val", help="The held-out documents instead.")] = False,
    eot: Annotated[bool, typer.Option("--eot/--no-eot", help="Keep the EOT behind each document.")] = True,
    merge: Annotated[bool, typer.Option("--merge", help="One file a source instead of one a shard.")] = False,
    json: bool = JSON,
) -> None:
    """Write the tokens of RUN as files of another trainer, with a table of which document stands where.

    Purged documents are left out whole. Every shard is verified while it is read."""
    from quern.tokenize.exchange.export import EXPORT_FILE
    from quern.tokenize.exchange.export import export as write

    with json_stdout(json) as emit:
        report = write(run, _format(format), out, sources=source or (), held_out=val, eot=eot, merge=merge)
        emit(report.to_dict())
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
    files: Annotated[list[str], typer.Argument(help="Files of tokens.", metavar="FILE…")],
    format: FORMAT,
    out: Annotated[str, typer.Option(help="The data run to make, which must not be there.", metavar="RUN")],
    encoding: Annotated[str, typer.Option(help="What the ids are of: a tiktoken encoding, or with --ranks any name.")],
    ranks: Annotated[str | None, typer.Option(help="A tiktoken ranks file.")] = None,
    eot: Annotated[int | None, typer.Option(help="The id that ends documents; otherwise the encoding's EOT.")] = None,
    source: Annotated[str, typer.Option(help="The name of the source in RUN.")] = "imported",
    root: Annotated[str | None, typer.Option(help="Documents are known by their file's path below this.")] = None,
    dtype: Annotated[str | None, typer.Option(help="uint16 or uint32, of files that do not say it.")] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="A longer file is cut into shards.")] = 2**30,
    sidecar: Annotated[
        bool, typer.Option("--sidecar/--no-sidecar", help="Use tables of documents beside files.")
    ] = True,
    json: bool = JSON,
) -> None:
    """Make a data run of another trainer's token files, which the trainer and lineage read like any other.

    A document is known by its file and the byte at which it starts there; by its crawl record, if quern exported it."""
    from quern.tokenize.exchange.ingest import ImportOptions, ingest

    options = ImportOptions(
        _format(format), encoding, ranks, eot=eot, source=source, root=root, dtype=dtype, shard_tokens=shard_tokens,
        sidecars=sidecar,
    )  # fmt: skip
    with json_stdout(json) as emit:
        report = ingest(files, out, options)
        emit(report.to_dict())
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
            _print("written", f"{out}/tokens/{report.source}")


def _format(name: str) -> Any:
    from quern.tokenize.exchange.foreign import FORMATS

    if name not in FORMATS:
        raise InputError(f"--format: expected one of {', '.join(FORMATS)}, got {name!r:.60}")
    return name


def _print(name: str, value: str | None) -> None:
    if value is not None:
        out_console().print(f"{name:<10}{one_line(value)}", markup=False)
