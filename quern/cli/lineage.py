"""``quern lineage``: from a URL to every step that saw it, and from a step to its documents."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="From a URL to every step that saw it, and from a step to its documents.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    pass
