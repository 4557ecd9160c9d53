"""``quern tokens``: inspects token shards, exports them to other trainers, and imports theirs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from quern.cli.output import JSON, err_console, json_stdout, out_console, plain, reports_errors, say
from quern.cli.tokens.exchange import export, import_
from quern.tokenize.inspect import Inspection
from quern.tokenize.inspect import inspect as inspect_shard

app = typer.Typer(help="Inspect, export and import token shards.", no_args_is_help=True)
app.command("export")(export)
app.command("import")(import_)


@app.command()
@reports_errors
def inspect(
    shard: Annotated[str, typer.Argument(help="A shard: RUN/tokens/<source>/shard_00000.bin", metavar="SHARD")],
    at: Annotated[int, typer.Option("--at", min=0, help="Token position in the shard.")],
    context: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens to decode on each side.")] = 64,
    json: bool = JSON,
) -> None:
    """Decode around a token and name the document it came from: URL, file, byte offset."""
    found = inspect_shard(shard, at, context=context)
    with json_stdout(json) as emit:
        emit(asdict(found))
        if not json:
            _print(found)
        if found.no_page is not None:
            say(f"{found.doc_id}: {found.no_page}", err_console())


def _print(found: Inspection) -> None:
    console = out_console()
    page = found.page or {}
    rows = [
        ("token", f"{found.token} {found.token_text!r} at {found.at:,} of {found.shard}"),
        ("document", f"{found.doc_id}{'  (purged)' if found.purged else ''}"),
        ("url", page.get("url")),
        ("file", page.get("source_file")),
        ("record", f"byte {page['record_offset']:,}" if page.get("record_offset") is not None else None),
        ("fetched", page.get("fetched_at")),
        ("span", f"tokens {found.start:,} to {found.start + found.length:,}; this is number {found.position:,}"),
    ]
    for name, value in rows:
        if value is not None:
            say(f"{name:<10}{value}")
    console.print()
    shown = (plain(text) for text in (found.before, found.token_text, found.after))
    console.print(Text.assemble(next(shown), (next(shown), "reverse"), next(shown)))
