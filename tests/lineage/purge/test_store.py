"""Texts, audit log and proof of a run that lies on an S3 store."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.errors import QuernError
from quern.lineage.purge.apply.clean import clean
from quern.lineage.purge.proof.verify import verify
from quern.lineage.purge.record import audit
from quern.remote.objects import Objects
from quern.remote.retry import Backoff
from support.purge import purge_case as P
from support.remote import s3_server

pytestmark = pytest.mark.slow


@pytest.fixture
def server(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.Server]:
    monkeypatch.setattr(sys.modules[Objects.__module__], "Backoff", partial(Backoff, base_s=0.05, cap_s=0.5))
    with s3_server.bucket(port) as server:
        for name, value in server.environment(QUERN_STORE_TIMEOUT_S="5", QUERN_STORE_PATIENCE_S="20").items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> P.Case:
    return P.make(tmp_path_factory.mktemp("made"), documents=120, files=1, shard_tokens=9000)


def upload(server: s3_server.Server, run: Path) -> None:
    for path in run.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            server.write(str(path.relative_to(run)), data)


def test_texts_go_as_on_a_disk(server: s3_server.Server, made: P.Case, tmp_path: Path) -> None:
    case = made.at(tmp_path)
    upload(server, case.run)
    server.write(".work/part", b"text")
    there = clean(server.url, case.table(), P.PURGE)
    here = clean(str(case.run), case.table(), P.PURGE)
    assert there.texts == here.texts
    assert there.notes == ()
    assert clean(server.url, case.table(), P.PURGE) == there
    changed = {change.path: change for change in there.changes}
    assert changed.keys() == {change.path for change in here.changes}
    for change in here.changes:
        if change.path != "report.html":  # which says where its run is
            assert changed[change.path] == change
            assert server.read(change.path) == (case.run / change.path).read_bytes()
    for path in (case.run / "commits").rglob("*.json"):
        assert server.read(str(path.relative_to(case.run))) == path.read_bytes()
    assert not any(name.startswith(".work") for name in server.objects())


def test_the_audit_log_is_appended_to(server: s3_server.Server, made: P.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    first = P.append(server.url, P.told(id="a"), made.table(), ())
    second = P.append(server.url, P.told(id="b"), made.table(), ())
    assert P.append(server.url, P.told(id="b"), made.table(), ()) == second
    assert (first.number, second.number, second.record["previous"]) == (1, 2, first.sha256)
    assert audit.numbers(server.url) == [1, 2]
    before = server.read("audit/00001.json")
    monkeypatch.setattr(audit, "last_entry", lambda run: None)
    with pytest.raises(QuernError, match="another process has added this entry"):
        P.append(server.url, P.told(id="c"), made.table(), ())
    assert server.read("audit/00001.json") == before


def test_an_object_is_created_once(server: s3_server.Server) -> None:
    storage.create_bytes(f"{server.url}/a", b"first")
    storage.create_bytes(f"{server.url}/a", b"first")  # the answer to the first try may have been lost
    with pytest.raises(FileExistsError):
        storage.create_bytes(f"{server.url}/a", b"second")
    assert server.read("a") == b"first"


def test_the_proof(server: s3_server.Server, made: P.Case, tmp_path: Path) -> None:
    """It holds for the copy of a purged run; what is put back is named."""
    case = P.purge(made.at(tmp_path))
    upload(server, case.run)
    found = verify(server.url, deep=True)
    assert {check.name: check.status for check in found.checks if check.status != "pass"} == {"left over": "unknown"}
    assert found.holds
    local = verify(str(case.run), deep=True)
    assert [check.counts for check in found.checks] == [check.counts for check in local.checks]

    name = f"documents/{case.row_of[case.placed[0]]['file']}"
    server.write(name, (made.run / name).read_bytes())
    old = next(
        path for path in (made.run / "tokens/web").glob("*.bin") if not (case.run / "tokens/web" / path.name).exists()
    )
    server.write(f"tokens/web/{old.name}", old.read_bytes())
    shard = next((case.run / "tokens").rglob("*.v2.bin"))
    data = bytearray(shard.read_bytes())
    where = pq.read_table(shard.with_suffix("").with_suffix(".v2.spans.parquet")).to_pylist()
    span = next(row for row in where if row["purged"])
    data[2 * span["start"]] ^= 1
    server.write(str(shard.relative_to(case.run)), bytes(data))
    failed = {check.name: check for check in verify(server.url).checks if check.num_findings}
    assert failed.keys() == {"tokens", "checksums", "documents", "files", "left over"}
    assert [found.doc_id for found in failed["tokens"].findings] == [span["doc_id"].hex()]
    rows = pq.read_table(io.BytesIO((made.run / name).read_bytes())).to_pylist()
    assert {found.row for found in failed["documents"].findings} == {
        at for at, row in enumerate(rows) if row["doc_id"] in case.deletion_set
    }
    assert [found.file for found in failed["left over"].findings] == [f"tokens/web/{old.name}"]
