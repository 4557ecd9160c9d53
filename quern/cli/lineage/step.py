"""``quern lineage step``: the documents of one training step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from quern.cli.output import JSON, err_console, json_stdout, plain, plain_line, reports_errors, say
from quern.words import counted

__all__ = ["step"]

Row = dict[str, Any]


@reports_errors
def step(
    train_run: Annotated[str, typer.Argument(help="A training run.", metavar="TRAIN_RUN")],
    number: Annotated[int, typer.Argument(min=0, help="The model step; the first is 0.", metavar="STEP")],
    rank: Annotated[int | None, typer.Option(min=0, help="Only what this data-parallel rank computed.")] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            min=0, help="What this start of the trainer read at the step; 0 is the first, as in metrics.jsonl."
        ),
    ] = None,
    json: bool = JSON,
) -> None:
    """The documents of the batch that TRAIN_RUN read at STEP, sequence by sequence: where each stands in the global
    batch, who computed it, and which positions of it are input and target of which document. By default of the branch
    that the weights are on."""
    from quern.lineage.answers.opened import open_training_run
    from quern.lineage.answers.step import step_answer

    with json_stdout(json) as emit:
        run = open_training_run(train_run)
        answer = step_answer(run, number, rank=rank, attempt=attempt)
        if json:
            emit(answer | {"sequences": list(answer["sequences"])})
        else:
            _print(answer, run.source_names(run.attempts[answer["attempt"]]))
        for reason in answer["unknown_sources"].values():
            say(reason, err_console())


def _print(answer: Row, names: Mapping[str, str]) -> None:
    state = answer["state"].replace("unproven", "nobody knows whether it got that far")
    skipped = "" if answer["applied"] else ", its update skipped"
    where = plain(answer["train_run"])
    print(f"{where}: step {answer['step']}, attempt {answer['attempt']} ({answer['kind']}, {state}{skipped})")
    if answer["trained_in"] != answer["train_run"]:
        print(f"trained in {plain(answer['trained_in'])}, from which this run was forked later")
    print(
        f"data step {answer['data_step']}, {counted(answer['global_batch'], 'sequence')} "
        f"of {answer['seq_len']:,} tokens; positions count from 0"
    )
    for row in answer["sequences"]:
        who = "" if row["rank"] is None else f"  rank {row['rank']}, micro-batch {row['micro_batch']}"
        loss = "" if row["loss"] is None else f"  loss {row['loss']:.4f}"
        source = plain(names[row["source"]])
        print(f"\nsequence {row['place']}{who}  {source}, epoch {row['epoch']}, window {row['window']}{loss}")
        for rank, stretches in enumerate(row["computed"] or ()):
            print(f"  cp {rank} computed {', '.join(f'{first}–{stop - 1}' for first, stop in stretches)}")
        if row["data_run"] is None:
            print("  documents not known")
        for document in row["documents"]:
            note = "  (purged)" if document["purged"] else ""
            text = plain_line(document["name"]) if document["name"] is not None else "no url"
            print(f"  {_positions(document)}  {document['doc_id']}  {text}{note}")
    sys.stdout.flush()


def _positions(document: Row) -> str:
    """The positions at which a document is input, or else target."""
    found = document["inputs"]
    if found is None:
        start, stop = document["targets"]
        return f"{f'→ {start}–{stop - 1}':>14}"
    return f"{f'{found[0]}–{found[1] - 1}':>14}"
