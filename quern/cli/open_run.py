"""Opens a data run for the lineage commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from quern.cli.output import err_console, plain_line
from quern.data_pipeline.execution.run_directory import is_complete

if TYPE_CHECKING:
    from quern.lineage.store import IndexedRun
    from quern.lineage.training import TrainingRun

__all__ = ["note", "open_run", "open_training"]


def open_run(run: str) -> IndexedRun:
    """A data run. What is not in an unfinished run yet is not found: a line on stderr says that it is not complete."""
    from quern.lineage.answers.opened import open_data_run
    from quern.lineage.sql.query import UNFINISHED

    opened = open_data_run(run)
    if not is_complete(run):
        note(f"{run}: {UNFINISHED}")
    return opened


def open_training(path: str) -> TrainingRun:
    """The training run in a folder."""
    from quern.lineage.answers.opened import open_training_run

    return open_training_run(path)


def note(line: str) -> None:
    """A line on stderr beside the result."""
    err_console().print(Text(f"note: {plain_line(line)}"))
