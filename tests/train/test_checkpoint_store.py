"""Checkpoints in a store: on S3 (a server on loopback behind a proxy that breaks things), on a file system, in memory.

What is in a store is looked at with boto3, with plain files, or in fsspec's dictionary; hashes are hashlib's.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import textwrap
import tracemalloc
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import moto.s3.models
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from quern import storage
from quern.errors import InputError, QuernError
from quern.remote.concurrency import PART_BYTES
from quern.remote.retry import Backoff, StoreError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.store import pieces
from quern.train.checkpoint.store import store as store_module
from quern.train.checkpoint.store.errors import IncompleteError, SourceError
from quern.train.checkpoint.store.store import Store, prune_store
from support.remote import s3_server
from support.remote.s3_server import Fault
from support.train import tier_case
from support.train.tier_case import content, record

pytestmark = pytest.mark.slow

PART = 64 << 10  # of a request; one test sends parts as large as they are
STEP = 1000
FOLDER = "step_00001000"
OFTEN = 10**6


def manifest(files: dict[str, bytes], step: int = STEP) -> bytes:
    return tier_case.manifest(step, {name: record(data) for name, data in files.items()}).to_bytes()


@dataclass
class Place:
    """A store under test, and a look into it past the code under test."""

    url: str
    folder: Path | None = None
    server: s3_server.Server | None = None

    def store(self, **options: Any) -> Store:
        quick = Backoff(base_s=0.001, cap_s=0.01, budget_s=300)
        return Store(self.url, **({"backoff": quick, "timeout_s": 60.0} | options))

    def contents(self) -> dict[str, bytes]:
        """Every file of a checkpoint by its name; what the store notes beside them is left out."""
        if self.server is not None:
            found = {name: self.server.read(name) for name in self.server.objects()}
        elif self.folder is not None:
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            found = {str(path.relative_to(self.folder)): path.read_bytes() for path in files}
        else:
            memory, root = fsspec.filesystem("memory").store, self.url.removeprefix("memory:/") + "/"
            found = {path.removeprefix(root): f.getvalue() for path, f in memory.items() if path.startswith(root)}
        return {name: data for name, data in found.items() if not name.endswith(".sha256")}

    def overwrite(self, name: str, data: bytes) -> None:
        if self.server is not None:
            self.server.write(name, data)
        elif self.folder is not None:
            (self.folder / name).write_bytes(data)
        else:
            fsspec.filesystem("memory").pipe_file(f"{self.url.removeprefix('memory:/')}/{name}", data)


@pytest.fixture(autouse=True)
def small_parts(request, monkeypatch):
    if "large_parts" not in request.fixturenames:
        monkeypatch.setattr(store_module, "PART_BYTES", PART)
        monkeypatch.setattr(pieces, "PART_BYTES", PART)
        monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", PART)


@pytest.fixture
def large_parts():
    """Parts are as large as they are outside of tests, and the server takes no smaller ones than S3."""


@pytest.fixture
def s3(server):
    return Place(server.url, server=server)


@pytest.fixture(params=["s3", "file", "memory"])
def place(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3")
    if request.param == "file":
        return Place(f"file://{tmp_path}/store/run", folder=tmp_path / "store" / "run")
    return Place(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def put(store: Store, disk: Path, name: str, data: bytes, step: int = STEP, **options: Any) -> None:
    (disk / name).write_bytes(data)
    store.put(step, name, str(disk / name), record(data), **options)


def put_all(store: Store, disk: Path, files: dict[str, bytes], step: int = STEP) -> None:
    for name, data in files.items():
        put(store, disk, name, data, step)
    put(store, disk, "manifest.json", manifest(files, step), step)


class Rate:
    """Notes what is asked of the bandwidth, each time with what ``look`` sees."""

    def __init__(self, look: Callable[[], Any] = lambda: None) -> None:
        self.look, self.taken, self.seen = look, [], []

    def take(self, n: int) -> None:
        self.taken.append(n)
        self.seen.append(self.look())


def there_and_back(place: Place, disk: Path, into: Path, name: str, data: bytes) -> None:
    store, size = place.store(), len(data)
    other = FileRecord(hashlib.sha256(b"other").hexdigest(), size)
    before = place.contents()
    assert not store.has(STEP, name, record(data))
    put(store, disk, name, data)
    assert place.contents() == before | {f"{FOLDER}/{name}": data}
    assert store.has(STEP, name, record(data))
    assert not store.has(STEP, name, other)
    assert not store.has(STEP, name, FileRecord(record(data).sha256, size + 1))
    assert not store.has(STEP + 1, name, record(data))
    into.mkdir()
    rate = Rate()
    assert store.fetch(STEP, name, record(data), str(into), rate=rate) == str(into / name)
    assert {path.name: path.read_bytes() for path in into.iterdir()} == {name: data}
    assert sum(rate.taken) == size
    assert store.checkpoints() == []


def test_bytes_go_in_and_come_back(place, disk, tmp_path):
    for number, size in enumerate((0, 1, PART, PART + 1, 2 * PART + 12345)):
        there_and_back(place, disk, tmp_path / f"into {size}", f"__{number}_0.distcp", content(size))


def test_parts_are_such_as_s3_takes(large_parts, server, s3, disk, tmp_path):
    there_and_back(s3, disk, tmp_path / "into", "__0_0.distcp", content(2 * PART_BYTES + 12345))
    assert server.proxy.count("PUT", "partNumber=") == 3


def test_the_bandwidth_is_asked_for_every_byte_before_it_goes(server, s3, disk):
    rate, progress = Rate(lambda: server.proxy.count("PUT")), []
    put(s3.store(width=1), disk, "a", content(2 * PART + 5), rate=rate, progress=progress.append)
    assert progress == rate.taken == [PART, PART, 5]
    assert rate.seen == [0, 1, 2]


def test_a_checkpoint_exists_once_its_manifest_does(place, disk):
    store = place.store()
    files = {".metadata": content(100), "__0_0.distcp": content(5000, 2)}
    whole = manifest(files)
    assert store.checkpoints() == []
    put(store, disk, ".metadata", files[".metadata"])
    assert store.checkpoints() == []
    assert store.begun() == [STEP]
    with pytest.raises(StoreError, match=r"step_00001000: __0_0\.distcp: is not there; the manifest waits") as caught:
        put(store, disk, "manifest.json", whole)
    assert isinstance(caught.value, IncompleteError)
    put(store, disk, "__0_0.distcp", files["__0_0.distcp"][1:])
    with pytest.raises(StoreError, match=r"__0_0\.distcp: has 4999 bytes, not 5000"):
        put(store, disk, "manifest.json", whole)
    put(store, disk, "__0_0.distcp", content(5000, 3))
    with pytest.raises(IncompleteError, match=r"__0_0\.distcp: is another checkpoint's; the manifest waits"):
        put(store, disk, "manifest.json", whole)
    assert f"{FOLDER}/manifest.json" not in place.contents()
    with pytest.raises(InputError, match=r"manifest\.json: not there; .* has no checkpoint of step 1000"):
        store.manifest(STEP)
    put(store, disk, "__0_0.distcp", files["__0_0.distcp"])
    put(store, disk, "manifest.json", whole)
    assert store.checkpoints() == [STEP]
    assert store.manifest(STEP).to_bytes() == whole
    assert place.contents() == {f"{FOLDER}/{name}": data for name, data in {**files, "manifest.json": whole}.items()}


def test_a_manifest_of_another_step_or_none_is_not_put(place, disk):
    store = place.store()
    with pytest.raises(InputError, match=r"manifest\.json: step: expected 1000"):
        put(store, disk, "manifest.json", manifest({".metadata": b""}, STEP + 1))
    with pytest.raises(InputError, match=r"manifest\.json: not valid JSON"):
        put(store, disk, "manifest.json", b"{")
    assert place.contents() == {}


def test_a_local_file_that_cannot_be_read_now_may_be_read_later(place, disk, monkeypatch):
    """In its midst, as from a shared file system whose server is gone for a while."""
    store = place.store(backoff=Backoff(budget_s=0.0))
    failures = [(1000, errno.EIO), (2 * PART + 5, errno.ESTALE), (1000, errno.ETIMEDOUT), (2 * PART + 5, errno.EACCES)]
    for size, number in failures:
        data = content(size)
        (disk / "a").write_bytes(data)

        class Broken(io.BytesIO):
            def read(self, length: int | None = -1, /, number=number) -> bytes:
                if self.tell():
                    raise OSError(number, os.strerror(number))
                return super().read(500)

        with monkeypatch.context() as patch:
            patch.setattr(pieces, "open", lambda path, mode, data=data, kind=Broken: kind(data), raising=False)
            with pytest.raises(StoreError) as caught:
                store.put(STEP, "a", str(disk / "a"), record(data))
        assert caught.value.transient
        assert str(caught.value).startswith(f"{disk}/a: cannot be read ({os.strerror(number)}); not uploaded")
        assert place.contents() == {}
        assert place.server is None or place.server.uploads() == []
    store.put(STEP, "a", str(disk / "a"), record(data))
    assert place.contents() == {f"{FOLDER}/a": data}


def test_writing_a_step_anew_takes_its_manifest_away_first(place, disk):
    store = place.store()
    old = {".metadata": b"old", "a": b"same"}
    put_all(store, disk, old)
    put(store, disk, "a", b"same")  # what the manifest says is there
    assert store.checkpoints() == [STEP]
    steps = []
    put(store, disk, ".metadata", b"new", progress=lambda n: steps.append(store.checkpoints()))
    assert store.checkpoints() == []
    assert place.contents() == {f"{FOLDER}/.metadata": b"new", f"{FOLDER}/a": b"same"}
    put_all(store, disk, old | {".metadata": b"new"})
    put(store, disk, "b", b"of another layout")
    assert store.checkpoints() == []
    put_all(store, disk, {".metadata": b"3"})
    place.overwrite(f"{FOLDER}/manifest.json", b"damaged")
    put(store, disk, ".metadata", b"4")
    assert f"{FOLDER}/manifest.json" not in place.contents()


def test_bytes_that_rotted_on_the_disk_are_not_put(place, disk):
    store, before = place.store(), b"what was there"
    there = {}
    for number, size in enumerate((1000, 2 * PART + 5)):
        data = content(size)
        rotten = bytearray(data)
        rotten[size // 2] ^= 4
        put(store, disk, f"replaced-{number}", before)
        there[f"{FOLDER}/replaced-{number}"] = before
        for name in (f"new-{number}", f"replaced-{number}"):
            (disk / name).write_bytes(rotten)
            with pytest.raises(SourceError) as caught:
                store.put(STEP, name, str(disk / name), record(data))
            for text in (str(disk / name), record(data).sha256, record(bytes(rotten)).sha256):
                assert text in str(caught.value)
            assert place.contents() == there
            assert not store.has(STEP, name, record(data))
            assert place.server is None or place.server.uploads() == []


def test_a_local_file_that_is_missing_or_is_not_what_was_saved_is_not_put(place, disk):
    store, data = place.store(), content(1000)
    (disk / "folder").mkdir()
    (disk / "file").write_bytes(b"")
    (disk / "short").write_bytes(data[:-1])
    (disk / "long").write_bytes(data + b"x")
    for path, what in (
        ("none", r"none: cannot be read \(No such file"), ("folder", r"folder: cannot be read \(Is a directory"),
        ("file/b", r"file/b: cannot be read \(Not a directory"),
        ("short", "short: expected 1000 bytes, as saved, has 999"),
        ("long", "long: expected 1000 bytes, as saved, has more"),
    ):  # fmt: skip
        with pytest.raises(SourceError, match=f"disk/{what}"):
            store.put(STEP, "a", str(disk / path), record(data))
    assert place.contents() == {}


def test_names_elsewhere_are_refused(place, disk):
    store = place.store()
    for name in ("", ".", "..", "../a", "a/b", "a\\b", "a\0"):
        for call in (
            lambda name=name: store.put(STEP, name, str(disk / "a"), record(b"")),
            lambda name=name: store.has(STEP, name, record(b"")),
            lambda name=name: store.fetch(STEP, name, record(b""), str(disk)),
        ):
            with pytest.raises(InputError, match="expected the plain name of a file"):
                call()


def test_a_url_that_is_no_store_is_refused():
    for url in ("nostore://x/y", "s3://", "memory://", ""):
        with pytest.raises(InputError):
            Store(url)


def test_only_folders_of_checkpoints_are_listed(place, disk):
    store = place.store()
    for step in (7, 123456789):
        put_all(store, disk, {".metadata": b"m"}, step)
    for name in ("other/manifest.json", "step_7/manifest.json", "step_0000000x/manifest.json"):
        if place.folder is not None:
            (place.folder / name).parent.mkdir()
        place.overwrite(name, b"{}")
    assert store.checkpoints() == [7, 123456789]
    assert place.store().begun() == [7, 123456789]


def test_a_damaged_manifest_is_named(place, disk):
    store = place.store()
    put_all(store, disk, {".metadata": b"m"})
    good = place.contents()[f"{FOLDER}/manifest.json"]
    for bad, message in [
        (good.replace(b'"tokens": 123', b'"tokens": 124'), "checksum"),
        (b"{", "not valid JSON"),
        (manifest({".metadata": b"m"}, 3), "step: expected 1000"),
    ]:
        place.overwrite(f"{FOLDER}/manifest.json", bad)
        with pytest.raises(InputError, match=rf"{place.url}/step_00001000/manifest\.json: .*{message}"):
            store.manifest(STEP)


def test_a_file_that_is_not_what_was_recorded_is_not_fetched(place, disk, tmp_path):
    store, data = place.store(), content(PART + 10)
    put(store, disk, "a", data)
    changed = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "a").write_bytes(b"older")

    def fetch():
        store.fetch(STEP, "a", record(data), str(tmp_path / "into"))

    place.overwrite(f"{FOLDER}/a", changed)
    with pytest.raises(StoreError) as caught:
        fetch()
    for text in (f"{place.url}/{FOLDER}/a", record(data).sha256, record(changed).sha256):
        assert text in str(caught.value)
    assert not caught.value.transient
    place.overwrite(f"{FOLDER}/a", data[:-1])
    with pytest.raises(StoreError, match=rf"{place.url}/{FOLDER}/a: expected {PART + 10} bytes, has {PART + 9}"):
        fetch()
    with pytest.raises(StoreError, match=rf"{place.url}/{FOLDER}/b: no such file"):
        store.fetch(STEP, "b", record(data), str(tmp_path / "into"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "into").iterdir()} == {"a": b"older"}


def test_a_folder_that_cannot_be_written_is_named(place, disk, tmp_path):
    store = place.store()
    put(store, disk, "a", b"data")
    with pytest.raises(QuernError, match=rf"^{tmp_path}/nowhere/a: cannot be written \(No such file"):
        store.fetch(STEP, "a", record(b"data"), str(tmp_path / "nowhere"))


def test_a_store_that_is_a_file_is_refused_at_once(tmp_path, disk):
    (tmp_path / "store").write_bytes(b"")
    slept = []
    store = Store(f"file://{tmp_path}/store/run", backoff=Backoff(sleep=slept.append))
    with pytest.raises(StoreError, match=r"store/run/step_00001000/.*correct checkpoint\.store") as caught:
        put(store, disk, "a", b"data")
    assert not caught.value.transient
    assert slept == []


# -- Faults on the way.


PASSING = [  # that each kind of fault passes is proved by tests/remote/test_objects.py
    ("lose answer", 1000, "PUT", "/a"), ("InternalError", 1000, "HEAD", "manifest"),
    ("SlowDown", 3 * PART, "POST", "uploads"), ("lose answer", 3 * PART, "PUT", "partNumber=2"),
    ("cut request", 3 * PART, "PUT", "partNumber="), ("lose answer", 3 * PART, "POST", "uploadId="),
]  # fmt: skip


@pytest.mark.parametrize(("what", "size", "method", "text"), PASSING)
def test_what_passes_by_itself_is_tried_again(server, s3, disk, what, size, method, text):
    server.proxy.faults = [Fault(what, method, text, times=4)]
    data = content(size)
    put(s3.store(), disk, "a", data)
    assert server.proxy.struck(what) == 4
    assert s3.contents() == {f"{FOLDER}/a": data}
    assert server.boto.head_object(Bucket=server.bucket, Key=f"runs/one/{FOLDER}/a")["Metadata"] == {
        "sha256": record(data).sha256
    }
    assert server.uploads() == []


@pytest.mark.parametrize(
    ("what", "skip"),
    [
        ("SlowDown", 0), ("InternalError", 2), ("cut answer", 0), ("cut answer", 2), ("flip", 2), ("stall", 0),
        ("drip", 2),
    ],
)  # fmt: skip
def test_a_file_is_fetched_through_faults(server, s3, disk, what, skip):
    data = content(3 * PART + 99)
    server.write(f"{FOLDER}/a", data)
    server.proxy.faults = [Fault(what, "GET", f"{FOLDER}/a", skip=skip)]
    s3.store(timeout_s=1.5 if what in ("stall", "drip") else 60.0).fetch(STEP, "a", record(data), str(disk))
    assert server.proxy.struck(what) == 1
    assert server.proxy.endured == 0
    assert {path.name: path.read_bytes() for path in disk.iterdir()} == {"a": data}
    starts = [ranged.removeprefix("bytes=").split("-")[0] for _, ranged, _ in server.proxy.ranges]
    assert {int(start) for start in starts} == {0, PART, 2 * PART, 3 * PART}
    if what in ("SlowDown", "InternalError", "cut answer"):  # a broken connection costs one range, not the file
        assert len(starts) == 5


def test_bits_that_flip_each_time_reach_no_file(server, s3, disk):
    data = content(1000)
    server.write(f"{FOLDER}/a", data)
    server.proxy.faults = [Fault("flip", "GET", f"{FOLDER}/a", times=OFTEN)]
    wrong = data[:500] + bytes([data[500] ^ 1]) + data[501:]
    with pytest.raises(StoreError, match=f"{s3.url}/{FOLDER}/a: .*{record(data).sha256}.*{record(wrong).sha256}"):
        s3.store().fetch(STEP, "a", record(data), str(disk))
    assert os.listdir(disk) == []


def test_a_manifest_whose_bits_flip_on_the_way_is_read_again(server, s3, disk):
    put_all(s3.store(), disk, {".metadata": b"m"})
    server.proxy.faults = [Fault("flip", "GET", "manifest.json")]
    assert s3.store().manifest(STEP).step == STEP
    assert server.proxy.struck("flip") == 1


def test_an_error_in_the_middle_leaves_nothing(place, disk):
    calls = []

    def stop(n):
        calls.append(n)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put(place.store(), disk, "a", content(3 * PART), progress=stop)
    assert place.contents() == {}
    assert place.server is None or place.server.uploads() == []


def test_an_upload_whose_completion_was_carried_out_but_not_answered_is_done(server, s3, disk):
    server.proxy.faults = [Fault("lose answer", "POST", "uploadId="), Fault("NoSuchUpload", "POST", "uploadId=")]
    data = content(2 * PART)
    put(s3.store(), disk, "a", data)
    assert server.proxy.struck("NoSuchUpload") == 1
    assert s3.contents() == {f"{FOLDER}/a": data}


@pytest.mark.parametrize(("method", "text"), [("PUT", "partNumber=1"), ("POST", "uploadId=")])
def test_an_upload_that_somebody_aborted_is_none(server, s3, disk, method, text):
    server.write(f"{FOLDER}/a", b"older")
    server.proxy.faults = [Fault("NoSuchUpload", method, text)]
    with pytest.raises(StoreError, match=r"step_00001000/a: the upload was aborted") as caught:
        put(s3.store(), disk, "a", content(2 * PART))
    assert caught.value.transient
    assert s3.contents() == {f"{FOLDER}/a": b"older"}
    assert server.uploads() == []


def test_renewed_credentials_are_read(server, s3, disk, tmp_path, monkeypatch):
    def credentials(key):
        (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\n")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    credentials("oldkey")
    server.proxy.faults = [
        Fault("ExpiredToken", method, only_key="Credential=oldkey", times=OFTEN) for method in ("HEAD", "GET", "PUT")
    ]
    store = s3.store()
    with pytest.raises(StoreError, match=r"renew the credentials") as caught:
        store.has(STEP, "a", record(b""))  # HEAD: an answer without a body that says why
    assert not caught.value.transient
    with pytest.raises(StoreError, match="ExpiredToken"):
        store.checkpoints()
    credentials("newkey")
    with pytest.raises(StoreError, match="renew the credentials"):
        store.has(STEP, "a", record(b""))
    store.renew()
    put(store, disk, "a", b"data")
    assert s3.contents() == {f"{FOLDER}/a": b"data"}


def test_no_credentials_and_no_bucket_are_told_at_once(server, disk, monkeypatch):
    slept = []
    backoff = Backoff(sleep=slept.append)
    with pytest.raises(StoreError, match=r"s3://nobucket-here/x/.*NoSuchBucket.*create the bucket") as caught:
        put(Store("s3://nobucket-here/x", backoff=backoff), disk, "a", b"data")
    assert not caught.value.transient
    with pytest.raises(StoreError, match=r"NoSuchBucket.*create the bucket"):
        Store("s3://nobucket-here/x", backoff=backoff).checkpoints()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match="renew the credentials") as caught:
        put(Store(server.url, backoff=backoff), disk, "a", b"data")
    assert not caught.value.transient
    assert slept == []


def test_a_store_that_cannot_be_reached_may_come_back(server, disk, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        Store(server.url, backoff=Backoff(budget_s=0.0)).checkpoints()
    assert caught.value.transient


def test_errors_that_pass_and_errors_that_stay(tmp_path, monkeypatch):
    cases = [
        # Amazon S3 API reference, "List of error codes": code, status, and whether its text says to try again.
        *[(ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"), again)
          for code, status, again in [
              ("InternalError", 500, True), ("ServiceUnavailable", 503, True), ("SlowDown", 503, True),
              ("RequestTimeout", 400, True), ("OperationAborted", 409, True), ("BadDigest", 400, True),
              ("IncompleteBody", 400, True), ("AccessDenied", 403, False), ("ExpiredToken", 400, False),
              ("InvalidAccessKeyId", 403, False), ("SignatureDoesNotMatch", 403, False), ("NoSuchBucket", 404, False),
              ("InvalidToken", 400, False), ("RequestTimeTooSkewed", 403, False), ("EntityTooLarge", 400, False),
              ("502", 502, True), ("400", 400, False), ("403", 403, False), ("429", 429, True),
          ]],
        (EndpointConnectionError(endpoint_url="x"), True),
        (NoCredentialsError(), False),
        (TimeoutError(), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (OSError(errno.ESTALE, "stale"), True),
        (OSError(errno.EIO, "i/o"), True),
        (OSError(errno.ENOSPC, "full"), False),
        (OSError(errno.EROFS, "read-only"), False),
        (PermissionError(errno.EACCES, "no"), False),
        (NotADirectoryError(errno.ENOTDIR, "no"), False),
        (TypeError("a wrong option"), False),
    ]  # fmt: skip
    store, wrong = Store(f"file://{tmp_path}", backoff=Backoff(budget_s=0.0)), []
    for error, transient in cases:

        def fail(*arguments, error=error, **options):
            raise error

        monkeypatch.setattr(store._link.fs, "info", fail)
        with pytest.raises(StoreError, match=rf"file://{tmp_path}/step_00001000/a") as caught:
            store.has(STEP, "a", record(b""))
        if caught.value.transient is not transient:
            wrong.append(f"{error!r}: transient is not {transient}")
    assert wrong == []


# -- What a killed process left, and removal.


def test_what_a_killed_upload_left_is_given_up(server, s3, disk):
    for name in (f"{FOLDER}/a", f"{FOLDER}/ab", "step_00001001/a"):
        server.boto.create_multipart_upload(Bucket=server.bucket, Key=f"runs/one/{name}")
    put(s3.store(), disk, "a", content(2 * PART))
    assert server.uploads() == [f"{FOLDER}/ab", "step_00001001/a"]
    s3.store().remove(STEP)
    assert server.uploads() == ["step_00001001/a"]


def test_what_a_killed_copy_left_is_removed(tmp_path, disk):
    """Of the file, and of the small file beside it that has its SHA-256; of no other."""
    folder = tmp_path / "store" / FOLDER
    folder.mkdir(parents=True)
    others = [f".ab.{'0' * 32}.tmp", ".a.tmp"]
    for name in (f".a.{'0' * 32}.tmp", f"..a.sha256.{'0' * 32}.tmp", *others):
        (folder / name).write_bytes(b"torn")
    put(Store(f"file://{tmp_path}/store"), disk, "a", b"data")
    assert sorted(path.name for path in folder.iterdir()) == sorted(["a", ".a.sha256", *others])


def test_what_the_store_says_of_a_file_is_never_older_than_the_file(tmp_path, disk):
    """A copy killed after the file and before its SHA-256: the file counts as missing, not as the one before."""
    store = Store(f"file://{tmp_path}/store")
    put(store, disk, "a", b"one")

    class Killed(BaseException):
        pass

    publish = storage.publish

    def killed(path):
        if path.endswith(".sha256"):
            raise Killed
        return publish(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "publish", killed)
        with pytest.raises(Killed):
            put(store, disk, "a", b"two")
    assert (tmp_path / "store" / FOLDER / "a").read_bytes() == b"two"
    assert not store.has(STEP, "a", record(b"one"))
    assert not store.has(STEP, "a", record(b"two"))


def test_removal_takes_the_manifest_first(server, s3, disk):
    store = s3.store()
    files = {".metadata": b"m", "a": b"1", "b": b"2"}
    put_all(store, disk, files, 1)
    put_all(store, disk, files, 2)
    server.proxy.faults = [Fault("ExpiredToken", "DELETE", skip=2, times=1)]
    with pytest.raises(StoreError, match="ExpiredToken"):
        prune_store(store, keep=[2])
    left = {name for name in server.objects() if name.startswith("step_00000001/")}
    assert "step_00000001/manifest.json" not in left
    assert len(left) == 2
    assert store.checkpoints() == [2]
    assert prune_store(store, keep=[2]) == [1]
    assert {name.split("/")[0] for name in server.objects()} == {"step_00000002"}


def test_pruning_keeps_what_it_is_told_and_the_newest(place, disk):
    store = place.store()
    assert prune_store(store, keep=[]) == []
    put(store, disk, "a", b"x", 5)
    assert prune_store(store, keep=[]) == []  # nothing whole is there yet
    for step in (10, 20, 30):
        put_all(store, disk, {".metadata": b"m", "a": b"x"}, step)
    put(store, disk, "a", b"x", 25)  # being uploaded still, or dropped
    put(store, disk, "a", b"x", 40)
    assert prune_store(store, keep=[10, 25]) == [5, 20]
    assert {name.split("/")[0] for name in place.contents()} == {
        "step_00000010", "step_00000025", "step_00000030", "step_00000040",
    }  # fmt: skip
    if place.folder is not None:
        assert len(os.listdir(place.folder)) == 4  # folders go too, with what the store noted in them
    assert prune_store(store, keep=[]) == [10, 25]
    assert store.checkpoints() == [30]


def test_memory_is_bounded_by_a_few_parts(tmp_path, disk):
    """What this process holds at most; no server, which would hold its objects here."""
    store, parts = Store(f"file://{tmp_path}/store"), 200
    data = content(parts * PART)
    (disk / "a").write_bytes(data)
    expected = record(data)
    (tmp_path / "into").mkdir()
    put(store, disk, "small", b"x")
    store.fetch(STEP, "small", record(b"x"), str(tmp_path / "into"))
    del data
    tracemalloc.start()
    try:
        store.put(STEP, "a", str(disk / "a"), expected)
        of_put = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        store.fetch(STEP, "a", expected, str(tmp_path / "into"))
        of_fetch = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert PART <= of_put < 12 * PART
    assert PART <= of_fetch < 12 * PART
    with open(tmp_path / "into" / "a", "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256


@pytest.mark.long
def test_memory_is_bounded(large_parts, server, tmp_path):
    size = 200 << 20
    with open(tmp_path / "big", "wb") as file:
        for seed in range(20):
            file.write(content(size // 20, seed))
    sha = subprocess.run(["sha256sum", str(tmp_path / "big")], capture_output=True, text=True, check=True).stdout[:64]
    code = textwrap.dedent("""
        import hashlib, sys
        from quern.train.checkpoint.format.manifest import FileRecord
        from quern.train.checkpoint.store.store import Store
        url, path, sha, size, into = sys.argv[1:]
        def peak():  # of this program; ru_maxrss would begin with the parent's
            line, = (line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
            return line.split()[1]
        store = Store(url)
        open(path + ".small", "wb").write(b"x")
        store.put(1, "small", path + ".small", FileRecord(hashlib.sha256(b"x").hexdigest(), 1))
        peaks = [peak()]
        store.put(1, "big", path, FileRecord(sha, int(size)))
        peaks.append(peak())
        store.fetch(1, "big", FileRecord(sha, int(size)), into)
        peaks.append(peak())
        print(*peaks)
    """)
    (tmp_path / "into").mkdir()
    arguments = [sys.executable, "-c", code, server.url, str(tmp_path / "big"), sha, str(size), str(tmp_path / "into")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after_put, after_fetch = (int(word) * 1024 for word in done.stdout.split())
    assert after_put - before < 100 << 20  # five requests of 8 MiB, and what the client's libraries copy of each
    assert after_fetch - before < 100 << 20
    with open(tmp_path / "into" / "big", "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == sha
    state = hashlib.sha256()
    for chunk in server.boto.get_object(Bucket=server.bucket, Key="runs/one/step_00000001/big")["Body"]:
        state.update(chunk)
    assert state.hexdigest() == sha


def test_what_is_noted_beside_a_file_is_json(tmp_path, disk):
    put(Store(f"file://{tmp_path}/store"), disk, ".metadata", b"m")
    noted = json.loads((tmp_path / "store" / FOLDER / "..metadata.sha256").read_bytes())
    assert noted == {"sha256": hashlib.sha256(b"m").hexdigest(), "size": 1}
