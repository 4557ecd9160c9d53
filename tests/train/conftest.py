"""Fixtures of the trainer's tests."""

from __future__ import annotations

import sys

import pytest

from support.programs import python


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that quern starts, such as the one that moves checkpoints, are forked."""
    monkeypatch.setattr(sys, "executable", python())
