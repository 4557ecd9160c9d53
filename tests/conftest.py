"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("quern", deadline=None, print_blob=True)  # no test depends on how fast the machine is
settings.load_profile("quern")

ROOT = Path(__file__).resolve().parents[1]

# Workers take whole files (`--dist loadfile`): these would end alone if they were not begun first.
LONGEST = ("test_learns.py", "test_parity.py", "test_mutations.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which workers take them: the longest first, then those with the most tests."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONGEST, -tests[item.path], item.path))


def shared_folder() -> Path | None:
    """The corpus of real pages: beside the checkout, or where QUERN_SHARED points."""
    folder = Path(os.environ.get("QUERN_SHARED") or ROOT.parent / "shared")
    return folder if (folder / "data" / "README.md").exists() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = shared_folder()
    if folder is None:
        pytest.skip("the shared corpus of real pages is not beside this checkout")
    return folder


@pytest.fixture
def gpt2_ranks(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GPT-2 ranks file; tiktoken finds its own copy without a network."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tokenizer" / "tiktoken_cache"))
    return shared / "data" / "tokenizer" / "gpt2.tiktoken"
