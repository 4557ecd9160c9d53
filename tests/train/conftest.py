"""Fixtures of the trainer's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quern.train.checkpoint.tiers.upload import Uploader
from support.programs import python
from support.remote import s3_server


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that quern starts, such as the one that moves checkpoints, are forked."""
    monkeypatch.setattr(sys, "executable", python())


@pytest.fixture
def uploaders(forked_children: None) -> Iterator[Callable[..., Uploader]]:
    """Starts uploaders, and ends them with the test."""
    started = []

    def start(url: str, **options: Any) -> Uploader:
        started.append(Uploader(url, **({"retry_after_s": 0.3} | options)))
        return started[-1]

    yield start
    for uploader in started:
        uploader.close()


@pytest.fixture
def server(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.Server]:
    """An empty bucket behind a proxy that breaks things; this process's S3 clients talk to the proxy."""
    with s3_server.bucket(port) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A data run."""
    from support.train.run_case import write_corpus  # imports torch, which most of these tests do, but not all

    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run over a data run of which some documents are to be purged (``purge_case.Trained``)."""
    from support.lineage import runs
    from support.train import purge_case

    data = runs.write_run(tmp_path_factory.mktemp("data") / "run", documents=200, files=2)
    return purge_case.train(data, tmp_path_factory.mktemp("trained") / "run", {})
