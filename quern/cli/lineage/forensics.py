"""``quern lineage forensics``: traces a spike of loss or gradient norm to the documents of its step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from quern.cli.output import JSON, err_console, json_stdout, reports_errors, say
from quern.words import counted

__all__ = ["forensics"]

_SHOWN = 5
"""Documents and sequences that the terminal is shown; the page and --json have more."""
_TEXT_CHARS = 160


@reports_errors
def forensics(
    train_run: Annotated[str, typer.Argument(help="A training run.", metavar="TRAIN_RUN")],
    step: Annotated[int, typer.Argument(min=0, help="A step that the trainer recorded there.", metavar="STEP")],
    attempt: Annotated[
        int | None, typer.Option(min=0, help="The attempt, where several recorded the step; default: the newest.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(help="Where the page goes; default: beside what the trainer wrote.", metavar="FILE")
    ] = None,
    json: bool = JSON,
) -> None:
    """Explain a spike at a step: loss and gradient by layer, sequences by loss, and the documents that stand out.

    Finds the documents of what the trainer wrote to TRAIN_RUN/forensics, and writes an HTML page beside it.
    """
    from quern.lineage.answers.opened import open_training_run
    from quern.lineage.forensics.explain import explain
    from quern.lineage.forensics.page import render
    from quern.storage import publish_bytes

    with json_stdout(json) as emit:
        run = open_training_run(train_run)
        found = explain(run, step, attempt)
        path = html or f"{os.path.splitext(found['file'])[0]}.html"
        try:
            publish_bytes(path, render(found, run.path).encode())
        except OSError as error:
            if html is not None:
                raise
            written, note = None, f"{path}: cannot be written ({error.strerror}); give --html FILE for the page"
        else:
            written, note = path, f"page: {path}"
        emit(found | {"page": written})
        if not json:
            _print(found)
        say(note, err_console())


def _print(found: Mapping[str, Any]) -> None:
    lines = [*_head(found), *_steps(found["steps"]), *_layers(found["layers"])]
    lines += [*_documents(found), *_sequences(found)]
    lines += [f"not resolved: {why}" for why in found["unknown"].values()]
    lines.append("")
    for command in found["commands"]:
        lines += [f"# {command['what']}", f"  {command['command']}"]
    for line in lines:
        say(line)


def _number(value: float | None, form: str = ".4f") -> str:
    return "not finite" if value is None else format(value, form)


def _head(found: Mapping[str, Any]) -> list[str]:
    branch = "" if found["surviving"] else ", a branch that the run has left"
    reasons = ", ".join(reason.replace("_", " ") for reason in found["reasons"])
    return [
        f"step {found['step']:,} (data step {found['data_step']:,}, attempt {found['attempt']}{branch}): {reasons}; "
        f"{found['decision']}",
        *(f"  {line}" for line in found["findings"]),
    ]


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["", "      step      loss       z  gradient       z  sequences that stand out"]
    for row in rows:
        lines.append(
            f"{row['step']:10,} {_number(row['loss']):>9} {_number(row['loss_z'], '.1f'):>7} "
            f"{_number(row['grad_norm'], '.3f'):>9} {_number(row['grad_norm_z'], '.1f'):>7}  {row['out']:,} of "
            f"{row['sequences']:,}{'  skipped' if row['skipped'] else ''}"
        )
    return lines


def _layers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    top = sorted(rows, key=lambda row: -(float("inf") if row["norm"] is None else row["ratio"] or 0))[:_SHOWN]
    told = [
        f"{row['name']} {_number(row['norm'], '.3g')}"
        + (f" ({row['ratio']:.1f} × its median before)" if row["ratio"] is not None else "")
        for row in top
    ]
    return ["", f"gradient by layer: {', '.join(told)}"]


def _documents(found: Mapping[str, Any]) -> list[str]:
    from quern.lineage.forensics.cause import said_of

    lines, called = [], found["source_names"]
    for title, name in (("documents", "documents"), ("documents of the step before", "documents_before")):
        for number, row in enumerate(found[name][:_SHOWN], 1):
            if number == 1:
                lines += ["", f"{title}, by how far their loss is above what is usual for the source"]
            lines.append(f"{number:3}. {row['name'] or '(no url)'}  {row['doc_id']}")
            usual = "" if row["usual"] is None else f", usual {row['usual']:.3f}"
            z = "" if row["z"] is None else f", z {row['z']:.1f}"
            share = "" if row["share"] is None else f", {row['share']:.0%} of the loss above the usual"
            lines.append(
                f"     loss {_number(row['loss'], '.3f')}{usual}{z}{share}; {row['targets']:,} targets in "
                f"{counted(len(row['places']), 'sequence')} of {called.get(row['source'], row['stream'])}"
                + ("" if row["by"] == "its own targets" else " (by its sequences' loss)")
            )
            for repeat in row["repeats"][:3]:
                lines.append(f"     step {repeat['step']:,} had read {said_of(repeat)} already ({repeat['doc_id']})")
            if row["text"]:
                lines.append(f"     “{' '.join(row['text'].split())[:_TEXT_CHARS]}”")
    return lines


def _sequences(found: Mapping[str, Any]) -> list[str]:
    lines, called = ["", "sequences, the furthest out first"], found["source_names"]
    for row in found["sequences"][:_SHOWN]:
        names = ", ".join(own["name"] or own["doc_id"] for own in row["documents"][:2])
        more = f" and {row['num_documents'] - 2} more" if row["num_documents"] > 2 else ""
        lines.append(
            f"  place {row['place']:,}: loss {_number(row['loss'])}, z {_number(row['z'], '.1f')}, rank "
            f"{row['dp_rank']}, micro-batch {row['micro_batch']}, row {row['row']}; {called[row['source']]} "
            f"epoch {row['epoch']} window {row['window']:,}; {names}{more}"
        )
    return lines
