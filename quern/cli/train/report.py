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
    json: bool = JSON,
) -> None:
    """Write one HTML page about RUN that needs no network: loss, held-out loss, spikes, skips, restarts, rollbacks and
    checkpoints, learning rate, gradient norm, tokens by source, throughput, memory, and where the time went.
    """
    from quern.train.report import write_report

    path = write_report(run, out, beside)
    with json_stdout(json) as emit:
        emit({"page": path})
        if not json:
            print(plain_line(path))
