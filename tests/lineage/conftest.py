"""Runs: with what their index answers, for the tests that break either; and with what was written, as ARGUMENTS say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quern.lineage.store import IndexedRun
from support.lineage import runs
from support.lineage.index_case import answers, open_run


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 240 documents without an index; to be copied."""
    folder: Path = runs.write_run(tmp_path_factory.mktemp("index") / "run", seed=4, documents=240, files=6)
    return folder


@pytest.fixture(scope="session")
def expected(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the index of that run answers."""
    copy = tmp_path_factory.mktemp("expected") / "run"
    shutil.copytree(pristine, copy)
    found: dict[str, Any] = answers(open_run(copy))
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> runs.Listing:
    """What is written for the module's ARGUMENTS."""
    return runs.listing(**request.module.ARGUMENTS)


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """In a folder that is a glob, a quotation and a partition of Hive all at once."""
    return str(runs.write_run(tmp_path_factory.mktemp("run") / "a[b]c=1 'd\" *", **request.module.ARGUMENTS))


@pytest.fixture(scope="module")
def lineage(run: str) -> IndexedRun:
    return IndexedRun(run)
