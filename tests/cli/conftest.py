from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from click.testing import Result

from support.checkpoint_commands import invoke


@pytest.fixture
def json_of(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What ``call(ARGUMENTS, "--json")`` writes to file descriptor 1: one document, without NaN."""

    def read(call: Callable[..., Result], *arguments: Any, **named: Any) -> Any:
        capfd.readouterr()
        result = call(*arguments, "--json", **named)
        assert result.exit_code == named.get("code", 0), result.output
        return json.loads(capfd.readouterr().out, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))

    return read


@pytest.fixture
def as_json(json_of: Callable[..., Any]) -> Callable[..., Any]:
    """What ``quern checkpoint ARGUMENTS --json`` writes."""
    return partial(json_of, invoke)
