"""What a purge leaves of texts: held against a rewrite of the same tables in plain Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline import report
from quern.errors import InputError
from quern.html.pieces import show
from quern.lineage.purge.apply import clean as module
from quern.lineage.purge.apply.clean import clean
from quern.lineage.purge.apply.pages import clean_forensics
from quern.lineage.sql.query import query
from quern.lineage.store import IndexedRun
from quern.lineage.trace import find_document, trace
from quern.storage.parquet import Table
from support.programs import python
from support.purge import purge_case as P

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> P.Case:
    return P.make(tmp_path_factory.mktemp("clean"))


@pytest.fixture
def case(whole: P.Case, tmp_path: Path) -> P.Case:
    return whole.at(tmp_path / "copy")


def tables(run: Path, folder: str) -> dict[str, pa.Table]:
    return {str(path.relative_to(run)): pq.read_table(path) for path in sorted((run / folder).rglob("*.parquet"))}


def rows_of(run: Path, folder: str) -> dict[str, list[dict[str, Any]]]:
    return {name: table.to_pylist() for name, table in tables(run, folder).items()}


def expected_documents(case: P.Case, before: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    gone = dict.fromkeys(("text", "extracted", "kept"))
    return {
        name: [{**row, **gone} if row["doc_id"] in case.deletion_set else row for row in rows]
        for name, rows in before.items()
    }


def files(run: Path) -> dict[str, str]:
    """All but what is torn in the folder that goes with the purge."""
    found = (path for path in run.rglob("*") if path.is_file() and not path.match(".purge/*.tmp"))
    return {str(path.relative_to(run)): P.versions.sha256(path) for path in found}


def test_texts_and_signatures_go_and_nothing_else(case: P.Case) -> None:
    documents, signatures = rows_of(case.run, "documents"), rows_of(case.run, "signatures")
    before = files(case.run)
    found = clean(str(case.run), case.table(), P.PURGE)
    assert rows_of(case.run, "documents") == expected_documents(case, documents)
    assert rows_of(case.run, "signatures") == {
        name: [row for row in rows if row["doc_id"] not in case.deletion_set] for name, rows in signatures.items()
    }
    assert found.texts == sum(row["doc_id"] in case.deletion_set for rows in documents.values() for row in rows) > 20
    assert found.notes == ()
    after = files(case.run)
    changed = {name for name in after if before.get(name) != after[name] and not name.startswith(".purge")}
    told = {change.path: (change.before, change.after) for change in found.changes}
    assert told == {name: (before[name], after[name]) for name in changed if not name.startswith("commits/")}
    assert {name.split("/")[0] for name in changed} == {"commits", "documents", "signatures", "report.html"}
    assert set(before) == set(after) - {".purge/cleaned.json"}


def test_what_is_committed_still_verifies(case: P.Case) -> None:
    old = {path: json.loads(path.read_text()) for path in (case.run / "commits").rglob("*.json")}
    clean(str(case.run), case.table(), P.PURGE)
    for path, entry in old.items():
        now = json.loads(path.read_text())
        assert {**now, "outputs": None} == {**entry, "outputs": None}
        assert now["outputs"].keys() == entry["outputs"].keys()
        for name, sha256 in now["outputs"].items():
            assert P.versions.sha256(case.run / name) == sha256


def test_tables_keep_their_form(case: P.Case) -> None:
    """Row groups, types, compression, and who is not condemned bit for bit; texts may be null now."""
    gone = case.deletion_set[:5]
    old = {name: pq.ParquetFile(case.run / name) for name in tables(case.run, "documents")}
    forms = {name: (file.schema_arrow, _groups(file)) for name, file in old.items()}
    assert min(len(groups) for _, groups in forms.values()) > 3
    clean(str(case.run), case.table(gone), P.PURGE)
    for name, (schema, groups) in forms.items():
        file = pq.ParquetFile(case.run / name)
        assert _groups(file) == groups
        assert file.schema_arrow.names == schema.names
        assert file.schema_arrow.types == schema.types
        assert {file.metadata.row_group(0).column(at).compression for at in range(4)} == {"ZSTD"}
        assert not file.schema_arrow.field("doc_id").nullable


def _groups(file: pq.ParquetFile) -> list[int]:
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def test_tables_are_still_read_together(case: P.Case) -> None:
    """Of one partition texts may be null now, of the others not: as one table all the same."""
    one = case.placed[0]
    clean(str(case.run), case.table([one]), P.PURGE)
    rows = pq.read_table(case.run / "documents").to_pylist()
    assert {row["doc_id"]: row["text"] for row in rows} == {**case.listing.texts, one: None}


def test_untouched_partitions_are_not_written(case: P.Case) -> None:
    one = next(doc_id for doc_id in case.placed if case.row_of[doc_id]["source"] == "web")
    before = files(case.run)
    found = clean(str(case.run), case.table([one]), P.PURGE)
    name = case.row_of[one]["file"]
    assert {change.path for change in found.changes} - {"report.html"} == {f"documents/{name}", f"signatures/{name}"}
    changed = {own for own, sha256 in files(case.run).items() if before.get(own) != sha256}
    commit = f"commits/pages/{name.removesuffix('.parquet')}.json"
    assert changed - {"report.html", ".purge/cleaned.json"} == {f"documents/{name}", f"signatures/{name}", commit}


def test_again_changes_nothing_and_tells_the_same(case: P.Case) -> None:
    first = clean(str(case.run), case.table(), P.PURGE)
    stamps = {path: path.stat().st_mtime_ns for path in case.run.rglob("*") if path.is_file()}
    assert clean(str(case.run), case.table(), P.PURGE) == first
    assert {path: path.stat().st_mtime_ns for path in case.run.rglob("*") if path.is_file()} == stamps
    # another purge of the same documents finds nothing to do, and does not claim the work of this one
    assert clean(str(case.run), case.table(), "another").changes == ()


def test_a_second_purge_takes_more(case: P.Case) -> None:
    documents = rows_of(case.run, "documents")
    clean(str(case.run), case.table(case.deletion_set[::2]), "first")
    clean(str(case.run), case.table(case.deletion_set[1::2]), "second")
    assert rows_of(case.run, "documents") == expected_documents(case, documents)


KILLED = """
import os, sys
import pyarrow.parquet as pq
from quern.lineage.purge.apply.clean import clean

replace = os.replace
for kill in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        done = 0
        def counted(*names):
            global done
            if kill == 0:
                os.kill(os.getpid(), 9)
            replace(*names)
            done += 1
            if done == kill:
                os.kill(os.getpid(), 9)
        os.replace = counted
        os.chdir(str(kill))
        clean("run", pq.read_table(sys.argv[1], use_threads=False), "0123456789abcdef")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, kill
"""


@pytest.mark.slow
def test_killed_anywhere_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first file gets its name, and after each: the next call leaves what one in peace leaves."""
    whole = P.make(tmp_path / "whole", documents=90, files=1)

    def at(name: str) -> P.Case:
        monkeypatch.chdir(whole.at(tmp_path / name).run.parent)  # a report says where its run is
        return P.Case(Path("run"), whole.listing, whole.deletion_set)

    case = at("undisturbed")
    expected = clean("run", case.table(), P.PURGE)
    undisturbed = files(case.run)
    num_files = len(expected.changes) + len(case.listing.verdicts) + 1  # with the commits, and the note of it all
    for kill in range(num_files + 1):
        at(str(kill))
    deletion_set = tmp_path / "condemned.parquet"
    pq.write_table(whole.table(), deletion_set)
    monkeypatch.chdir(tmp_path)
    arguments = [python(), "-c", KILLED, str(deletion_set), str(num_files + 1)]
    subprocess.run(arguments, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for kill in range(num_files + 1):
        monkeypatch.chdir(tmp_path / str(kill))
        assert clean("run", case.table(), P.PURGE) == expected
        assert files(case.run) == undisturbed


class Page(HTMLParser):
    """What a page shows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_shows_no_purged_text(case: P.Case) -> None:
    page = (case.run / "report.html").read_text()
    gone, before = set(case.deletion_set), _begun(case, page)
    assert len(before & gone) >= 3
    assert before - gone
    clean(str(case.run), case.table(), P.PURGE)
    page = (case.run / "report.html").read_text()
    assert _begun(case, page) == before - gone
    assert "Its text was purged." in Page(page).text
    assert report.shown_documents(page) is not None
    assert not report.shown_documents(page) & gone


def _begun(case: P.Case, page: str) -> set[bytes]:
    """Documents of which the page shows the beginning of a long text."""
    texts = case.listing.texts.items()
    return {doc_id for doc_id, text in texts if len(text) > 200 and show(text[:200]) in page}


def test_a_report_that_shows_none_of_them_stays(case: P.Case) -> None:
    shown = report.shown_documents((case.run / "report.html").read_text())
    assert shown is not None
    hidden = [doc_id for doc_id in case.listing.texts if doc_id not in shown]
    before = (case.run / "report.html").stat().st_mtime_ns
    found = clean(str(case.run), case.table(hidden[:5]), P.PURGE)
    assert (case.run / "report.html").stat().st_mtime_ns == before
    assert "report.html" not in {change.path for change in found.changes}


def test_a_report_that_does_not_say_whose_texts_it_shows_is_made_anew(case: P.Case) -> None:
    path = case.run / "report.html"
    path.write_text(re.sub(r' data-doc="[0-9a-f ]+"', "", path.read_text()))
    assert report.shown_documents(path.read_text()) is None
    found = clean(str(case.run), case.table(case.deletion_set[:1]), P.PURGE)
    assert report.shown_documents(path.read_text()) is not None
    assert "report.html" in {change.path for change in found.changes}


def test_a_report_that_cannot_be_made_anew_goes(case: P.Case) -> None:
    (case.run / "stats.json").unlink()
    found = clean(str(case.run), case.table(), P.PURGE)
    assert not (case.run / "report.html").exists()
    (note,) = found.notes
    assert note.startswith("report.html: showed texts of purged documents and is removed")
    assert [change.after for change in found.changes if change.path == "report.html"] == [None]


def test_scratch_of_killed_writers_goes(case: P.Case) -> None:
    (case.run / ".work").mkdir()
    (case.run / ".work/part-00000").write_bytes(b"text")
    torn = [case.run / f".report.html.{'0' * 32}.tmp", case.run / f"documents/web/.x.parquet.{'f' * 32}.tmp"]
    for path in torn:
        path.write_bytes(b"text")
    clean(str(case.run), case.table(), P.PURGE)
    assert not any(path.exists() for path in (*torn, case.run / ".work"))


def test_damage_is_told(case: P.Case) -> None:
    """A table that is not as committed is cleaned and named; one that cannot be read is an error that names it."""
    name = case.row_of[case.placed[0]]["file"]
    path = case.run / "documents" / name
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=30)
    was = P.versions.sha256(path)
    found = clean(str(case.run), case.table(), P.PURGE)
    assert found.notes == (f"documents/{name}: was not what its commit says, before this purge: its SHA-256 was {was}",)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=re.escape(f"{path}: cannot be read")):
        clean(str(case.run), case.table(), "another")


def test_a_table_without_its_columns_is_refused(case: P.Case) -> None:
    path = case.run / "documents" / case.row_of[case.placed[0]]["file"]
    pq.write_table(pq.read_table(path).drop_columns(["extracted"]), path)
    with pytest.raises(InputError, match=re.escape(f"{path}: has no column 'extracted'")):
        clean(str(case.run), case.table(), P.PURGE)


def test_lineage_answers_without_their_texts(case: P.Case) -> None:
    """``show`` and ``sql`` after all of a purge; the index that stood before is made anew."""
    before = IndexedRun(str(case.run))
    texts = {doc_id: case.listing.texts[doc_id] for doc_id in case.deletion_set if doc_id in case.listing.texts}
    assert trace(before, find_document(before, case.placed[0].hex()))["text"]["text"] == texts[case.placed[0]]
    P.purge(case)
    lineage = IndexedRun(str(case.run))
    assert lineage.version == 2
    for doc_id in texts:
        life = trace(lineage, find_document(lineage, doc_id.hex()))
        assert life["text"]["text"] is None
        assert life["text"]["why_none"] in ("its tokens were purged", "its text is not stored any more")
        assert not any(own.get("difference") for own in life.get("removed_for") or ())
    rows = query(str(case.run), "SELECT doc_id, text, extracted, kept FROM documents").rows
    gone = {doc_id.hex() for doc_id in case.deletion_set}
    assert {row[0] for row in rows if row[1] is None} == {doc_id.hex() for doc_id in texts}
    assert all(row[1:] == (None, None, False) for row in rows if row[0] in gone)
    stages = query(str(case.run), "SELECT doc_id, stage, reason FROM verdicts").rows
    assert {row[1:] for row in stages if row[0] in {doc_id.hex() for doc_id in case.placed}} == {
        ("purged", "version 2")
    }


def test_pages_of_training_runs_go(case: P.Case, tmp_path: Path) -> None:
    folder = tmp_path / "train" / "forensics"
    folder.mkdir(parents=True)
    who, other = case.deletion_set[0].hex(), "ab" * 16
    new = '<p class="text" data-doc="{}">the text</p>'
    (folder / "step_00000001.html").write_text(new.format(who))
    (folder / "step_00000002.html").write_text(new.format(other) + f'<span class="id">{who}</span>')
    (folder / "step_00000003.html").write_text(f'<span class="id">{who}</span><p class="text">whose is it</p>')
    (folder / "step_00000004.html").write_text(f'<span class="id">{other}</span><p class="text">whose is it</p>')
    (folder / "step_00000001.json").write_text("{}")
    torn = folder / f".step_00000001.html.{'a' * 32}.tmp"
    torn.write_text("half")
    gone = tmp_path / "gone"
    train_runs = [str(tmp_path / "train"), str(gone)]
    found = clean_forensics(str(case.run), train_runs, case.table(), P.PURGE)
    left = {"step_00000001.json", "step_00000002.html", "step_00000004.html"}
    assert {path.name for path in folder.iterdir()} == left
    assert [Path(change.path).name for change in found.changes] == ["step_00000001.html", "step_00000003.html"]
    assert all(change.before and change.after is None for change in found.changes)
    assert found.notes[0] == f"{gone}: no such training run here; its pages are as they were"
    assert clean_forensics(str(case.run), train_runs, case.table(), P.PURGE) == found


def test_memory_is_for_a_row_group(case: P.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call reads more rows than a row group has."""
    sizes = []
    read = Table.read_row_group

    def noting(*args: Any) -> pa.Table:
        rows = read(*args)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(Table, "read_row_group", noting)
    monkeypatch.setattr(module, "_clean_report", lambda run, ids: [])  # reads tables that are not rewritten
    clean(str(case.run), case.table(), P.PURGE)
    assert max(sizes) <= P.ROW_GROUP
