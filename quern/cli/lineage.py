"""``quern lineage``: from a URL to every step that saw it, and from a step to its documents."""

from __future__ import annotations

import typer

from quern.cli.lineage_exposure import exposure
from quern.cli.lineage_forensics import forensics
from quern.cli.lineage_index import index
from quern.cli.lineage_match import match
from quern.cli.lineage_purge import purge
from quern.cli.lineage_show import show
from quern.cli.lineage_sql import sql
from quern.cli.lineage_step import step
from quern.cli.lineage_verify import verify

app = typer.Typer(help="From a URL to every step that saw it, and from a step to its documents.", no_args_is_help=True)
for command in (show, exposure, step, match, purge, verify, forensics, sql, index):
    app.command()(command)
