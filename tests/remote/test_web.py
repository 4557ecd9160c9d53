"""Files of a web server, read by ranges."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial

import pytest

from quern import storage
from quern.remote.objects import Objects
from quern.remote.retry import Backoff, ChangedError, StoreError
from support.remote import web_server
from support.remote.web_server import Fault, Web

OFTEN = 10**6


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("QUERN_STORE_TIMEOUT_S", "5")
    monkeypatch.setenv("QUERN_STORE_PATIENCE_S", "20")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(sys.modules[Objects.__module__], "Backoff", partial(Backoff, base_s=0.05, cap_s=0.5))
    with web_server.serve() as web:
        web.files["big"] = random.Random(1).randbytes(3 << 20)
        yield web


@pytest.mark.slow
@pytest.mark.parametrize("what", ["cut", "503", "429", "hang up", "slow"])
def test_a_file_is_read_whatever_happens_on_the_way(web: Web, what: str) -> None:
    web.faults = [Fault(what, "GET", "big", 4), Fault(what, "HEAD", "big", 1)]
    with storage.open_read(f"{web.url}/big") as file:
        assert file.read() == web.files["big"]
    assert web.struck(what) >= 4
    assert storage.describe([f"{web.url}/big"])[0][0] == 3 << 20


def test_nothing_is_read_but_what_is_asked_for(web: Web) -> None:
    with storage.open_read(f"{web.url}/big") as file:
        file.seek(1 << 20)
        assert file.read(100) == web.files["big"][1 << 20 :][:100]
    sizes = [web.files["big"][int(r[6:].split("-")[0]) : int(r.split("-")[1]) + 1] for _, _, r, _ in web.seen]
    assert sum(map(len, sizes)) < 1 << 18


def test_of_a_server_that_says_no_length_a_range_says_it(web: Web) -> None:
    web.lengths = False
    assert storage.describe([f"{web.url}/big"])[0][0] == 3 << 20
    assert [(method, ranged) for method, _, ranged, _ in web.seen] == [("HEAD", ""), ("GET", "bytes=0-0")]
    with storage.open_read(f"{web.url}/big") as file:
        file.seek(-10, 2)
        assert file.read() == web.files["big"][-10:]


def test_what_is_compressed_stays_so(web: Web) -> None:
    web.files["x.gz"] = b"\x1f\x8b\x08 no more than its beginning"
    assert storage.read_bytes(f"{web.url}/x.gz") == web.files["x.gz"]


@pytest.mark.parametrize("etags", [True, False])
def test_a_file_that_changes_is_an_error(web: Web, etags: bool) -> None:
    web.etags = etags
    with storage.open_read(f"{web.url}/big") as file:
        file.read(10)
        web.files["big"] += b"more"
        with pytest.raises(ChangedError, match="big: "):
            file.read()


def test_without_an_etag_a_file_of_the_same_size_is_told_by_its_date(web: Web) -> None:
    web.etags, web.modified = False, "Wed, 01 Jul 2026 10:00:00 GMT"
    with storage.open_read(f"{web.url}/big") as file:
        file.read(10)
        web.files["big"], web.modified = bytes(len(web.files["big"])), "Wed, 01 Jul 2026 10:00:01 GMT"
        with pytest.raises(ChangedError, match="big: changed while it was read"):
            file.read()


def test_a_server_without_ranges_is_told_when_it_is_cut(web: Web) -> None:
    web.ranges = False
    assert storage.read_bytes(f"{web.url}/big") == web.files["big"]
    web.faults = [Fault("cut")]
    with pytest.raises(StoreError, match="sends no ranges; copy the file first"):
        storage.read_bytes(f"{web.url}/big")


def test_the_pause_a_server_asks_for_is_made(web: Web) -> None:
    slept: list[float] = []
    store = Objects(web.url, Backoff(sleep=slept.append, random=lambda: 1.0), 5.0, 4)
    date = formatdate(time.time() + 50, usegmt=True)
    web.faults = [Fault("503", retry_after="7"), Fault("429", retry_after=date), Fault("503", retry_after="soon")]
    assert store.read(f"{web.url}/big") == web.files["big"]
    assert slept[0] == 7 + 0.5 / 2
    assert 45 < slept[1] < 52
    assert slept[2] == 2.0  # a text that says nothing: the usual delay
    web.faults = [Fault("503", retry_after="999999")]
    store.read(f"{web.url}/big")
    assert slept[3] == 120 + 0.5 / 2


def test_what_is_forbidden_is_one_error_at_once(web: Web) -> None:
    web.faults = [Fault("403", times=OFTEN)]
    with pytest.raises(StoreError, match=rf"{web.url}/big: .*403.*") as caught:
        storage.read_bytes(f"{web.url}/big")
    assert "\n" not in str(caught.value)
    assert web.count("GET") <= 2
    web.faults = []
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(f"{web.url}/absent")
