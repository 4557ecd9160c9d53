"""What stands in a run and is not quern's: looked through for what was purged where it can be read, else named."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from typer.testing import CliRunner

from quern.cli.main import app
from quern.lineage.purge.proof import check_strangers as C
from quern.lineage.purge.proof.check_audit import Purged
from quern.lineage.purge.proof.findings import Check
from support.named_cases import with_each
from support.purge import purge_case as P
from support.purge.proof_case import below, failed, prove

WHO, OTHER = bytes(range(16)), bytes(range(16, 32))
TEXT, ANOTHER = "The text that\nwas purged, „so“.", "a text that was kept"


def look(run: Path, *, deep: bool = False, entries: int = 1) -> Check:
    ids = np.array([WHO], "S16")
    texts = np.array([hashlib.blake2b(TEXT.encode(), digest_size=16).digest()], "S16")
    return C.check_strangers(str(run), None, Purged(ids, texts, ids[:0], [{}] * entries), deep=deep)


def parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def two(first: Any, second: Any, kind: pa.DataType) -> pa.Array:
    return pa.array([first, second], kind)


#: What holds a doc_id, and what holds a text; the row or line where it is found.
IDS: dict[str, tuple[bytes, int | None]] = {
    "a.parquet": (parquet({"doc_id": two(OTHER, WHO, pa.binary(16))}), 1),
    "binary": (parquet({"x": two(OTHER, WHO, pa.binary())}), 1),
    "hex in Parquet": (parquet({"x": [f"doc {WHO.hex()}!", None]}), 0),
    "many rows": (parquet({"x": pa.array([OTHER] * 1000 + [WHO], pa.binary(16))}), 1000),
    "in lists": (parquet({"x": two([OTHER], [OTHER, WHO], pa.list_(pa.binary(16)))}), None),
    "in structs": (parquet({"x": two({"y": OTHER}, {"y": WHO}, pa.struct({"y": pa.binary(16)}))}), 1),
    "lines": (jsonl({"id": OTHER.hex()}, {"id": WHO.hex().upper()}), 1),
    "page.html": (f'<p data-doc="{WHO.hex()}">'.encode(), 0),
    "a.csv.gz": (gzip.compress(f"id,n\n{OTHER.hex()},1\n{WHO.hex()},2\n".encode()), 2),
    "a.zst": (zstandard.compress(parquet({"x": two(WHO, OTHER, pa.binary(16))})), 0),
}  # fmt: skip
TEXTS: dict[str, tuple[bytes, int | None]] = {
    "a.parquet": (parquet({"text": [ANOTHER, None, TEXT]}), 2),
    "dictionary": (parquet({"text": pa.array([ANOTHER, TEXT]).dictionary_encode()}), 1),
    "in maps": (parquet({"x": two([], [("a", TEXT)], pa.map_(pa.string(), pa.string()))}), None),
    "a.json": (json.dumps([{"pages": [{"text": TEXT}]}], indent=2).encode(), None),
    "a.jsonl": (jsonl({"text": ANOTHER}, {"text": TEXT}), 1),
    "a.txt": (TEXT.encode(), None),
    "a.txt with an end": (b"\xef\xbb\xbf" + TEXT.encode() + b"\r\n", None),
    "a.txt.gz": (gzip.compress(TEXT.encode()), None),
    "two members": (gzip.compress(jsonl(ANOTHER)) + gzip.compress(jsonl(TEXT)), 1),
    "a.jsonl.zst": (b"".join(map(zstandard.compress, (jsonl([ANOTHER]), b"", b"", jsonl([TEXT])))), 1),
    "parquet.gz": (gzip.compress(parquet({"text": [TEXT]})), 0),
}


def test_a_doc_id_is_found_in_every_form(tmp_path: Path) -> None:
    for name, (data, _) in IDS.items():
        (tmp_path / name).write_bytes(data)
    check = look(tmp_path)
    found = {(found.file, found.row, found.doc_id) for found in check.findings}
    assert found >= {(name, row, WHO.hex()) for name, (_, row) in IDS.items()}
    assert {who for _, _, who in found} == {WHO.hex()}
    assert (check.counts["files"], check.unknown) == (len(IDS), [])


def test_a_text_is_found_in_every_form(tmp_path: Path) -> None:
    for name, (data, _) in TEXTS.items():
        (tmp_path / name).write_bytes(data)
    assert look(tmp_path).num_findings == 0  # a text is looked for with --deep alone
    check = look(tmp_path, deep=True)
    assert {(found.file, found.row) for found in check.findings} >= {(name, row) for name, (_, row) in TEXTS.items()}
    assert {found.what for found in check.findings} == {"is the very text of a purged document"}
    assert check.unknown == []


def test_what_holds_neither_is_said_and_no_finding(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, data in (("b/notes.txt", ANOTHER.encode()), ("z.parquet", parquet({"x": [OTHER]}))):
        (tmp_path / name).write_bytes(data)
    check = look(tmp_path, deep=True)
    assert (check.status, check.unknown) == ("pass", [])
    (note,) = check.notes
    assert note.startswith("2 files that quern did not place were looked through: first ")
    (note,) = look(tmp_path, entries=0).notes
    assert "were found in the run" in note


def test_a_place_that_only_looks_like_one(tmp_path: Path) -> None:
    """Deeper, under another name, or with nothing that it belongs to."""
    names = (
        "documents/old/sample/a.parquet", "documents/web/.a.parquet", "documents/a.parquet", "backup/run.json",
        "audit/00007.parquet", ".purge/condemned.parquet", "tokens/web/a/shard_00000.bin", "tokens/a.parquet",
        "tokens/web/a.spans.parquet", "commits/pages/web/a.parquet", "lineage/a.parquet", "report.html.gz",
        "lineage/segment_0/rows",
    )  # fmt: skip
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(IDS["a.parquet"][0])
    assert {found.file for found in look(tmp_path).findings} == set(names)


def test_what_quern_places_is_not_looked_through(tmp_path: Path) -> None:
    digits = "0" * 32
    names = (
        "run.json", "status.json", "stats.json", "report.html", "consumers.jsonl", ".lock", "verdicts/web/a-0.parquet",
        "documents/web/a-0.parquet", "signatures/web/a-0.parquet", "duplicates/decisions.parquet",
        "duplicates/clusters.parquet", "commits/pages/web/a-0.json", "commits/shards/all/version.json",
        "tokens/VERSION.json", "tokens/encoding.tiktoken", "tokens/changes.v2.parquet", "tokens/decisions.v12.parquet",
        "tokens/web/manifest.json", "tokens/web.val/manifest.v3.json", "tokens/web/shard_00000.bin",
        "tokens/web/shard_00012.v2.spans.parquet", "audit/00001.json", "audit/00001.parquet",
        "audit/00001.files.parquet", ".purge/held.json", ".work/pages/a", "lineage/index.json", "lineage/.lock",
        f"lineage/segment_{digits}/by_doc.high", f"lineage/spans_{digits}/stream_000.starts",
        f"lineage/spans_{digits}/of.00000", f"lineage/duplicates_{digits}/record.json", f".a.{digits}.tmp",
    )  # fmt: skip
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(IDS["a.parquet"][0])
    check = look(tmp_path)
    assert (check.counts["files"], check.findings, check.notes) == (0, [], [])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Links and pipes are not opened: one would lead out of the run, the other would never end."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.parquet").write_bytes(IDS["a.parquet"][0])
    run = tmp_path / "run"
    (run / "documents").mkdir(parents=True)
    (run / "documents/old").symlink_to(outside)
    (run / "a.parquet").symlink_to(outside / "a.parquet")
    os.mkfifo(run / "pipe")
    (run / "shard.bin").write_bytes(b"\0\1" * 50)
    (run / "latin").write_bytes("Grüße".encode("latin-1"))
    (run / "torn.parquet").write_bytes(IDS["a.parquet"][0][:-9])
    (run / "torn.gz").write_bytes(gzip.compress(os.urandom(2000))[:900])
    check = look(run, deep=True)
    told = dict(line.split(": ", 1) for line in check.unknown)
    assert told.keys() == {"documents/old", "a.parquet", "pipe", "shard.bin", "latin", "torn.parquet", "torn.gz"}
    assert told["documents/old"] == told["a.parquet"] == "is a symbolic link, which is not followed"
    assert told["shard.bin"] == told["latin"] == "is neither Parquet nor UTF-8 text"
    assert (check.findings, check.status) == ([], "unknown")
    assert check.notes == ["7 files that quern did not place were not read, or not to the end: first a.parquet"]


def test_many_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    for number in range(C._NAMED + 3):
        (tmp_path / f"{number:03}").write_bytes(b"\0")
    check = look(tmp_path)
    assert check.unknown[-1] == "3 more files that quern did not place could not be read"
    assert len(check.unknown) == C._NAMED + 1


def test_a_text_larger_than_memory_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C, "_WHOLE", 256)
    rows = [{"text": ANOTHER, "n": number} for number in range(40)]
    (tmp_path / "lines").write_bytes(jsonl(*rows, {"text": TEXT}, *rows))
    (tmp_path / "text").write_bytes(f"{ANOTHER}\n".encode() * 40 + WHO.hex().encode() + b"\nend")
    (tmp_path / "wide").write_bytes(WHO.hex().encode() + b"\n" + b"x" * 1000)
    check = look(tmp_path, deep=True)
    assert {(found.file, found.row) for found in check.findings} == {("lines", 40), ("text", 40), ("wide", 0)}
    told = dict(line.split(": ", 1) for line in check.unknown)
    assert told.keys() == {"text", "wide"}
    assert "only its lines were compared" in told["text"]
    assert "has a line of more than" in told["wide"]


def test_a_training_run_is_named(tmp_path: Path) -> None:
    for name in ("models/one/ledger.jsonl", "models/one/a.parquet", "documents/web/ledger.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(IDS["a.parquet"][0])
    check = look(tmp_path)
    assert {found.file for found in check.findings} == {"documents/web/ledger.jsonl"}
    assert "1 training run in the run's folder was not looked through: models/one" in check.notes


@pytest.mark.slow
@with_each(("documents/old", "documents"), ("backup", "documents"), ("backup/tokens", "tokens/web"))
def test_a_copy_in_the_run_is_found(copy: str, source: str, *, case: P.Case, made: P.Case) -> None:
    """Of its texts as they were before the purge, where no check of tables looks."""
    shutil.copytree(made.run / source, case.run / copy)
    names = {below(case, path) for path in (case.run / copy).rglob("*") if path.is_file()}
    found = failed(case, deep=True)
    assert found.keys() == {"other files"}
    assert {file for file, _, _ in found["other files"]} <= names
    (told,) = [check for check in prove(case).checks if check.name == "other files"]
    assert told.num_findings  # by doc_ids alone
    shutil.rmtree(case.run / copy)


@pytest.mark.slow
def test_the_verdict_names_them(case: P.Case) -> None:
    arguments = ["lineage", "verify", str(case.run), "--purge-list", str(case.purge_list), "--deep"]

    def told(write: Callable[[], Any], code: int) -> str:
        write()
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == code, done.output
        return done.stdout.splitlines()[-1]

    line = told(lambda: (case.run / "notes.txt").write_text("mine"), 0)
    assert "nothing of them is left; " in line
    assert line.endswith("; 1 file that quern did not place was looked through: notes.txt")
    assert "not anchored" in line  # the log was made by hand
    line = told(lambda: (case.run / "a.npy").write_bytes(b"\0"), 0)
    assert "nothing of them is found, but not everything could be looked at" in line
    assert line.endswith("; 1 file that quern did not place was not read, or not to the end: a.npy")
    copy = case.run / "audit/00002.parquet"
    line = told(lambda: pq.write_table(pa.table({"id": [case.deletion_set[0]]}), copy), 1)
    assert "1 finding;" in line
