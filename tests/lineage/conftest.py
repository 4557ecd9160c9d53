"""Makes the helpers beside these tests importable: pytest's importlib mode leaves ``sys.path`` alone. And a run with
what its index answers, for the tests that break either."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 240 documents without an index; to be copied."""
    import runs

    folder: Path = runs.write_run(tmp_path_factory.mktemp("index") / "run", seed=4, documents=240, files=6)
    return folder


@pytest.fixture(scope="session")
def expected(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the index of that run answers."""
    from index_case import answers, open_run

    copy = tmp_path_factory.mktemp("expected") / "run"
    shutil.copytree(pristine, copy)
    found: dict[str, Any] = answers(open_run(copy))
    return found
