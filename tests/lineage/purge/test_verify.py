"""Every check of the proof: a fault is planted by hand, and named with its file and row by the check it is for."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.data_pipeline.tombstones import PURGE_SCHEMA
from quern.errors import InputError, QuernError
from quern.lineage.purge import audit, check_tokens, finish
from quern.lineage.purge.condemned import condemn
from quern.lineage.purge.findings import MAX_FINDINGS, Check
from quern.lineage.purge.select import Wanted
from quern.lineage.purge.transaction import Request, purge
from quern.lineage.purge.verify import Proof, verify

from . import purge_case as P


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> P.Case:
    """Before it was purged; the run of :func:`whole` is a copy."""
    return P.make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def whole(made: P.Case, tmp_path_factory: pytest.TempPathFactory) -> P.Case:
    folder = tmp_path_factory.mktemp("verify")
    train = folder / "train" / "forensics"
    train.mkdir(parents=True)
    (train / "step_00000001.html").write_text(f'<p class="text" data-doc="{"ab" * 16}">another text</p>')
    case = P.purge(made.at(folder), train_runs=("train",))
    return case


@pytest.fixture
def case(whole: P.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> P.Case:
    """The run, purged; its training run and its purge list are named relative to the working folder."""
    found = whole.at(tmp_path)
    monkeypatch.chdir(tmp_path)
    return found


def prove(case: P.Case, **more: Any) -> Proof:
    return verify(str(case.run), purge_list=str(case.purge_list), **more)


def failed(case: P.Case, **more: Any) -> dict[str, list[tuple[str, int | None, str | None]]]:
    """Check → (file, row, doc_id) of its findings."""
    return {
        check.name: [(found.file, found.row, found.doc_id) for found in check.findings]
        for check in prove(case, **more).checks
        if check.num_findings
    }


def spot(case: P.Case, doc_id: bytes) -> tuple[Path, Path, int, dict[str, Any]]:
    """Where a document stands now: shard, spans, row, span."""
    version = json.loads((case.run / "tokens/VERSION.json").read_text())
    for entry in version["sources"].values():
        for shard in entry["shards"]:
            rows = pq.read_table(case.run / "tokens" / shard["spans"]).to_pylist()
            for number, row in enumerate(rows):
                if row["doc_id"] == doc_id:
                    return case.run / "tokens" / shard["bin"], case.run / "tokens" / shard["spans"], number, row
    raise AssertionError(doc_id.hex())


def below(case: P.Case, path: Path) -> str:
    return str(path.relative_to(case.run))


def kept(case: P.Case) -> list[bytes]:
    """Documents that still have tokens."""
    placed = {row["doc_id"] for rows in case.listing.spans.values() for row in rows}
    return sorted(placed - set(case.condemned))


def relist(case: P.Case) -> None:
    """Give VERSION.json and the manifests the checksums that files have now: who planted the fault covers it up."""
    root = case.run / "tokens"
    version = json.loads((root / "VERSION.json").read_text())
    for stream, entry in version["sources"].items():
        manifest = json.loads((root / entry["manifest"]).read_text())
        for own, listed in zip(manifest["shards"], entry["shards"], strict=True):
            own["sha256"] = listed["sha256"] = P.versions.sha256(root / listed["bin"])
            own["spans_sha256"] = listed["spans_sha256"] = P.versions.sha256(root / listed["spans"])
        (root / entry["manifest"]).write_text(json.dumps(manifest))
        entry["sha256"] = P.versions.sha256(root / entry["manifest"])
        assert stream
    (root / "VERSION.json").write_text(json.dumps(version))


def put_back(path: Path, row: dict[str, Any], text: str) -> None:
    """A document's tokens where its span is: a token is a byte in these runs."""
    tokens = np.fromfile(path, "<u2")
    tokens[row["start"] : row["start"] + row["length"] - 1] = np.frombuffer(text.encode(), np.uint8)
    tokens.tofile(path)


# ---- a run from which nothing is missing


def test_a_purged_run_holds(case: P.Case) -> None:
    found = prove(case, deep=True)
    assert [(check.name, check.status) for check in found.checks] == [
        (name, "pass")
        for name in (
            "audit", "tokens", "checksums", "documents", "signatures", "verdicts", "files", "left over", "purge list",
            "pages",
        )
    ]  # fmt: skip
    assert (found.version, found.purges, found.documents, found.holds) == (2, 1, len(case.condemned), True)
    tokens, documents = found.checks[1].counts, found.checks[3].counts
    spans = [row for rows in case.listing.spans.values() for row in rows]
    assert tokens["spans"] == len(spans)
    assert tokens["tokens"] == sum(row["length"] for row in spans)
    assert tokens["purged spans"] == len(case.placed) > 10
    assert tokens["texts compared"] == len(spans) - len(case.placed)
    assert documents["purged rows"] == sum(doc_id in case.listing.texts for doc_id in case.condemned)


def test_a_run_that_was_never_purged_holds(made: P.Case) -> None:
    found = verify(str(made.run))
    assert found.holds
    assert (found.purges, found.documents, found.version) == (0, 0, 1)


def test_what_was_not_done_is_found(made: P.Case, tmp_path: Path) -> None:
    """An audit entry alone purges nothing: every place that can hold a text is named."""
    case = made.at(tmp_path / "copy")
    listed = P.write_purge_list(case)
    audit.append(str(case.run), P.told(purge_list=listed), case.table(), ())
    found = verify(str(case.run))
    counts = {check.name: check.num_findings for check in found.checks if check.num_findings}
    rows = [row for own in case.listing.documents.values() for row in own if row["doc_id"] in case.condemned]
    assert counts["tokens"] == len(case.placed)
    assert counts["documents"] == len(rows) + sum(row["extracted"] is not None for row in rows)
    assert counts["signatures"] == sum(row["kept"] for row in rows)
    assert counts.keys() == {"tokens", "documents", "signatures", "pages"}


# ---- tokens


def test_a_span_that_is_not_marked(case: P.Case) -> None:
    doc_id = case.placed[3]
    _, spans, number, _ = spot(case, doc_id)
    table = pq.read_table(spans)
    rows = table.to_pylist()
    rows[number]["purged"] = False
    pq.write_table(pa.Table.from_pylist(rows, table.schema), spans)
    relist(case)
    found = failed(case)
    assert found["tokens"] == [(below(case, spans), number, doc_id.hex())]
    assert {name for name, _, _ in found["files"]} == {below(case, spans), _manifest(case, spans)}


def _manifest(case: P.Case, spans: Path) -> str:
    return f"tokens/{spans.parent.name}/manifest.v2.json"


def test_one_token_put_back(case: P.Case) -> None:
    for place in ("first", "last"):
        doc_id = max(case.placed, key=lambda own: len(case.listing.texts[own]))
        shard, _, _, row = spot(case, doc_id)
        tokens = np.fromfile(shard, "<u2")
        at = row["start"] if place == "first" else row["start"] + row["length"] - 1
        old, tokens[at] = tokens[at], 65
        tokens.tofile(shard)
        relist(case)
        assert failed(case)["tokens"] == [(below(case, shard), None, doc_id.hex())]
        tokens[at] = old
        tokens.tofile(shard)


def test_tokens_are_found_wherever_blocks_begin(case: P.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    doc_id = max(case.placed, key=lambda own: len(case.listing.texts[own]))
    shard, _, _, row = spot(case, doc_id)
    tokens = np.fromfile(shard, "<u2")
    tokens[row["start"] + row["length"] - 2] = 65  # far behind the block in which the span begins
    tokens.tofile(shard)
    relist(case)
    for size in (7, 1001):
        monkeypatch.setattr(check_tokens, "_BLOCK", size)
        assert failed(case)["tokens"] == [(below(case, shard), None, doc_id.hex())]


@pytest.mark.parametrize("stretch", [1, 100, 1 << 20])
def test_the_text_under_another_name(case: P.Case, monkeypatch: pytest.MonkeyPatch, stretch: int) -> None:
    """The very text of a purged document in the place of another: only --deep can know."""
    monkeypatch.setattr(check_tokens, "_STRETCH", stretch)
    texts = case.listing.texts
    pairs = [
        (gone, own)
        for gone in case.placed
        for own in kept(case)
        if len(texts[gone].encode()) == len(texts[own].encode()) and texts[gone] != texts[own]
    ]
    gone, own = pairs[0]
    shard, spans, number, row = spot(case, own)
    put_back(shard, row, texts[gone])
    relist(case)
    assert "tokens" not in failed(case)
    assert failed(case, deep=True)["tokens"] == [(below(case, spans), number, own.hex())]


def test_a_document_with_a_purged_text_that_was_not_condemned(case: P.Case) -> None:
    """By its verdict, without a look at texts; its tokens and its stored text are named."""
    gone, own = case.condemned[0], kept(case)[5]
    assert case.row_of[gone]["post_filter_hash"]
    name = case.row_of[own]["file"]
    path = case.run / "verdicts" / name
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        if row["doc_id"] == own:
            row["post_filter_hash"] = case.row_of[gone]["post_filter_hash"]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    _, spans, number, _ = spot(case, own)
    found = failed(case)
    assert found["tokens"] == [(below(case, spans), number, own.hex())]
    assert (f"documents/{name}", own.hex()) in [(file, who) for file, _, who in found["documents"]]


def test_a_document_under_a_purged_url_that_was_not_condemned(case: P.Case) -> None:
    gone = next(doc_id for doc_id in case.condemned if case.row_of[doc_id]["canonical_url"])
    own = kept(case)[7]
    path = case.run / "verdicts" / case.row_of[own]["file"]
    table = pq.read_table(path)
    rows = table.to_pylist()
    scheme, _, rest = case.row_of[gone]["canonical_url"].partition("://")
    for row in rows:
        if row["doc_id"] == own:
            row["canonical_url"] = f"{'https' if scheme == 'http' else 'http'}://{rest}"
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    _, spans, number, _ = spot(case, own)
    assert failed(case)["tokens"] == [(below(case, spans), number, own.hex())]


@pytest.mark.parametrize("what", ["shard", "spans", "manifest", "ranks"])
def test_a_file_that_is_not_as_listed(case: P.Case, what: str) -> None:
    shard, spans, _, _ = spot(case, kept(case)[0])
    path = {
        "shard": shard, "spans": spans, "manifest": shard.parent / "manifest.v2.json",
        "ranks": case.run / "tokens/encoding.tiktoken",
    }[what]  # fmt: skip
    if what == "spans":
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata({"a": "b"}), path)
    elif what == "shard":
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(path.read_bytes() + b"\n")
    assert failed(case)["checksums"] == [(below(case, path), None, None)]
    path.unlink()
    assert failed(case)["checksums"] == [(below(case, path), None, None)]


def test_spans_with_a_gap(case: P.Case) -> None:
    """Tokens between two spans are nobody's; something could hide there."""
    _, spans, _, _ = spot(case, kept(case)[0])
    table = pq.read_table(spans)
    pq.write_table(table.slice(1), spans)
    relist(case)
    assert failed(case)["tokens"] == [(below(case, spans), None, None)]


# ---- tables


@pytest.mark.parametrize("column", ["text", "extracted"])
def test_a_text_put_back(case: P.Case, column: str) -> None:
    doc_id = next(own for own in case.condemned if own in case.listing.texts)
    name = case.row_of[doc_id]["file"]
    path = case.run / "documents" / name
    table = pq.read_table(path)
    rows = table.to_pylist()
    (number,) = [at for at, row in enumerate(rows) if row["doc_id"] == doc_id]
    rows[number][column] = "some text"
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path, row_group_size=P.runs.ROW_GROUP)
    found = failed(case)
    assert found["documents"] == [(f"documents/{name}", number, doc_id.hex())]
    assert found["signatures"] == [(f"documents/{name}", None, None)]  # of the commit
    assert found["files"] == [(f"documents/{name}", None, None)]


def test_the_text_in_another_row(case: P.Case) -> None:
    gone = next(own for own in case.condemned if own in case.listing.texts)
    own = next(doc_id for doc_id in kept(case))
    name = case.row_of[own]["file"]
    path = case.run / "documents" / name
    table = pq.read_table(path)
    rows = table.to_pylist()
    (number,) = [at for at, row in enumerate(rows) if row["doc_id"] == own]
    rows[number]["extracted"] = case.listing.texts[gone]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    assert "documents" not in failed(case)
    assert failed(case, deep=True)["documents"] == [(f"documents/{name}", number, own.hex())]


def test_a_signature_put_back(case: P.Case, made: P.Case) -> None:
    signed = {
        row["doc_id"]: path
        for path in (made.run / "signatures").rglob("*.parquet")
        for row in pq.read_table(path, columns=["doc_id"]).to_pylist()
    }
    doc_id = next(own for own in case.condemned if own in signed)
    path = case.run / signed[doc_id].relative_to(made.run)
    old = pq.read_table(signed[doc_id])
    left = pq.read_table(path)
    row = [own["doc_id"] for own in old.to_pylist()].index(doc_id)
    pq.write_table(pa.concat_tables([left, old.slice(row, 1)]), path)
    found = failed(case)["signatures"]
    assert found == [(below(case, path), len(left), doc_id.hex()), (below(case, path), None, None)]


def test_a_damaged_table_is_named(case: P.Case) -> None:
    path = case.run / "documents" / case.row_of[case.placed[0]]["file"]
    path.write_bytes(path.read_bytes()[:50])
    assert failed(case)["documents"] == [(below(case, path), None, None)]


# ---- the audit log


def test_a_forged_entry(case: P.Case) -> None:
    """An entry that was changed is found by the one behind it."""
    audit.append(str(case.run), P.told(id="second", version_before=2, version_after=2), case.table(()), ())
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
        audit.append(str(case.run), told, case.table(()), ())
    for path in (case.run / "audit").glob("00002*"):
        path.unlink()
    assert failed(case)["audit"] == [("audit/00003.json", None, None)]


# ---- what is left over


def superseded(case: P.Case) -> tuple[str, str, str]:
    """Shard, spans and manifest that the mask took the place of."""
    shard, spans, _, _ = spot(case, case.placed[0])
    names = (below(case, path).replace(".v2.", ".") for path in (shard, spans, shard.parent / "manifest.v2.json"))
    one, two, three = names
    return one, two, three


def test_an_old_shard(case: P.Case, made: P.Case) -> None:
    names = superseded(case)
    for name in names:
        (case.run / name).write_bytes((made.run / name).read_bytes())
    (case.run / "tokens/changes.v3.parquet").write_bytes(b"")
    assert {file for file, _, _ in failed(case)["left over"]} == {"tokens/changes.v3.parquet", *names}


@contextmanager
def reading(manifest: Path) -> Iterator[None]:
    with manifest.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def test_an_old_shard_that_is_being_read(case: P.Case, made: P.Case) -> None:
    names = superseded(case)
    for name in names:
        (case.run / name).write_bytes((made.run / name).read_bytes())
    (before,) = [check for check in prove(case).checks if check.name == "left over"]
    assert not any("reader" in found.what for found in before.findings)
    with reading(case.run / names[2]):
        (check,) = [check for check in prove(case).checks if check.name == "left over"]
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
    assert {who for _, _, who in found["pages"]} <= {doc_id.hex() for doc_id in case.condemned}


def test_a_report_that_does_not_say_whose_texts_it_shows(case: P.Case) -> None:
    (case.run / "report.html").write_text('<div class="text">somebody’s</div>')
    found = prove(case)
    assert found.holds
    (check,) = [check for check in found.checks if check.status == "unknown"]
    assert check.unknown == ["report.html: does not say whose texts it shows"]


def test_a_page_of_a_training_run(case: P.Case) -> None:
    """Of one that the audit log names, one that is given, one that is registered."""
    who = case.condemned[0].hex()
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


@pytest.mark.parametrize("mode", ["mask", "rewrite"])
def test_a_purge_as_it_is_made(made: P.Case, tmp_path: Path, mode: Any) -> None:
    """Not by hand: two of them, one after the other."""
    case = made.at(tmp_path)
    for number, doc_ids in enumerate((case.placed[:4], case.placed[4:9]), 1):
        wanted = Wanted(doc_ids=frozenset(doc_ids))
        report = purge(Request(str(case.run), mode, lambda run, own=wanted: condemn(run, own), {"doc": ["…"]}))
        assert report["documents_purged"] >= len(doc_ids) - 1
        found = verify(str(case.run), deep=True)
        assert [(check.name, check.findings, check.unknown) for check in found.checks if check.status != "pass"] == []
        assert (found.purges, found.version) == (number, number + 1)


def test_the_command_finishes_a_purge_that_was_cut_off(
    made: P.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case = made.at(tmp_path)
    wanted = Wanted(doc_ids=frozenset(case.placed[:4]))

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    request = Request(str(case.run), "mask", lambda run: condemn(run, wanted), {"doc": ["…"]})
    with monkeypatch.context() as patched:
        patched.setattr(finish, "clean", fails)
        with pytest.raises(QuernError, match="the purge is not at its end"):
            purge(request)
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
    doc_id = next(own for own in case.condemned if own in case.listing.texts)
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
