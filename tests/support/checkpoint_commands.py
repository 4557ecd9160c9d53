"""``quern checkpoint``, called in this process."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from quern.cli.checkpoint import app


def invoke(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
