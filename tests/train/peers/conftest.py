"""Fixtures of tests of transfers between nodes' disks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.train.peer_case import Line, Node


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def node(tmp_path: Path, closing: contextlib.ExitStack) -> Callable[..., Node]:
    """Starts servers that end with the test."""
    return lambda root=tmp_path / "there", **settings: closing.enter_context(contextlib.closing(Node(root, **settings)))


@pytest.fixture
def there(node: Callable[..., Node]) -> Node:
    return node()


@pytest.fixture
def line(closing: contextlib.ExitStack) -> Callable[..., Line]:
    return lambda *arguments, **settings: closing.enter_context(contextlib.closing(Line(*arguments, **settings)))


@pytest.fixture(params=["send", "fetch"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]
