"""``quern checkpoint``, called in this process."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from quern.cli.checkpoint import app
from quern.train.checkpoint.store import stored


def invoke(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def unreachable_store(monkeypatch: pytest.MonkeyPatch) -> str:
    """A store where nothing listens."""
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(stored, "PATIENCE_S", 0.0)
    return "s3://bucket/run"
