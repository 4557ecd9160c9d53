"""``quern train report``: writes a training run's page."""

from __future__ import annotations

from typing import Annotated

import typer

from quern.cli.output import JSON, json_stdout, plain_line, reports_errors

__all__ = ["report"]


@reports_errors
def report(
    run: Annotated[str, typer.Argument(help="The folder of a training run, also while it runs.", metavar="RUN")],
    out: Annotated[str | None, typer.Option("--out", help="Where the page goes, by default RUN/report.html.")] = None,
    beside: Annotated[
        str | None, typer.Option("--beside", help="Another run, on the same axes.", metavar="OTHER_RUN")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Plan the run on a profile, as h100, or a YAML file of one; by default that of its GPUs."),
    ] = None,
    json: bool = JSON,
) -> None:
    """Write one HTML page about RUN that needs no network: loss, held-out loss, spikes, skips, restarts, rollbacks and
    checkpoints, learning rate, gradient norm, tokens by source, throughput, memory, what was planned of them, and where
    the time went.
    """
    from quern.train.report import write_report
    from quern.train.summary import plan_of

    path = write_report(run, out, beside, lambda own, tokens: plan_of(own, tokens, gpu))
    with json_stdout(json) as emit:
        emit({"page": path})
        if not json:
            print(plain_line(path))
