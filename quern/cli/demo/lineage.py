"""The lineage part of the demo: a URL's history, the training steps that read it, and the documents of one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from quern.cli.output import plain
from quern.errors import QuernError
from quern.lineage.exposure import clean, exposures
from quern.lineage.steps import read_step
from quern.lineage.store import IndexedRun
from quern.lineage.trace import trace
from quern.lineage.training import TrainingRun

__all__ = ["print_rows", "walk_lineage"]

_SHOWN_STEPS = 6
_SHOWN_CHARS = 70


def walk_lineage(data_run: str, train_run: str, urls: Iterable[str], console: Console) -> dict[str, Any]:
    """Walk the first of ``urls`` that the run trained on from its record to the steps that read it, and one of these
    steps back to its documents; prints and returns what was found.

    Raises:
        QuernError: none was trained on, or the two directions disagree.
    """
    lineage, run = IndexedRun(data_run), TrainingRun(train_run)
    for number in (number for url in urls for number in lineage.find(url=url).tolist()):
        found = exposures(run, [(lineage, [number])])
        found = found.take(found.surviving)
        if len(found):
            break
    else:
        raise QuernError(f"{train_run}: read none of the pages that it should have read")
    life, verdict = trace(lineage, number), clean(run, found)
    step, sequence = int(found.steps[0]), int(found.sequences[0])
    documents = read_step(run, step).documents
    of_sequence = documents.numbers[documents.sequences == sequence]
    if number not in of_sequence:
        raise QuernError(f"{life['url']}: exposed at step {step}, but the step's documents do not have it")
    record, span = life["record"], life["span"]
    console.print("A URL's life: a page that spells out <|endoftext|>, which must never become the control token")
    rows = {
        "url": life["url"],
        "record": f"{record['file']} at byte {record['offset']:,}",
        "document": f"{life['doc_id']}, {life['outcome']}",
        "tokens": f"{span['start']:,} to {span['start'] + span['length']:,} of {span['file']}",
        "begins": repr(life["text"]["text"][:_SHOWN_CHARS]),
    }
    print_rows(console, rows)
    _print_exposure(console, found.steps.tolist(), verdict, run.reached)
    count = len(documents.numbers)
    console.print(f"And back: step {step:,} read parts of {count:,} documents; those of its sequence {sequence} are of")
    for name in lineage.documents(of_sequence).urls:
        console.print(f"  {plain(str(name))}", markup=False)
    console.print()
    return {
        "url": life["url"], "doc_id": life["doc_id"], "exposures": len(found),
        "steps": sorted(set(found.steps.tolist())),
        "last_clean": None if verdict.last is None else verdict.last.step, "step": step,
        "documents_of_the_step": count,
    }  # fmt: skip


def print_rows(console: Console, rows: Mapping[str, object]) -> None:
    """A line each: its name, and what it says, made safe for a terminal."""
    for name, value in rows.items():
        console.print(f"  {name:<11}{plain(str(value))}", markup=False)


def _print_exposure(console: Console, steps: list[int], verdict: Any, complete: int) -> None:
    shown = ", ".join(f"{step:,}" for step in steps[:_SHOWN_STEPS])
    more = f" and {len(steps) - _SHOWN_STEPS:,} more" if len(steps) > _SHOWN_STEPS else ""
    seen = ", ".join(f"{checkpoint.step:,}" for checkpoint, _ in verdict.seen) or "none"
    rows = {
        "read at": f"{shown}{more} of {complete:,} steps",
        "seen by": f"the checkpoints of steps {seen}",
        "last clean": "no checkpoint that is kept" if verdict.last is None else f"step {verdict.last.step:,}",
    }
    print_rows(console, rows)
    console.print()
