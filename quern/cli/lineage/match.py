"""``quern lineage match``: finds the documents and token spans that contain text of a benchmark."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from quern.cli.open_run import open_run
from quern.cli.output import JSON, err_console, json_stdout, reports_errors, say
from quern.lineage.answers.matches import match_answer
from quern.lineage.match import AUTO, DEFAULT_N, MIN_WORDS, Matches, read_index
from quern.lineage.match import match as find_matches
from quern.words import counted

#: Documents and items that the terminal is shown; --json and --out have all.
_SHOWN = 20


@reports_errors
def match(
    run: Annotated[str, typer.Argument(help="A data run.", metavar="RUN")],
    benchmark: Annotated[
        str, typer.Argument(help="JSON lines, one item per line; plain or gzip.", metavar="BENCHMARK.jsonl")
    ],
    field: Annotated[
        list[str] | None, typer.Option(help="A field that holds text; may be given again. auto: all that do.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="Words that must be the same, in a row.")] = DEFAULT_N,
    min_coverage: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of an item's n-grams that a document must hold.")
    ] = 0.0,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: one per CPU.")] = None,
    out: Annotated[str | None, typer.Option(help="Write the result to this Parquet file.")] = None,
    json: bool = JSON,
) -> None:
    """Find the documents and token spans of RUN that hold text of BENCHMARK: shared n-grams of words, whatever their
    case, punctuation and line breaks.
    """
    fields = tuple(field or (AUTO,))
    read_index(benchmark, fields, n)  # a wrong one is an error now, not after a lineage index is built
    with json_stdout(json) as emit:
        lineage = open_run(run)
        found = find_matches(
            lineage, benchmark, fields=fields, n=n, min_coverage=min_coverage, workers=workers or _num_cpus()
        )
        if out is not None:
            found.save(out)
        answer = match_answer(found)
        emit(answer)
        if not json:
            _print(found, answer, out)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print(found: Matches, answer: Mapping[str, Any], out: str | None) -> None:
    documents = answer["documents"]
    for document in sorted(documents, key=lambda d: -max(item["coverage"] for item in d["items"]))[:_SHOWN]:
        say(f"{document['doc_id']}  {document['url'] or '(no url)'}")
        best = sorted(document["items"], key=lambda item: -item["coverage"])
        for item in best[:_SHOWN]:
            spans = ", ".join(f"{start:,} to {stop:,}" for start, stop in item["spans"][:3])
            more = f" and {len(item['spans']) - 3:,} more" if len(item["spans"]) > 3 else ""
            grams = f"{item['grams']:5,} n-grams of item {item['id']} (line {item['line']})"
            say(f"  {item['coverage']:7.1%}  {grams}, tokens {spans}{more} of {document['stream']}")
        if len(best) > _SHOWN:
            say(f"  … and {len(best) - _SHOWN:,} more items")
    if len(documents) > _SHOWN:
        say(f"… and {len(documents) - _SHOWN:,} more documents; --json or --out has all")
    hold = f"{counted(len(documents), 'document')} {'holds' if len(documents) == 1 else 'hold'} text of "
    say(f"{hold}{answer['items_found']:,} of {counted(len(found.items), 'item')} ({found.n} words in a row)")
    if found.not_looked_for:
        shown = ", ".join(item.id for item in found.not_looked_for[:5]) + ", …" * (len(found.not_looked_for) > 5)
        what = f"{counted(len(found.not_looked_for), 'item')} with no text of {min(found.n, MIN_WORDS)} words"
        say(f"not looked for: {what} ({shown})", err_console())
    if out is not None:
        say(f"kept in {out}", err_console())
