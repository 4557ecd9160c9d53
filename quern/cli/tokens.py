"""``quern tokens``: look into shards."""

from __future__ import annotations

from typing import Annotated

import typer

from quern.cli.output import JSON, json_stdout, out_console, reports_errors
from quern.tokenize.inspect import inspect as inspect_shard

app = typer.Typer(help="Look into token shards.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


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
        emit(found.to_dict())
        if not json:
            found.print(out_console())
