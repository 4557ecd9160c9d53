"""A published name holds the whole file or is not there."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import pickle
import shutil
import uuid
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pytest
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from quern import filesystem, storage
from quern.errors import InputError, QuernError


@pytest.fixture(params=["local", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory:///{uuid.uuid4().hex}"


def fail_while_writing(path: str) -> None:
    with storage.publish(path) as file:
        file.write(b"half")
        raise RuntimeError


def test_published_bytes_come_back(base: str) -> None:
    path = storage.join(base, "a", "b.bin")
    storage.publish_bytes(path, b"grain")
    assert storage.read_bytes(path) == b"grain"
    assert storage.exists(path)
    assert storage.is_file(path)
    assert storage.sha256(path) == hashlib.sha256(b"grain").hexdigest()


def test_an_error_while_writing_leaves_nothing(base: str) -> None:
    path = storage.join(base, "c.bin")
    with pytest.raises(RuntimeError):
        fail_while_writing(path)
    assert not storage.exists(path)
    assert storage.list_files(base) == []


def test_an_error_while_replacing_leaves_the_old_file(base: str) -> None:
    path = storage.join(base, "c.bin")
    storage.publish_bytes(path, b"old")
    with pytest.raises(RuntimeError):
        fail_while_writing(path)
    assert storage.read_bytes(path) == b"old"


def test_nothing_stands_under_the_name_before_the_end(tmp_path: Path) -> None:
    path = str(tmp_path / "d.bin")
    with storage.publish(path) as file:
        file.write(b"x" * 100_000)
        file.flush()
        assert not storage.exists(path)
    assert storage.exists(path)


def test_glob_and_listing_are_sorted_and_of_the_same_form(base: str) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        storage.publish_bytes(storage.join(base, name), b"")
    assert storage.glob(storage.join(base, "*.txt")) == [storage.join(base, n) for n in ("a.txt", "b.txt")]
    assert [p.removeprefix(base + "/") for p in storage.list_files(base)] == ["a.txt", "b.txt", "sub/c.txt"]
    assert storage.list_files(storage.join(base, "nowhere")) == []


def test_json_is_the_same_bytes_for_the_same_value(base: str) -> None:
    path = storage.join(base, "j.json")
    storage.write_json(path, {"b": 1, "a": "é"})
    first = storage.read_bytes(path)
    storage.write_json(path, {"a": "é", "b": 1})
    assert storage.read_bytes(path) == first
    assert storage.read_json(path) == {"a": "é", "b": 1}


def test_unreadable_json_is_named(base: str) -> None:
    path = storage.join(base, "bad.json")
    storage.publish_bytes(path, b"{")
    with pytest.raises(InputError, match=r"bad\.json: not valid JSON"):
        storage.read_json(path)
    with pytest.raises(InputError, match=r"none\.json: no such file"):
        storage.read_json(storage.join(base, "none.json"))


def test_fingerprint_changes_with_the_content(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    storage.publish_bytes(path, b"one")
    before = storage.fingerprint(path)
    assert storage.fingerprint(path) == before
    storage.publish_bytes(path, b"three")
    assert storage.fingerprint(path) != before
    with pytest.raises(InputError, match="no such file"):
        storage.fingerprint(str(tmp_path / "absent"))


def test_remove_tree_of_nothing_is_nothing(base: str) -> None:
    storage.remove_tree(storage.join(base, "absent"))
    storage.publish_bytes(storage.join(base, "t", "u"), b"")
    storage.remove_tree(storage.join(base, "t"))
    assert not storage.exists(storage.join(base, "t", "u"))


def test_unknown_store_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no such store"):
        storage.split("nostore://x")


def test_a_text_that_is_no_path_is_no_file() -> None:
    assert not storage.is_file("nostore://x")
    assert not storage.is_file("just words\0and a NUL")


class Upload(AbstractBufferedFile):
    """An upload as object stores do it: what was written stands under the name when the file is closed."""

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            Bucket.objects[self.path] = self.buffer.getvalue()
        return True

    def discard(self) -> None:
        Bucket.discarded.append(self.path)


class Bucket(AbstractFileSystem):
    protocol = "bucket"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    discarded: ClassVar[list[str]] = []

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Upload:
        return Upload(self, path, mode, size=0)


def test_an_upload_that_fails_halfway_leaves_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    storage.publish_bytes("bucket://b/whole", b"grain")
    assert Bucket.objects == {"b/whole": b"grain"}

    def interrupted(source: Any, target: Any, length: int) -> None:
        target.write(source.read(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        storage.publish_bytes("bucket://b/half", b"grain")
    gc.collect()
    assert Bucket.objects == {"b/whole": b"grain"}
    assert Bucket.discarded == ["b/half"]


def test_a_file_in_writing_is_not_listed(tmp_path: Path) -> None:
    storage.publish_bytes(str(tmp_path / ".hidden"), b"")
    with storage.publish(str(tmp_path / "a.json")) as file:
        file.write(b"{")
        (torn,) = (path for path in tmp_path.iterdir() if path.name.endswith(".tmp"))
        assert storage.is_temporary(str(torn))
        assert storage.list_files(str(tmp_path)) == [str(tmp_path / ".hidden")]
    assert storage.list_files(str(tmp_path)) == [str(tmp_path / ".hidden"), str(tmp_path / "a.json")]


def test_json_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run.json", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            storage.read_json(str(path))


def test_a_folder_in_which_somebody_goes_on_writing_is_an_error_after_some_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def rmtree(path: str) -> None:
        tries.append(path)
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(filesystem.shutil, "rmtree", rmtree)
    monkeypatch.setattr(filesystem.time, "sleep", lambda seconds: None)
    with pytest.raises(OSError, match="not empty"):
        filesystem.remove_tree(str(tmp_path))
    assert len(tries) > 1
    tries.clear()
    monkeypatch.setattr(filesystem.shutil, "rmtree", lambda path: tries.append(path) if tries else rmtree(path))
    filesystem.remove_tree(str(tmp_path))
    assert len(tries) == 2


def room(path: Path) -> str:
    """The size of the file system of ``path``, as the system tells it elsewhere."""
    return f"of {shutil.disk_usage(path).total / 2**20:,.1f} MiB are free"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("write", [storage.publish_bytes, storage.create_bytes])
def test_a_full_disk_is_told_with_the_path_and_its_room_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, number: int
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    path = str(tmp_path / "new" / "a.bin")
    with pytest.raises(storage.FullError) as caught:
        write(path, b"grain")
    error = pickle.loads(pickle.dumps(caught.value))  # errors travel between processes
    assert isinstance(error, QuernError)
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (number, path)
    assert str(error).startswith(f"{path}: {os.strerror(number)} (")
    assert room(tmp_path) in str(error)
    assert str(error).endswith("; make room and the same command goes on, or give another folder")
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device is always full")
def test_a_full_disk_is_known_by_the_error_of_whatever_wrote(tmp_path: Path) -> None:
    def by_arrow() -> None:
        with pa.OSFile("/dev/full", "wb") as file:
            file.write(b"grain")

    def by_python() -> None:
        with open("/dev/full", "wb") as file:
            file.write(b"grain")

    def by_another() -> None:
        raise RuntimeError("IOError: [Errno 28] No space left on device")

    path = str(tmp_path / "a.bin")
    for write in (by_arrow, by_python, by_another):
        with pytest.raises(storage.FullError) as caught, storage.publish(path):
            write()
        assert caught.value.filename == path
        assert os.listdir(tmp_path) == []
    for other in (OSError(errno.EACCES, "no"), RuntimeError("no"), QuernError("a page says: No space left on device")):
        with pytest.raises(type(other)) as caught_other, storage.publish(path):
            raise other
        assert caught_other.value is other
