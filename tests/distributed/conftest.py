"""Fixtures of the tests that need several ranks; makes the helpers beside them, and the oracles, importable."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAME = "quern_test_ranks"

HERE = Path(__file__).parent
sys.path += [str(HERE), *(str(HERE.parent / folder) for folder in ("plain", "mixtures", "train"))]


@pytest.fixture(scope="session")
def ranks() -> ModuleType:
    """``ranks.py``, loaded by its path: tests are on no import path."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name("ranks.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]


@pytest.fixture(scope="session")
def run_ranks(ranks: ModuleType) -> Callable[..., list[Any]]:
    """``run_ranks(function, world, *args, timeout_s=60)``: what the function returned on each rank."""
    return ranks.run_ranks
