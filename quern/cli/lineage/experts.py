"""``quern lineage experts``: the experts that a document chose."""

from __future__ import annotations

from typing import Annotated

import typer

from quern.cli.output import JSON, json_stdout, reports_errors, say

__all__ = ["experts"]


@reports_errors
def experts(
    train_run: Annotated[str, typer.Argument(help="A training run of a model with experts.", metavar="TRAIN_RUN")],
    step: Annotated[int, typer.Argument(min=0, help="A step that the trainer recorded there.", metavar="STEP")],
    doc: Annotated[str | None, typer.Option(help="A doc_id; default: those of the highest loss.")] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="The attempt, where several recorded the step; default: the newest.")
    ] = None,
    json: bool = JSON,
) -> None:
    """The experts that documents of a recorded step chose most in each layer, with the share of the document's tokens
    that chose them and, in brackets, that of all tokens of the batch."""
    from quern.lineage.answers.opened import open_training_run
    from quern.lineage.forensics.experts import experts_of

    with json_stdout(json) as emit:
        found = experts_of(open_training_run(train_run), step, doc, attempt)
        emit(found)
        for row in () if json else found["documents"]:
            whose = "" if row["alone"] else "; counted with all of its sequence"
            where = f"step {row['step']:,}, place {row['place']:,}, {row['tokens']:,} tokens from {row['start']:,} on"
            lines = [f"{row['name'] or '(no url)'}  {row['doc_id']}", f"  {where}{whose}"]
            for own in row["layers"]:
                shares = (f"{e['expert']} {e['share']:.0%} ({e['batch']:.0%})" for e in own["experts"])
                lines.append(f"  layer {own['layer']}: {', '.join(shares)}")
            for line in lines:
                say(line)
