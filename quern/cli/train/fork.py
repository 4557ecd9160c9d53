"""``quern train fork``: starts a new run from a checkpoint of another one."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from quern.cli.output import JSON, json_stdout, reports_errors

__all__ = ["fork"]


@reports_errors
def fork(
    run: Annotated[str, typer.Argument(help="The training run to fork.", metavar="RUN")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value of the fork's config.")] = None,
    at: Annotated[int, typer.Option("--at", min=0, help="The step of one of its checkpoints.")] = ...,  # type: ignore[assignment]
    to: Annotated[str, typer.Option("--to", help="The new run's folder.")] = ...,  # type: ignore[assignment]
    json: bool = JSON,
) -> None:
    """Make a new run that continues from RUN's checkpoint after --at steps: weights, moments, data order and
    ledger are RUN's, and the config is that under which the checkpoint was saved, but for key=value. Each key in which
    it differs from that of RUN's last start is printed. RUN stays as it is. Files are copied, and their checksums
    compared.
    """
    from quern.train.fork import fork as make

    made = make(run, at, to, overrides or ())
    with json_stdout(json) as emit:
        emit(asdict(made))
        if not json:
            print(f"{made.folder}: a run of its own, {made.run}, from step {made.step} of {made.trunk}")
            for line in made.config:
                print(line)
            print(f"quern train {shlex.quote(made.folder + '/config.yaml')}")
