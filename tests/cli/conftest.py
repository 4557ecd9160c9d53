from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.checkpoint_commands import invoke


@pytest.fixture
def as_json(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What ``quern checkpoint ARGUMENTS --json`` writes to file descriptor 1: one document, without NaN."""

    def get(*arguments: Any, code: int = 0) -> Any:
        capfd.readouterr()
        invoke(*arguments, "--json", code=code)
        return json.loads(capfd.readouterr().out, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))

    return get
