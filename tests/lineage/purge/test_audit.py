"""The audit log: appended to, chained, without a text; written once for a purge that goes on after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.errors import InputError, QuernError
from quern.lineage.purge.record import audit
from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA
from quern.lineage.purge.tables.files import FileChange, changes_since, note_before, version_changes
from support.purge import purge_case as P

ROWS: list[dict[str, Any]] = [
    {
        "doc_id": bytes([n]) * 16, "source": "web", "partition": "part-000", "canonical_url": f"http://a.example/{n}",
        "post_filter_hash": bytes([n, 0]) * 8, "why": why, "through": None, "stage": None, "removed_as": None,
    }
    for n, why in ((3, "text"), (1, "selected"), (2, "duplicate"), (4, "selected"))
]  # fmt: skip
CONDEMNED = pa.Table.from_pylist(ROWS, DELETION_SET_SCHEMA)
CHANGES = [FileChange("tokens/web/b", "1" * 64, None), FileChange("documents/a", "2" * 64, "3" * 64)]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_an_entry_says_what_was_done(tmp_path: Path) -> None:
    entry = P.append(str(tmp_path), P.told(version_after=2), CONDEMNED, CHANGES)
    folder = tmp_path / "audit"
    assert {path.name for path in folder.iterdir()} == {"00001.json", "00001.parquet", "00001.files.parquet"}
    record = json.loads((folder / "00001.json").read_text())
    assert record == entry.record
    assert (record["number"], record["previous"], record["id"]) == (1, None, P.PURGE)
    assert (record["reason"], record["selection"], record["mode"]) == ("asked for", {"doc": ["…"]}, "mask")
    assert (record["version_before"], record["version_after"]) == (1, 2)
    told = record["documents"]
    assert told["count"] == 4
    assert told["by_why"] == {"selected": 2, "url": 0, "text": 1, "duplicate": 1}
    assert told["digest"] == sha256(b"".join(bytes([n]) * 16 for n in (1, 2, 3, 4)))
    assert told["sha256"] == sha256((folder / "00001.parquet").read_bytes())
    assert record["files"] == {"count": 2, "sha256": sha256((folder / "00001.files.parquet").read_bytes())}
    assert pq.read_table(folder / "00001.parquet").to_pylist() == sorted(ROWS, key=lambda row: row["doc_id"])
    assert pq.read_table(folder / "00001.files.parquet").to_pylist() == [
        {"path": "documents/a", "before": "2" * 64, "after": "3" * 64},
        {"path": "tokens/web/b", "before": "1" * 64, "after": None},
    ]


def test_each_entry_vouches_for_the_one_before(tmp_path: Path) -> None:
    for number in range(1, 4):
        entry = P.append(str(tmp_path), P.told(id=str(number)), CONDEMNED, ())
        assert entry.number == number
        previous = tmp_path / f"audit/{number - 1:05d}.json"
        assert entry.record["previous"] == (sha256(previous.read_bytes()) if number > 1 else None)
    assert audit.numbers(str(tmp_path)) == [1, 2, 3]
    last = audit.last_entry(str(tmp_path))
    assert last is not None
    assert last == audit.read_entry(str(tmp_path), 3)


def test_a_purge_has_one_entry(tmp_path: Path) -> None:
    """A purge that was cut off behind its entry does not write another, and changes no byte of it."""
    first = P.append(str(tmp_path), P.told(), CONDEMNED, CHANGES)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "audit").iterdir()}
    assert P.append(str(tmp_path), P.told(time="later"), CONDEMNED, ()) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "audit").iterdir()} == stamps


def test_tables_of_one_that_was_cut_off_are_written_over(tmp_path: Path) -> None:
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit/00001.parquet").write_bytes(b"half")
    P.append(str(tmp_path), P.told(), CONDEMNED, ())
    assert pq.read_table(tmp_path / "audit/00001.parquet").num_rows == 4


def test_an_entry_is_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    P.append(str(tmp_path), P.told(), CONDEMNED, ())
    before = (tmp_path / "audit/00001.json").read_bytes()
    monkeypatch.setattr(audit, "last_entry", lambda run: None)  # as another process saw it, a moment ago
    with pytest.raises(QuernError, match="another process has added this entry"):
        P.append(str(tmp_path), P.told(id="other"), CONDEMNED, ())
    assert (tmp_path / "audit/00001.json").read_bytes() == before


def test_the_purge_list_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = {"list": "lists/of mine", "file": "a.parquet", "sha256": "0" * 64}
    entry = P.append("run", P.told(purge_list=told), CONDEMNED, ())
    assert entry.record["purge_list"] == {**told, "list": str(tmp_path / "lists" / "of mine")}
    told = {**told, "list": "s3://bucket/lists"}
    assert P.append("run", P.told(id="b", purge_list=told), CONDEMNED, ()).record["purge_list"] == told


def test_other_columns_stay_out(tmp_path: Path) -> None:
    """What is condemned may come with more columns; none of them gets into the log."""
    with_text = CONDEMNED.append_column("text", pa.array(["the secret text"] * 4))
    P.append(str(tmp_path), P.told(), with_text, ())
    assert pq.read_schema(tmp_path / "audit/00001.parquet").names == DELETION_SET_SCHEMA.names
    assert not any(b"the secret text" in path.read_bytes() for path in (tmp_path / "audit").iterdir())


def test_what_is_no_entry_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"00001\.json: no such entry"):
        audit.read_entry(str(tmp_path), 1)
    (tmp_path / "audit").mkdir()
    path = tmp_path / "audit/00001.json"
    for content, said in (("{", "not valid JSON"), ("[]", "expected an entry"), ('{"kind": "purge"}', "in format 1")):
        path.write_text(content)
        with pytest.raises(InputError, match=said):
            audit.read_entry(str(tmp_path), 1)


# ---- which files changed


def test_what_was_there_before_is_noted_once(tmp_path: Path) -> None:
    run = str(tmp_path)
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    before = note_before(run, "p", "cleaned", lambda: ["b", "a", "missing"])
    assert before == {"a": sha256(b"1"), "b": sha256(b"2")}
    (tmp_path / "a").write_bytes(b"3")
    (tmp_path / "b").unlink()
    assert note_before(run, "p", "cleaned", lambda: pytest.fail("asked again")) == before
    assert list(changes_since(run, before)) == [
        FileChange("a", sha256(b"1"), sha256(b"3")),
        FileChange("b", sha256(b"2"), None),
    ]
    assert note_before(run, "another", "cleaned", lambda: ["a"]) == {"a": sha256(b"3")}


def test_two_versions_are_compared(tmp_path: Path) -> None:
    def version(number: int, shards: list[str]) -> dict[str, Any]:
        listed = [
            {"bin": f"web/{own}.bin", "sha256": own, "spans": f"web/{own}.s", "spans_sha256": own} for own in shards
        ]
        return {"sources": {"web": {"manifest": f"web/m{number}", "sha256": f"m{number}", "shards": listed}}}

    assert version_changes(version(1, ["x", "y"]), version(2, ["x", "z"])) == [
        FileChange("tokens/web/m1", "m1", None), FileChange("tokens/web/m2", None, "m2"),
        FileChange("tokens/web/y.bin", "y", None), FileChange("tokens/web/y.s", "y", None),
        FileChange("tokens/web/z.bin", None, "z"), FileChange("tokens/web/z.s", None, "z"),
    ]  # fmt: skip


# ---- a file where there is none


def test_a_file_is_created_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    storage.create_bytes(str(path), b"first")
    with pytest.raises(FileExistsError):
        storage.create_bytes(str(path), b"second")
    assert path.read_bytes() == b"first"
    assert [own.name for own in path.parent.iterdir()] == ["a"]


def test_of_many_at_once_one_creates_it(tmp_path: Path) -> None:
    path, done = str(tmp_path / "a"), []

    def create(data: bytes) -> None:
        try:
            storage.create_bytes(path, data)
            done.append(data)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(bytes([n]) * 1000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (data,) = done
    assert (tmp_path / "a").read_bytes() == data


def test_without_links_it_is_still_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    path = str(tmp_path / "a")
    storage.create_bytes(path, b"first")
    with pytest.raises(FileExistsError):
        storage.create_bytes(path, b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
