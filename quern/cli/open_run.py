"""Opens a data run for the lineage commands."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.text import Text

from quern import storage
from quern.cli.output import err_console, plain_line
from quern.data_pipeline.execution.run_directory import is_complete

if TYPE_CHECKING:
    from quern.lineage.store import Lineage
    from quern.lineage.training import TrainingRun

__all__ = ["note", "open_run", "open_training"]


def open_run(run: str) -> Lineage:
    """``run``, in which a purge that was cut off is finished or undone first, if it can be written to. What is not in
    an unfinished run yet is not found: a line on stderr says that it is not complete."""
    from quern.lineage.sql.query import UNFINISHED
    from quern.lineage.store import Lineage

    _finish_purge(run)
    lineage = Lineage(run)
    if not is_complete(run):
        note(f"{run}: {UNFINISHED}")
    return lineage


def open_training(path: str) -> TrainingRun:
    """The training run in a folder; :func:`open_run` says what happens in the data runs that it read."""
    from quern.lineage.training import TrainingRun

    train = TrainingRun(path)
    folders = {folder for attempt in train.attempts for folder in attempt.paths.values()}
    for run in sorted({os.path.dirname(os.path.dirname(folder)) for folder in folders} - {""}):
        _finish_purge(run)
    return train


def _finish_purge(run: str) -> None:
    from quern.lineage.purge.record import journal

    if storage.is_local(run) and journal.is_under_way(run):
        from quern.lineage.purge.apply.transaction import take_up

        take_up(run)


def note(line: str) -> None:
    """A line on stderr beside the result."""
    err_console().print(Text(f"note: {plain_line(line)}"))
