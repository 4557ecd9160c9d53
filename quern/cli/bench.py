"""``quern bench``: the trainer's tokens per second, MFU and memory, by model, layout and precision."""

from __future__ import annotations

import sys

import typer

from quern.cli.output import reports_errors
from quern.train.__main__ import leave
from quern.train.bench.__main__ import main

__all__ = ["CONTEXT", "bench"]

#: The options are read by what ``torchrun … -m quern.train.bench`` reads them with, so that both take the same.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@reports_errors
def bench(context: typer.Context) -> None:
    """Measure the trainer over random tokens: tokens a second, MFU, step time, memory; one row per combination."""
    try:
        code = main(context.args)
    except KeyboardInterrupt:  # nothing goes on where it was
        print("interrupted", file=sys.stderr)
        code = 130
    leave(code)
