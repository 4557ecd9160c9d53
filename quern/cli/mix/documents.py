"""``quern mix select``: weighs documents of a data run against a target, and draws by the weights."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from quern.cli.open_run import note
from quern.cli.output import JSON, json_stdout, out_console, plain, reports_errors
from quern.words import counted, short

__all__ = ["select"]


@reports_errors
def select(
    run: Annotated[str, typer.Argument(help="A data run.", metavar="RUN")],
    name: Annotated[str, typer.Option(help="Of the table, RUN/measures/NAME.")],
    target: Annotated[
        list[str],
        typer.Option(
            help="Texts to be like: .jsonl, .parquet or .txt files, a folder of texts, a data run; repeatable."
        ),
    ],
    keep_documents: Annotated[int | None, typer.Option(min=1, help="How many documents are chosen.")] = None,
    keep_tokens: Annotated[
        int | None, typer.Option(min=1, help="Or how many tokens the chosen documents have at most.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the noise with which documents are drawn.")] = 0,
    source: Annotated[list[str] | None, typer.Option(help="Of RUN; repeatable. Default: all.")] = None,
    buckets: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="Into which words and pairs of words are hashed.")
    ] = 10_000,
    min_words: Annotated[int, typer.Option(min=1, help="Shorter documents are weighed, and not chosen.")] = 100,
    text_field: Annotated[str, typer.Option(help="The field or column of targets that has the text.")] = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Default: one a CPU; 1: without Ray.")] = None,
    address: Annotated[str | None, typer.Option(help="A Ray cluster instead of this machine: auto, HOST:PORT.")] = None,
    json: bool = JSON,
) -> None:
    """Weigh each document of RUN by how much likelier its words are in the target than in RUN, and draw documents by
    these weights without replacement (DSIR, Xie et al. 2023).

    Killed at any moment, the same command goes on.
    """
    from quern.data_run.selection.run import Selection, select  # readers of all kinds: it takes a moment

    asked = Selection(
        run, name, tuple(target), keep_documents, keep_tokens, seed, tuple(source or ()), buckets, min_words, text_field
    )
    with json_stdout(json) as emit:
        emit(found := select(asked, workers, address, note))
        if not json:
            for line in (
                f"{run}/measures/{name}: {found['chosen']:,} of {counted(found['documents'], 'document')}, "
                f"{short(found['chosen_tokens'])} of {short(found['tokens'])} tokens",
                f"fewer than {min_words:,} words: {counted(found['short'], 'document')}; features of the target: "
                f"{found['target_features']:,}, of the run: {found['features']:,}",
                f"effective sample size of the weights: {found['effective_size']:,.1f} documents",
            ):
                out_console().print(Text(plain(line)))
