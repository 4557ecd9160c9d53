"""Python programs, and ranks, that import these helpers too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def environment(**more: str) -> dict[str, str]:
    """For a program that imports ``support``, and ``quern`` from this checkout."""
    path = [str(TESTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def files_of(function: Callable[..., Any]) -> dict[str, str]:
    """``LocalRanks(files=…)`` for a function: its module by its path, but for these helpers, which ranks can import."""
    module = function.__module__
    return {} if module.partition(".")[0] == "support" else {module: function.__code__.co_filename}
