"""A data run, and the ranks of its encoding."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from support.lineage import runs


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of held-out and other documents, some of them purged; not to be changed."""
    folder: Path = runs.write_run(tmp_path_factory.mktemp("exchange") / "run", documents=260)
    return folder


@pytest.fixture(scope="session")
def listing() -> object:
    """What stands in that run."""
    return runs.listing(documents=260)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bytes, and an EOT, 256."""
    path = tmp_path_factory.mktemp("ranks") / "bytes.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(bytes([n])), n) for n in range(256)))
    return str(path)
