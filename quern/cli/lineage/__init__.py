"""``quern lineage``: from a URL to every step that saw it, and from a step to its documents."""

from __future__ import annotations

import typer

from quern.cli.lineage import experts, exposure, forensics, index, match, purge, show, sql, step, verify

app = typer.Typer(
    help="Trace a URL to every training step that read it, and a step to its documents.", no_args_is_help=True
)
for command in (
    show.show, exposure.exposure, step.step, match.match, purge.purge, verify.verify, forensics.forensics, sql.sql,
    index.index, experts.experts,
):  # fmt: skip
    app.command()(command)
