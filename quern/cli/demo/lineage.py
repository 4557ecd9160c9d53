"""The lineage part of the demo: a URL's history, the training steps that read it, and the documents of one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console

from quern.cli.output import plain
from quern.errors import QuernError
from quern.lineage.exposure import clean, exposures
from quern.lineage.steps import read_step
from quern.lineage.store import IndexedRun
from quern.lineage.trace import trace
from quern.lineage.training import TrainingRun

__all__ = ["walk_lineage"]

_SHOWN_STEPS = 6
_SHOWN_CHARS = 70


def walk_lineage(data_run: str, train_run: str, urls: Iterable[str], console: Console | None) -> dict[str, Any]:
    """Walk the first of ``urls`` that the run trained on from its record to the steps that read it, and one of these
    steps back to its documents; returns what was found, and prints it where there is a console.

    Raises:
        QuernError: none was trained on, or the two directions disagree.
    """
    lineage, run = IndexedRun(data_run), TrainingRun(train_run)
    for url in urls:
        for number in lineage.find(url=url).tolist():
            found = exposures(run, [(lineage, [number])])
            found = found.take(found.surviving)
            if len(found):
                break
        else:
            continue
        break
    else:
        raise QuernError(f"{train_run}: read none of the pages that it should have read")
    life, verdict = trace(lineage, number), clean(run, found)
    step = int(found.steps[0])
    read = read_step(run, step)
    documents = read.documents
    if number not in documents.numbers[documents.sequences == found.sequences[0]]:
        raise QuernError(f"{url}: exposed at step {step}, but the step's documents do not have it")
    names = lineage.documents(documents.numbers).urls
    if console is not None:
        _print_life(console, life)
        _print_exposure(console, found.steps.tolist(), verdict, run.reached)
        _print_step(console, step, int(found.sequences[0]), documents.sequences.tolist(), names)
    return {
        "url": url,
        "doc_id": life["doc_id"],
        "exposures": len(found),
        "steps": sorted(set(found.steps.tolist())),
        "last_clean": None if verdict.last is None else verdict.last.step,
        "step": step,
        "documents_of_the_step": len(names),
    }


def _rows(console: Console, rows: Iterable[tuple[str, object]]) -> None:
    for name, value in rows:
        console.print(f"  {name:<11}{plain(str(value))}", markup=False)


def _print_life(console: Console, life: dict[str, Any]) -> None:
    console.print("A URL's life: a page that spells out <|endoftext|>, which must never become the control token")
    record, span, text = life["record"], life["span"], life["text"]
    _rows(
        console,
        [
            ("url", life["url"]),
            ("record", f"{record['file']} at byte {record['offset']:,}"),
            ("document", f"{life['doc_id']}, {life['outcome']}"),
            ("tokens", f"{span['start']:,} to {span['start'] + span['length']:,} of {span['file']}"),
            ("begins", repr(text["text"][:_SHOWN_CHARS])),
        ],
    )


def _print_exposure(console: Console, steps: list[int], verdict: Any, complete: int) -> None:
    shown = ", ".join(f"{step:,}" for step in steps[:_SHOWN_STEPS])
    more = f" and {len(steps) - _SHOWN_STEPS:,} more" if len(steps) > _SHOWN_STEPS else ""
    seen = ", ".join(f"{checkpoint.step:,}" for checkpoint, _ in verdict.seen) or "none"
    rows = [
        ("read at", f"{shown}{more} of {complete:,} steps"),
        ("seen by", f"the checkpoints of steps {seen}"),
        ("last clean", "no checkpoint that is kept" if verdict.last is None else f"step {verdict.last.step:,}"),
    ]
    _rows(console, rows)
    console.print()


def _print_step(console: Console, step: int, place: int, sequences: list[int], urls: list[str | None]) -> None:
    console.print(
        f"And back: step {step:,} read parts of {len(urls):,} documents; those of its sequence {place} are of"
    )
    for sequence, url in zip(sequences, urls, strict=True):
        if sequence == place:
            console.print(f"  {plain(str(url))}", markup=False)
    console.print()
