"""A purged run in full, for the tests of its proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.purge import purge_case as P


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> P.Case:
    """Before it was purged; the run of :func:`whole` is a copy."""
    return P.make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def whole(made: P.Case, tmp_path_factory: pytest.TempPathFactory) -> P.Case:
    folder = tmp_path_factory.mktemp("verify")
    train = folder / "train" / "forensics"
    train.mkdir(parents=True)
    (train / "step_00000001.html").write_text(f'<p class="text" data-doc="{"ab" * 16}">another text</p>')
    case = P.purge(made.at(folder), train_runs=("train",))
    return case


@pytest.fixture
def case(whole: P.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> P.Case:
    """The run, purged; its training run and its purge list are named relative to the working folder."""
    found = whole.at(tmp_path)
    monkeypatch.chdir(tmp_path)
    return found
