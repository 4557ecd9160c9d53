"""The mirror of a node's files on another node's disk, by the process that also serves stores.

The other node is a real server on loopback; what is on its disk is looked at with plain files.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from quern.errors import InputError
from quern.remote.retry import Backoff, StoreError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.mirror.peer_store import PeerStore
from quern.train.checkpoint.store.errors import SourceError
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.tiers import mover as mover_module
from quern.train.checkpoint.tiers.mover import Mover
from quern.train.checkpoint.tiers.target import open_target
from quern.train.checkpoint.tiers.upload import Cancelled, Died, Failed, Uploaded, Uploader
from support.train.peer_case import MIB, TOKEN, Node, content, record_of, tree
from support.train.uploader_case import heard

LIMIT_S = 120  # a wait of a test


def write(folder: Path, files: dict[str, bytes]) -> dict[str, FileRecord]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: record_of(data) for name, data in files.items()}


@pytest.fixture
def node(tmp_path):
    """Another node: its disk, and the server over it."""
    with contextlib.closing(Node(tmp_path / "there")) as node:
        yield node


@pytest.fixture
def start(uploaders):
    return partial(uploaders, environment={"QUERN_PEER_TOKEN": TOKEN})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_files_are_mirrored_and_what_stands_there_is_not_sent_again(node, start, tmp_path):
    files = {"__0_0.distcp": content(2 * MIB + 5), "__1_0.distcp": b"", "__1_1.distcp": content(7, 2)}
    records = write(tmp_path / "here", files)
    uploader = start(node.url)
    uploader.upload(10, str(tmp_path / "here"), records)
    (done,) = heard(uploader, Uploaded)
    assert (done.step, done.last, done.num_bytes) == (10, False, 2 * MIB + 12)
    assert tree(node.root) == {f"step_00000010/{name}": data for name, data in files.items()}
    (node.root / "step_00000010" / "__1_1.distcp").write_bytes(content(7, 3))
    uploader.upload(10, str(tmp_path / "here"), records)
    (done,) = heard(uploader, Uploaded)
    assert done.num_bytes == 7
    assert tree(node.root) == {f"step_00000010/{name}": data for name, data in files.items()}
    assert uploader.unfinished == []


def test_an_address_of_ipv6(tmp_path):
    with contextlib.closing(Node(tmp_path / "there", host="::1")) as node:
        records = write(tmp_path / "here", {"a": b"data"})
        PeerStore(node.url, TOKEN).put(10, "a", str(tmp_path / "here" / "a"), records["a"])
        assert tree(node.root) == {"step_00000010/a": b"data"}


def test_the_token_is_seen_by_nobody_else(node, start, monkeypatch):
    uploader = start(node.url)
    assert TOKEN not in " ".join(psutil.Process(uploader.pid).cmdline())
    assert TOKEN not in repr(uploader)

    class EndedError(Exception):
        pass

    def end(status: int) -> None:
        raise EndedError

    monkeypatch.setenv("QUERN_PEER_TOKEN", TOKEN)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr(mover_module.os, "_exit", end)
    with pytest.raises(EndedError):
        mover_module.main([node.url])
    assert "QUERN_PEER_TOKEN" not in os.environ


@pytest.mark.slow
def test_a_node_that_comes_back_gets_its_files(start, tmp_path):
    port = free_port()
    records = write(tmp_path / "here", {"a": content(1000)})
    uploader = start(f"peer://127.0.0.1:{port}", retry_after_s=0.2)
    uploader.upload(10, str(tmp_path / "here"), records)
    (failed,) = heard(uploader, Failed)
    assert (failed.step, failed.permanent, failed.dropped) == (10, False, False)
    assert f"127.0.0.1:{port}: step_00000010/a: given up after" in failed.why
    assert uploader.unfinished == [(10, False)]
    with contextlib.closing(Node(tmp_path / "there", port=port)) as node:
        heard(uploader, Uploaded)
        assert tree(node.root) == {"step_00000010/a": content(1000)}


def test_rotten_and_pruned_files_are_dropped_and_others_go_on(node, start, tmp_path):
    for step in (10, 20, 30):
        write(tmp_path / f"{step}", {"a": content(5000, step)})
    rotten = bytearray(content(5000, 30))
    rotten[7] ^= 1
    (tmp_path / "30" / "a").write_bytes(rotten)
    (tmp_path / "20" / "a").unlink()
    (tmp_path / "20").rmdir()
    uploader = start(node.url)
    for step in (30, 20, 10):
        uploader.upload(step, str(tmp_path / f"{step}"), {"a": record_of(content(5000, step))})
    *failed, done = heard(uploader, Uploaded)
    assert done.step == 10
    assert {event.step: (event.permanent, event.dropped) for event in failed} == dict.fromkeys((20, 30), (True, True))
    why = {event.step: event.why for event in failed}
    assert why[20] == f"{tmp_path}/20: is no longer there; a was not moved and never will be"
    assert why[30].startswith(f"{tmp_path}/30/a: expected SHA-256 {record_of(content(5000, 30)).sha256}, has another")
    assert tree(node.root) == {"step_00000010/a": content(5000, 10)}
    assert uploader.unfinished == []


@pytest.mark.parametrize(
    ("there", "message"),
    [(b"longer than it was", "expected 4 bytes, has 18"), (b"dat", "expected 4 bytes, has 3"),
     (b"dota", "expected SHA-256"), (None, "no such file")],
)  # fmt: skip
def test_local_files_that_are_not_what_was_saved(node, tmp_path, there, message):
    path = tmp_path / "a"
    if there is not None:
        path.write_bytes(there)
    with pytest.raises(SourceError, match=rf"^{path}: {message}.*; not mirrored$"):
        PeerStore(node.url, TOKEN).put(10, "a", str(path), record_of(b"data"))
    assert tree(node.root) == {}


def test_a_node_that_refuses_may_take_it_later(node, tmp_path):
    """Nothing that another node answers makes the mirror be given up for good."""
    records = write(tmp_path, {"a": b"data"})
    with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{node.port}: step_00000010/a: answered 401") as caught:
        PeerStore(node.url, "0" * 64).put(10, "a", str(tmp_path / "a"), records["a"])
    assert caught.value.transient


def test_the_bandwidth_is_asked_for_every_byte_before_it_goes(node, tmp_path):
    data = content(3 * MIB + 5)
    records = write(tmp_path / "here", {"a": data})
    told = []

    class Slow:
        def take(self, n):
            told.append(("asked", n))

    put = PeerStore(node.url, TOKEN).put
    put(10, "a", str(tmp_path / "here" / "a"), records["a"], Slow(), lambda n: told.append(("told", n)))
    assert told == [(what, n) for n in (MIB, MIB, MIB, 5) for what in ("told", "asked")]
    assert tree(node.root) == {"step_00000010/a": data}


def test_manifests_are_not_mirrored(node, start, tmp_path):
    records = write(tmp_path / "here", {"a": b"data", "manifest.json": b"{}"})
    manifest = {"manifest.json": records.pop("manifest.json")}
    path = str(tmp_path / "here" / "manifest.json")
    with pytest.raises(InputError, match=r"manifest\.json: a node's disk keeps no manifests"):
        PeerStore(node.url, TOKEN).put(10, "manifest.json", path, manifest["manifest.json"])
    uploader = start(node.url)
    with pytest.raises(InputError, match=rf"{node.url}: manifest\.json: another node's disk keeps no manifests"):
        uploader.upload(10, str(tmp_path / "here"), records, manifest)
    assert uploader.unfinished == []
    said: list = []
    mover = Mover(lambda pause: PeerStore(node.url, TOKEN), said.append)
    plain = [{name: vars(found) for name, found in of.items()} for of in (records, manifest)]
    asked = {"number": 1, "step": 10, "folder": str(tmp_path / "here"), "files": plain[0], "last": plain[1]}
    mover.tell({"upload": asked})
    mover.work()
    assert [(answer["failed"], answer["dropped"]) for answer in said] == [(10, True)]
    assert tree(node.root) == {}


def request(folder: Path, records: dict[str, FileRecord], step: int = 10) -> dict[str, Any]:
    plain = {name: vars(found) for name, found in records.items()}
    return {"upload": {"number": step, "step": step, "folder": str(folder), "files": plain, "last": None}}


def test_a_transfer_is_cancelled_within_a_chunk(node, tmp_path):
    records = write(tmp_path / "here", {"a": content(8 * MIB)})
    said: list = []
    taken: list[int] = []

    class Limit:
        def take(self, n: int) -> None:
            taken.append(n)
            if len(taken) == 3:
                mover.tell({"cancel": 10})

    mover = Mover(
        lambda pause: PeerStore(node.url, TOKEN, sleep=pause), said.append, limit=lambda pause: Limit()
    )  # fmt: skip
    mover.tell(request(tmp_path / "here", records))
    mover.work()
    assert said == [{"cancelled": 10}]
    assert taken == [MIB] * 3
    assert "step_00000010/a" not in tree(node.root)
    mover.tell(request(tmp_path / "here", records))
    mover.work()
    assert said[1]["uploaded"] == 10
    assert tree(node.root) == {"step_00000010/a": content(8 * MIB)}


def test_a_wait_between_attempts_is_cancelled(tmp_path):
    records = write(tmp_path / "here", {"a": b"data"})
    said: list = []
    waits = []

    def connect(pause):
        def wait(seconds: float) -> None:
            waits.append(seconds)
            mover.tell({"cancel": 10})
            pause(3600.0)

        return open_target(f"peer://127.0.0.1:{free_port()}", token=TOKEN, backoff=Backoff(sleep=wait))

    mover = Mover(connect, said.append)
    mover.tell(request(tmp_path / "here", records))
    mover.work()
    assert said == [{"cancelled": 10}]
    assert len(waits) == 1


def test_a_process_that_died_goes_on_with_its_mirror(node, start, tmp_path):
    records = write(tmp_path / "here", {"a": content(MIB)})
    uploader = start(node.url, bytes_per_s=1000.0)  # the first chunk leaves a debt of a quarter of an hour
    uploader.upload(10, str(tmp_path / "here"), records)
    psutil.Process(uploader.pid).kill()
    heard(uploader, Died)
    assert uploader.unfinished == [(10, False)]
    uploader.cancel(10)
    assert heard(uploader, Cancelled) == [Cancelled(10)]
    assert uploader.unfinished == []


@pytest.mark.parametrize(
    "url",
    ["peer:", "peer://", "peer://host", "peer://host:", "peer://:80", "peer://host:0", "peer://host:65536",
     "peer://host:80/", "peer://host:80/a", "peer://user@host:80", "peer://::1:80", "peer://[::1]", "peer://[host]:80",
     "peer:host:80", "peer://ho st:80", "peer://host:80\n", "peer://host:-1"],
)  # fmt: skip
def test_addresses_that_are_none(url):
    with pytest.raises(InputError, match="expected a node as peer://HOST:PORT"):
        Uploader(url, environment={"QUERN_PEER_TOKEN": TOKEN})


@pytest.mark.parametrize("token", ["", "5ec2", "g" * 64, TOKEN + "0", TOKEN + "\n"])
def test_tokens_that_are_none(token, monkeypatch):
    monkeypatch.delenv("QUERN_PEER_TOKEN", raising=False)
    with pytest.raises(InputError, match=r"^peer://host:80: token: expected 64 hex digits$"):
        Uploader("peer://host:80", environment={"QUERN_PEER_TOKEN": token} if token else None)


def test_what_an_address_opens(tmp_path):
    found = open_target("peer://node-7.cluster:4711", token=TOKEN, timeout_s=7.0)
    assert isinstance(found, PeerStore)
    assert (found._peer.host, found._peer.port, found._peer.token) == ("node-7.cluster", 4711, TOKEN)
    assert found._peer.timeout_s == 7.0
    assert not found.takes_manifests
    other = open_target("peer://[fe80::1%eth0]:65535", token=TOKEN)
    assert isinstance(other, PeerStore)
    assert (other._peer.host, other._peer.port) == ("fe80::1%eth0", 65535)
    backoff = Backoff()
    store = open_target(f"file://{tmp_path}", backoff=backoff)
    assert isinstance(store, Store)
    assert store.backoff is backoff
    assert store.takes_manifests
