"""Fixtures of the tests that need several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from support.distributed import ranks as module


@pytest.fixture(scope="session")
def ranks() -> ModuleType:
    return module


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks(function, world, *args, timeout_s=60)``: what the function returned on each rank."""
    return module.run_ranks


@pytest.fixture(scope="module")
def kept_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``kept_ranks(function, world, *args)``: the same in ranks that stay to the end of the module."""
    with module.KeptRanks() as kept:
        yield kept
