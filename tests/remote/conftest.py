"""An S3 server with faults, and this process's clients of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest

from quern.remote.objects import Objects
from quern.remote.retry import Backoff
from support.remote import s3_server


@pytest.fixture
def server(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.Server]:
    """An empty bucket behind a proxy; this process's S3 clients talk to the proxy, and lose patience in seconds."""
    monkeypatch.setattr(sys.modules[Objects.__module__], "Backoff", partial(Backoff, base_s=0.01, cap_s=0.1))
    with s3_server.bucket(port) as server:
        more = {"QUERN_STORE_TIMEOUT_S": "5", "QUERN_STORE_PATIENCE_S": "20"}
        for name, value in server.environment(**more).items():
            monkeypatch.setenv(name, value)
        yield server
