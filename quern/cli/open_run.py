"""Opens a data run for the lineage commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from quern.cli.output import err_console, plain_line
from quern.data_pipeline.execution.run_directory import is_complete

if TYPE_CHECKING:
    from quern.lineage.store import IndexedRun

__all__ = ["note", "open_run"]


def open_run(run: str) -> IndexedRun:
    """A data run. What is not in an unfinished run yet is not found: a line on stderr says that it is not complete."""
    from quern.lineage.answers.opened import open_data_run
    from quern.lineage.sql.query import UNFINISHED

    opened = open_data_run(run)
    if not is_complete(run):
        note(f"{run}: {UNFINISHED}")
    return opened


def note(line: str) -> None:
    """A line on stderr beside the result."""
    err_console().print(Text(f"note: {plain_line(line)}"))
