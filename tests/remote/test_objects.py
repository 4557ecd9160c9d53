"""Objects of an S3 server that fails: the same bytes or an error, and never a part of an object.

What is in the store is looked at with boto3 beside the proxy, never with the code that put it there.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import moto.s3.models
import pytest
import s3fs

from quern import storage
from quern.errors import InputError
from quern.remote import s3
from quern.remote.concurrency import PART_BYTES
from quern.remote.connection import Connection
from quern.remote.objects import objects
from quern.remote.retry import Backoff, ChangedError, StoreError
from quern.remote.sink import Sink
from support.remote.s3_server import Fault, Server

pytestmark = pytest.mark.slow

OFTEN = 10**6
SMALL_PART = 64 << 10


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads of the same parts in number and order, each a hundredth of a real one."""
    monkeypatch.setattr(s3, "PART_BYTES", SMALL_PART)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", SMALL_PART)


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def url(server: Server, name: str) -> str:
    return f"{server.url}/{name}"


@pytest.mark.parametrize("what", ["cut answer", "cut anywhere"])
def test_a_read_goes_on_at_the_very_byte_where_it_was_cut(server: Server, what: str) -> None:
    data = content(3 << 20)
    server.write("big", data)
    server.proxy.faults = [Fault(what, "GET", "big", times=6)]
    with storage.open_read(url(server, "big")) as file:
        assert file.read() == data
    assert server.proxy.struck(what) == 6
    asked = [ranged for _, ranged, _ in server.proxy.ranges]
    starts = [int(ranged.removeprefix("bytes=").split("-")[0]) for ranged in asked]
    assert starts == sorted(starts)  # nothing is asked for twice from its beginning
    assert len({start for start in starts if start % (64 << 10)}) >= 3  # where cuts were
    assert {condition for _, _, condition in server.proxy.ranges[1:]} == {f'"{hashlib.md5(data).hexdigest()}"'}


def test_a_whole_object_is_read_by_one_request_and_goes_on_after_a_cut(server: Server) -> None:
    data = content(300_000)
    server.write("one", data)
    assert storage.read_bytes(url(server, "one")) == data
    assert server.proxy.count("GET") == 1
    server.proxy.faults = [Fault("cut answer", "GET", "one")]
    assert storage.read_bytes(url(server, "one")) == data
    assert [ranged for _, ranged, _ in server.proxy.ranges][1:] == ["", "bytes=150000-"]


def test_a_link_too_slow_for_one_request_loses_no_byte(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUERN_STORE_TIMEOUT_S", "1")
    data = content(5 << 20)
    server.write("big", data)
    server.proxy.faults = [Fault("slow", "GET", "big", OFTEN)]
    assert storage.read_bytes(url(server, "big")) == data
    starts = [int(ranged.removeprefix("bytes=").split("-")[0] or 0) for _, ranged, _ in server.proxy.ranges]
    assert len(set(starts)) == len(starts) >= 3
    assert starts == sorted(starts)


def test_a_link_that_drips_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUERN_STORE_TIMEOUT_S", "1")
    monkeypatch.setenv("QUERN_STORE_PATIENCE_S", "1.5")
    server.write("a", content(100_000))
    server.proxy.faults = [Fault("drip", "GET", "a", OFTEN)]
    with pytest.raises(StoreError, match=r"one/a: .*given up after \d+ tries in \d+ s") as caught:
        storage.read_bytes(url(server, "a"))
    assert "\n" not in str(caught.value)


def test_seeks_and_reads_are_those_of_a_file(server: Server) -> None:
    data, draw = content(2_000_000), random.Random(3)
    server.write("big", data)
    with storage.open_read(url(server, "big")) as file:
        for _ in range(40):
            start, count = draw.randrange(len(data) + 1000), draw.choice([1, 10, 1000, 70_000, 300_000])
            file.seek(start)
            assert file.read(count) == data[start : start + count]
        file.seek(-10, 2)
        assert file.read() == data[-10:]
        assert file.tell() == len(data)
    server.write("lines", b"one\ntwo\n\nthree")
    with storage.open_read(url(server, "lines")) as file:
        assert list(file) == [b"one\n", b"two\n", b"\n", b"three"]


def test_an_empty_object_is_an_empty_file(server: Server) -> None:
    server.write("none", b"")
    with storage.open_read(url(server, "none")) as file:
        assert file.read() == b""
    assert storage.read_bytes(url(server, "none")) == b""


def test_an_object_that_changes_while_it_is_read_is_an_error(server: Server) -> None:
    server.write("big", content(2 << 20, 1))
    with storage.open_read(url(server, "big")) as file:
        file.read(1000)
        server.write("big", content(2 << 20, 2))
        with pytest.raises(ChangedError, match=r"runs/one/big: PreconditionFailed.*another one"):
            file.read()


def test_bytes_that_are_not_those_that_were_put_are_read_again(server: Server) -> None:
    storage.publish_bytes(url(server, "a"), b"grain" * 100)
    server.proxy.faults = [Fault("flip", "GET", "a")]
    assert storage.read_bytes(url(server, "a")) == b"grain" * 100
    server.proxy.faults = [Fault("flip", "GET", "a", OFTEN)]
    with pytest.raises(StoreError, match="came twice with other bytes"):
        storage.read_bytes(url(server, "a"))


@pytest.mark.parametrize("size", [0, 1000, 2 * PART_BYTES + 77])
def test_what_is_published_is_there_whole(server: Server, size: int) -> None:
    data = content(size)
    storage.publish_bytes(url(server, "out/a"), data)
    assert server.read("out/a") == data
    assert storage.sha256(url(server, "out/a")) == hashlib.sha256(data).hexdigest()
    assert server.uploads() == []


def test_what_others_put_is_hashed_by_its_bytes(server: Server) -> None:
    server.write("theirs", b"grain")
    assert storage.sha256(url(server, "theirs")) == hashlib.sha256(b"grain").hexdigest()


@pytest.mark.parametrize("size", [1000, 2 * SMALL_PART + 77])
@pytest.mark.parametrize("what", ["SlowDown", "InternalError", "cut request", "lose answer"])
def test_a_put_is_tried_again_until_it_is_there(server: Server, small_parts: None, what: str, size: int) -> None:
    data = content(size)
    server.proxy.faults = [Fault(what, "PUT", "out", 2), Fault(what, "POST", "out", 2)]
    storage.publish_bytes(url(server, "out/a"), data)
    assert server.proxy.struck(what) >= 2
    assert server.read("out/a") == data
    begun = [upload for upload in server.uploads() if what != "lose answer"]  # one was begun whose number got lost
    assert begun == []
    storage.give_up_uploads(server.url)
    assert server.uploads() == []


def test_the_answer_to_the_last_request_of_an_upload_may_be_lost(server: Server, small_parts: None) -> None:
    data = content(2 * SMALL_PART)
    # what S3 says of an upload that is completed already
    server.proxy.faults = [Fault("lose answer", "POST", "uploadId"), Fault("NoSuchUpload", "POST", "uploadId")]
    storage.publish_bytes(url(server, "out/a"), data)
    assert server.proxy.struck("lose answer") == server.proxy.struck("NoSuchUpload") == 1
    assert server.read("out/a") == data
    server.proxy.faults = [Fault("NoSuchUpload", "POST", "uploadId")]  # of one that somebody has aborted
    with pytest.raises(StoreError, match="out/b: the upload was aborted by somebody else"):
        storage.publish_bytes(url(server, "out/b"), data)
    assert "out/b" not in server.objects()


@pytest.mark.parametrize("size", [1000, 3 * SMALL_PART])
@pytest.mark.parametrize("what", ["SlowDown", "ExpiredToken"])
def test_a_put_that_fails_leaves_nothing(
    server: Server, small_parts: None, monkeypatch: pytest.MonkeyPatch, what: str, size: int
) -> None:
    monkeypatch.setenv("QUERN_STORE_PATIENCE_S", "1")
    storage.publish_bytes(url(server, "out/a"), b"old")
    # of an upload by parts the first one gets through
    server.proxy.faults = [Fault(what, "PUT", "out/a", OFTEN, skip=1 if size > SMALL_PART else 0)]
    with pytest.raises(StoreError, match=rf"{server.url}/out/a: .*{what}"):
        storage.publish_bytes(url(server, "out/a"), content(size))
    assert server.objects() == {"out/a": 3}
    assert server.uploads() == []


def test_an_error_in_the_block_puts_nothing(server: Server) -> None:
    def fail() -> None:
        with storage.publish(url(server, "a")) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert server.objects() == {}


def test_expired_credentials_are_read_again_once_and_then_one_error(server: Server) -> None:
    server.write("a", b"grain")
    server.proxy.faults = [Fault("ExpiredToken", "GET", "one/a", 1)]
    assert storage.read_bytes(url(server, "a")) == b"grain"
    server.proxy.faults = [Fault("ExpiredToken", "GET", "one/a", OFTEN)]
    before = server.proxy.count("GET")
    with pytest.raises(StoreError, match=rf"{server.url}/a: ExpiredToken.*renew the credentials") as caught:
        storage.read_bytes(url(server, "a"))
    assert server.proxy.count("GET") - before == 1  # within a minute of the last time
    assert "\n" not in str(caught.value)


def test_errors_say_what_to_do(server: Server) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket-here/a: NoSuchBucket.*create the bucket or correct"):
        storage.publish_bytes("s3://no-such-bucket-here/a", b"")
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(url(server, "absent"))
    with pytest.raises(FileNotFoundError):
        storage.open_read(url(server, "absent"))
    with pytest.raises(InputError, match="absent: no such file"):
        storage.fingerprint(url(server, "absent"))
    with pytest.raises(InputError, match="a web server can only be read"):
        storage.publish_bytes("http://127.0.0.1:1/a", b"")


def test_a_setting_that_is_no_number_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUERN_STORE_TIMEOUT_S", "soon")
    with pytest.raises(InputError, match="QUERN_STORE_TIMEOUT_S: expected a number above 0, got 'soon'"):
        storage.read_bytes(url(server, "a"))


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(StoreError("x: busy", transient=True, retry_after_s=3.0)))
    assert (str(error), error.transient, error.retry_after_s) == ("x: busy", True, 3.0)
    assert isinstance(pickle.loads(pickle.dumps(ChangedError("x"))), ChangedError)


@pytest.mark.long
def test_listing_goes_on_behind_the_first_thousand(server: Server) -> None:
    names = [f"many/{number:05d}" for number in range(1003)]

    def write(mine: list[str]) -> None:
        for name in mine:
            server.write(name, b"")

    threads = [threading.Thread(target=write, args=(names[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.write("many-more", b"")
    assert storage.list_files(url(server, "many")) == [url(server, name) for name in names]
    described = storage.describe([url(server, name) for name in names[-20:]])
    assert server.proxy.count("HEAD") == 0
    assert {size for size, _ in described} == {0}
    server.proxy.faults = [Fault("SlowDown", "POST", "delete", 1)]
    storage.remove_tree(url(server, "many"))
    assert server.objects() == {"many-more": 0}


def test_globs_find_what_s3fs_finds(server: Server) -> None:
    for name in (
        "in/a.gz", "in/b.gz", "in/b.txt", "in/sub/c.gz", "in/sub/deep/d.gz", "in2/e.gz", "in/x[1].gz", "in/sub.gz/f.gz",
    ):  # fmt: skip
        server.write(name, b"")
    oracle = s3fs.S3FileSystem(use_listings_cache=False)
    for pattern in (
        "in/*.gz",
        "in*/*.gz",
        "in/**/*.gz",
        "in/**",
        "*/[ab].*",
        "in/*/*.gz",
        "in/?.gz",
        "in/none*",
        "**/d.gz",
    ):
        expected = sorted(name for name in oracle.glob(url(server, pattern)) if not oracle.isdir(name))
        assert storage.glob(url(server, pattern)) == [f"s3://{name}" for name in expected], pattern
        assert expected or pattern == "in/none*"


def test_a_fingerprint_is_the_same_however_it_is_asked_for(server: Server) -> None:
    paths = [url(server, f"in/{number}") for number in range(12)]
    for number in range(12):
        server.write(f"in/{number}", b"x" * number)
    by_listing = storage.describe(paths)
    assert by_listing == [storage.describe([path])[0] for path in paths]
    assert by_listing[3] == (3, f'3:"{hashlib.md5(b"xxx").hexdigest()}"')
    server.write("in/3", b"yyy")
    assert storage.fingerprint(paths[3]) != by_listing[3][1]


def test_no_more_requests_are_under_way_than_allowed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUERN_STORE_CONNECTIONS", "3")
    paths = [url(server, f"in{number}/a") for number in range(30)]
    for number in range(30):
        server.write(f"in{number}/a", content(2000))
    server.proxy.faults = [Fault("slow", "HEAD", "", OFTEN)]
    objects(server.url).stats(paths)
    assert server.proxy.count("HEAD") == 30
    assert server.proxy.most_under_way <= 3


def test_memory_stores_read_and_write_the_same_way(tmp_path: Path) -> None:
    data = content(3 << 20)
    storage.publish_bytes("memory:///remote-test/a", data)
    with storage.open_read("memory:///remote-test/a") as file:
        file.seek(1 << 20)
        assert file.read() == data[1 << 20 :]
    storage.remove("memory:///remote-test/a")
    storage.remove("memory:///remote-test/a")
    assert not storage.exists("memory:///remote-test/a")


def test_a_fingerprint_of_any_other_store_changes_with_the_content() -> None:
    paths = [f"memory://remote-stamps/{number}" for number in range(9)]
    for path in paths:
        storage.publish_bytes(path, b"rye")
    by_listing = storage.describe(paths)
    assert by_listing == [storage.describe([path])[0] for path in paths]
    storage.publish_bytes(paths[0], b"oat")
    assert storage.describe(paths)[0] != by_listing[0]
    assert storage.fingerprint(paths[0]) != by_listing[0][1]
    storage.remove_tree("memory://remote-stamps")


def test_threads_that_are_refused_at_once_go_on_with_one_new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    count, sessions = 8, []
    together = threading.Barrier(count, timeout=120)

    class Session:
        def __init__(self) -> None:
            sessions.append(self)

        def cat(self) -> bytes:
            if self is sessions[0]:
                together.wait()
                raise PermissionError("expired")
            return b"grain"

    def connect(link: Connection) -> None:
        link.fs, link.root, link.is_local = Session(), "", False

    monkeypatch.setattr(Connection, "_connect", connect)
    monkeypatch.setattr(Session, "clear_instance_cache", lambda: None, raising=False)
    link = Connection("memory://once", Backoff(), 5.0, renews=True)
    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(lambda _: link.once("memory://once/a", "cat"), range(count))) == [b"grain"] * count
    assert len(sessions) == 2


def test_a_try_that_is_late_puts_nothing_behind_the_next_ones_bytes() -> None:
    sink = Sink("memory://late", 0, None)
    late = sink.begins("e", 10, None)
    assert late.take(b"ab")
    taker = sink.begins("e", 8, "bytes 2-9/10")
    assert taker.take(b"cd")
    assert not late.take(b"XX")
    assert not taker.take(b"efghij")
    assert sink.data == b"abcdefghij"
