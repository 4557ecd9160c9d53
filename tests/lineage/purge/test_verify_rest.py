"""The proof of all else: the audit log, what is left over, the purge list, pages; and the command."""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.data_pipeline.stages.tombstones import PURGE_SCHEMA
from quern.errors import InputError, QuernError
from quern.lineage.purge.apply import finish
from quern.lineage.purge.apply.transaction import Request, purge
from quern.lineage.purge.proof.findings import MAX_FINDINGS, Check
from quern.lineage.purge.proof.verify import Proof, verify
from quern.lineage.purge.record import audit
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import Wanted
from support.purge import purge_case as P
from support.purge.proof_case import below, failed, prove, spot

pytestmark = pytest.mark.slow


def asked(case: P.Case, doc_ids: Iterable[bytes], mode: Any = "mask", **more: Any) -> Request:
    """That these documents be purged."""
    wanted = Wanted(doc_ids=frozenset(doc_ids))
    return Request(str(case.run), mode, lambda run: find_deletion_set(run, wanted), {"doc": ["…"]}, **more)


def check_of(proof: Proof, name: str) -> Check:
    (check,) = [check for check in proof.checks if check.name == name]
    return check


# ---- the audit log


def test_a_forged_entry(case: P.Case) -> None:
    """An entry that was changed is found by the one behind it."""
    P.append(str(case.run), P.told(id="second", version_before=2, version_after=2), case.table(()), ())
    path = case.run / "audit/00001.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "reason": "another"}))
    assert failed(case)["audit"] == [("audit/00002.json", None, None)]


def test_a_document_taken_off_an_entry(case: P.Case) -> None:
    """Also where its entry is forged with it: the version's own changes tell of it."""
    path = case.run / "audit/00001.parquet"
    doc_id = case.placed[0]
    table = pq.read_table(path)
    left = pa.Table.from_pylist([row for row in table.to_pylist() if row["doc_id"] != doc_id], table.schema)
    pq.write_table(left, path)
    found = failed(case)["audit"]
    assert {file for file, _, _ in found} == {"audit/00001.parquet", "tokens/changes.v2.parquet"}
    entry = case.run / "audit/00001.json"
    record = json.loads(entry.read_text())
    record["documents"] = {
        "count": len(left), "sha256": P.versions.sha256(path), "digest": audit.digest_of(left["doc_id"]),
        "by_why": {**record["documents"]["by_why"], "selected": len(left)},
    }  # fmt: skip
    entry.write_text(json.dumps(record))
    ((file, _, who),) = failed(case)["audit"]
    assert (file, who) == ("tokens/changes.v2.parquet", doc_id.hex())


@pytest.mark.parametrize("end", [".parquet", ".files.parquet", ".json"])
def test_a_missing_piece_of_an_entry(case: P.Case, end: str) -> None:
    (case.run / f"audit/00001{end}").unlink()
    found = {file for file, _, _ in failed(case)["audit"]}
    expected = {f"audit/00001{end}"} if end != ".json" else {"tokens/VERSION.json"}
    assert expected <= found <= expected | {"tokens/changes.v2.parquet"}


def test_a_missing_entry(case: P.Case) -> None:
    for number in (2, 3):
        told = P.told(id=str(number), version_before=2, version_after=2)
        P.append(str(case.run), told, case.table(()), ())
    for path in (case.run / "audit").glob("00002*"):
        path.unlink()
    assert failed(case)["audit"] == [("audit/00003.json", None, None)]


def test_the_last_entry_is_anchored(made: P.Case, tmp_path: Path) -> None:
    """An edit of it, of an earlier one with the chain made anew, and its removal; nothing is purged on top of one."""
    case = made.at(tmp_path)
    for doc_id in (case.placed[0], case.placed[5]):
        purge(asked(case, [doc_id], reason="asked for"))
    paths = [case.run / f"audit/0000{number}.json" for number in (1, 2)]
    bytes_of = [path.read_bytes() for path in paths]
    told = json.loads((case.run / "tokens/VERSION.json").read_text())["audit"]
    assert told == {"entry": 2, "sha256": P.versions.sha256(paths[1])}

    def findings() -> list[str]:
        check = check_of(verify(str(case.run)), "audit")
        assert check.notes == []
        return [found.file for found in check.findings]

    assert findings() == []
    for key in ("reason", "time"):
        paths[1].write_text(json.dumps({**json.loads(bytes_of[1]), key: "2020-01-01T00:00:00+00:00"}))
        assert findings() == ["tokens/VERSION.json"]
    paths[0].write_text(json.dumps({**json.loads(bytes_of[0]), "reason": "another"}))
    paths[1].write_text(json.dumps({**json.loads(bytes_of[1]), "previous": P.versions.sha256(paths[0])}))
    assert findings() == ["tokens/VERSION.json"]
    with pytest.raises(InputError, match="entry 2 of the audit log was changed, or one before it"):
        purge(asked(case, [case.placed[9]], reason="asked for"))
    paths[0].write_bytes(bytes_of[0])
    paths[1].unlink()
    assert "tokens/VERSION.json" in findings()


def test_who_cannot_sign_cannot_change_the_log(case: P.Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the checksums and ``VERSION.json`` made anew; the signature is an HMAC-SHA256."""
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(secrets.token_bytes(32))
    other.write_bytes(secrets.token_bytes(64))
    entry, version = case.run / "audit/00001.json", case.run / "tokens/VERSION.json"

    def look(*arguments: str, key: Path = key) -> tuple[int, list[str]]:
        result = CliRunner().invoke(
            app, ["lineage", "verify", str(case.run), "--json", "--audit-key", str(key), *arguments]
        )
        checks = json.loads(capfd.readouterr().out)["checks"]
        return result.exit_code, [found["file"] for check in checks for found in check["findings"]]

    assert look() == (1, ["audit/00001.sig"])
    assert look("--sign") == look() == (0, [])
    assert look(key=other) == look("--sign", key=other) == (1, ["audit/00001.sig"])
    signed = f"quern audit 1 {P.versions.sha256(entry)}".encode()
    inner, outer = (bytes(byte ^ pad for byte in key.read_bytes().ljust(64, b"\0")) for pad in (0x36, 0x5C))
    made = hashlib.sha256(outer + hashlib.sha256(inner + signed).digest()).hexdigest()  # RFC 2104
    assert (case.run / "audit/00001.sig").read_text() == f"{made}\n"
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "reason": "another"}))
    told = {"entry": 1, "sha256": P.versions.sha256(entry)}
    version.write_text(json.dumps({**json.loads(version.read_text()), "audit": told}))
    assert look() == look("--sign") == (1, ["audit/00001.sig"])


@pytest.mark.parametrize(("size", "told"), [(31, "got 31"), (4097, "got more"), (None, "no such file")])
def test_what_is_no_key(case: P.Case, tmp_path: Path, size: int | None, told: str) -> None:
    if size is not None:
        (tmp_path / "key").write_bytes(b"k" * size)
    for arguments in (["--audit-key", str(tmp_path / "key")], ["--sign"]):
        result = CliRunner().invoke(app, ["lineage", "verify", str(case.run), *arguments])
        assert result.exit_code == 2
        assert (told if "--audit-key" in arguments else "--sign: expected a key") in result.stderr


# ---- what is left over


def superseded(case: P.Case, made: P.Case) -> list[str]:
    """Shard, spans and manifest that the mask took the place of, put back."""
    shard, spans, _, _ = spot(case, case.placed[0])
    paths = (shard, spans, shard.parent / "manifest.v2.json")
    names = [below(case, path).replace(".v2.", ".") for path in paths]
    for name in names:
        (case.run / name).write_bytes((made.run / name).read_bytes())
    return names


def test_an_old_shard(case: P.Case, made: P.Case) -> None:
    names = superseded(case, made)
    (case.run / "tokens/changes.v3.parquet").write_bytes(b"")
    assert {file for file, _, _ in failed(case)["left over"]} == {"tokens/changes.v3.parquet", *names}


def test_an_old_shard_that_is_being_read(case: P.Case, made: P.Case) -> None:
    *_, manifest = superseded(case, made)
    assert not any("reader" in found.what for found in check_of(prove(case), "left over").findings)
    with (case.run / manifest).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        check = check_of(prove(case), "left over")
    assert check.num_findings == 3
    assert all("a reader has it open" in found.what for found in check.findings)


@pytest.mark.parametrize(
    "name", [".purge/intent.json", ".work/a", f"documents/web/.x.{'0' * 32}.tmp", f".report.html.{'0' * 32}.tmp"]
)
def test_what_was_cut_off(case: P.Case, name: str) -> None:
    path = case.run / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    assert failed(case)["left over"] == [(name if name != ".work/a" else ".work", None, None)]


# ---- the purge list


@pytest.mark.parametrize("column", ["doc_id", "canonical_url", "post_filter_hash"])
def test_a_line_of_the_purge_list_is_gone(case: P.Case, column: str) -> None:
    (path,) = case.purge_list.glob("*.parquet")
    table = pq.read_table(path)
    rows = table.to_pylist()
    value = next(row[column] for row in rows if row[column] is not None)
    rows = [{**row, column: None if row[column] == value else row[column]} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows, PURGE_SCHEMA), path)
    found = failed(case)
    assert found == {"purge list": [(str(case.purge_list), None, value.hex() if column == "doc_id" else None)]}


def test_a_purge_list_that_is_gone(case: P.Case) -> None:
    (path,) = case.purge_list.glob("*.parquet")
    path.unlink()
    case.purge_list.rmdir()
    assert failed(case) == {"purge list": [(str(case.purge_list), None, None)]}


# ---- pages


def test_a_report_that_shows_a_purged_text(case: P.Case, made: P.Case) -> None:
    (case.run / "report.html").write_bytes((made.run / "report.html").read_bytes())
    found = failed(case)
    assert found.keys() == {"pages"}
    assert {file for file, _, _ in found["pages"]} == {"report.html"}
    assert {who for _, _, who in found["pages"]} <= {doc_id.hex() for doc_id in case.deletion_set}


def test_a_report_that_does_not_say_whose_texts_it_shows(case: P.Case) -> None:
    (case.run / "report.html").write_text('<div class="text">somebody’s</div>')
    found = prove(case)
    assert found.holds
    (check,) = [check for check in found.checks if check.status == "unknown"]
    assert check.unknown == ["report.html: does not say whose texts it shows"]


def test_a_page_of_a_training_run(case: P.Case) -> None:
    """Of one that the audit log names, one that is given, one that is registered."""
    who = case.deletion_set[0].hex()
    registered = case.run.with_name("registered")
    line = {"time": "t", "train_run": str(registered), "order": "o", "identities": []}
    (case.run / "consumers.jsonl").write_text(json.dumps(line) + "\n")
    pages = []
    for train_run in (case.run.with_name("train"), case.run.with_name("given"), registered):
        page = train_run / "forensics" / "step_00000007.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<p class="text" data-doc="{who}">the text</p>')
        pages.append(page)
    found = failed(case, train_runs=[str(case.run.with_name("given"))])
    assert {Path(file).resolve() for file, _, _ in found["pages"]} == {page.resolve() for page in pages}
    assert {who for _, _, who in found["pages"]} == {who}


# ---- the rest


def test_findings_are_bounded() -> None:
    check = Check("a", "b")
    for number in range(MAX_FINDINGS + 5):
        check.found("file", "what", number)
    assert (len(check.findings), check.num_findings, check.status) == (MAX_FINDINGS, MAX_FINDINGS + 5, "fail")


def test_what_is_no_data_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a data run"):
        verify(str(tmp_path))


@pytest.mark.parametrize(
    "modes",
    [
        ("mask", "rewrite"),
        pytest.param(("mask", "mask"), marks=pytest.mark.long),
        pytest.param(("rewrite", "rewrite"), marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_a_purge_as_it_is_made(made: P.Case, tmp_path: Path, modes: tuple[Any, Any]) -> None:
    """Not by hand: two of them, one after the other."""
    case = made.at(tmp_path)
    for number, (mode, doc_ids) in enumerate(zip(modes, (case.placed[:4], case.placed[4:9]), strict=True), 1):
        report = purge(asked(case, doc_ids, mode))
        assert report["documents_purged"] >= len(doc_ids) - 1
        found = verify(str(case.run), deep=True)
        assert [(check.name, check.findings, check.unknown) for check in found.checks if check.status != "pass"] == []
        assert (found.purges, found.version) == (number, number + 1)


def test_the_command_finishes_a_purge_that_was_cut_off(
    made: P.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case = made.at(tmp_path)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(finish, "clean", fails)
        with pytest.raises(QuernError, match="the purge is not at its end"):
            purge(asked(case, case.placed[:4]))
    assert not verify(str(case.run)).holds
    done = CliRunner().invoke(app, ["lineage", "verify", str(case.run), "--json", "--deep"])
    assert done.exit_code == 0, done.output
    told = json.loads(capfd.readouterr().out)
    assert (told["holds"], told["purges"], told["version"]) == (True, 1, 2)
    assert "had been cut off; it is finished" in told["recovered"]
    assert {check["status"] for check in told["checks"]} == {"pass"}


@pytest.mark.parametrize(
    "broken", [{"sources": {"web": {}}}, {"sources": {"web": None}}, {"sources": {}, "version": "x"}]
)
def test_a_damaged_version_is_no_traceback(case: P.Case, broken: dict[str, Any]) -> None:
    (case.run / "tokens/VERSION.json").write_text(json.dumps(broken))
    found = prove(case)
    assert not found.holds
    (case.run / "tokens/VERSION.json").write_text("[]")
    with pytest.raises(InputError, match="sources: expected a mapping"):
        prove(case)


def test_the_command(case: P.Case) -> None:
    arguments = ["lineage", "verify", str(case.run), "--purge-list", str(case.purge_list)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "nothing of them is left" in done.stdout
    done = CliRunner().invoke(app, [*arguments, "--train-run", "nowhere"])
    assert done.exit_code == 0, done.output
    assert "nothing of them is found, but not everything could be looked at" in done.stdout
    doc_id = next(own for own in case.deletion_set if own in case.listing.texts)
    path = case.run / "documents" / case.row_of[doc_id]["file"]
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        if row["doc_id"] == doc_id:
            row["text"] = "put back"
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    number = [row["doc_id"] for row in rows].index(doc_id)
    where = f"documents: {below(case, path)}: row {number}"
    assert f"{where}: text: is of a purged document ({doc_id.hex()})" in done.stdout
