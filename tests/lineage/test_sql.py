"""The views against plain Python over the same rows."""

from __future__ import annotations

import json
import shutil
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.page.document import DOCUMENT_SCHEMA
from quern.errors import InputError, QuernError
from quern.lineage.sql import query as sql
from quern.lineage.sql.query import query
from support.lineage.runs import Listing, listing, write_listing

ARGUMENTS: dict[str, Any] = {"seed": 3, "documents": 400, "files": 3}


def rows(run: str, text: str, **settings: Any) -> list[dict[str, Any]]:
    result = query(run, text, **settings)
    return [dict(zip(result.columns, row, strict=True)) for row in result.rows]


def hexed(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def joined(found: Listing) -> dict[str, dict[str, Any]]:
    """Every verdict row as the view is to show it, by hex doc_id."""
    decisions = {decision["doc_id"]: decision for decision in found.decisions}
    expected = {}
    for row in found.rows:
        row = {key: value for key, value in row.items() if key not in ("file", "row")}
        decision = decisions.get(row["doc_id"])
        if row["stage"] is None and decision is not None:
            row |= {"stage": "duplicate", "reason": decision["kind"]}
        row |= {name: hexed(row[name]) for name in ("doc_id", "pre_filter_hash", "post_filter_hash")}
        row["kept"] = row["stage"] is None
        expected[row["doc_id"]] = row
    return expected


# ---- the views


@pytest.mark.slow
def test_verdicts_show_every_page_and_what_removed_it(run: str, found: Listing) -> None:
    got = rows(run, "SELECT * FROM verdicts")
    expected = joined(found)
    assert len(got) == len(expected) == 400
    assert {row["doc_id"]: row for row in got} == expected
    assert Counter(row["stage"] for row in got)["duplicate"] == len(found.decisions) > 20


def test_documents_are_the_pages_that_reached_the_quality_gate_with_their_texts(run: str, found: Listing) -> None:
    texts = {hexed(row["doc_id"]): row for part in found.documents.values() for row in part}
    expected = {
        key: row | {name: texts[key][name] for name in ("text", "extracted")}
        for key, row in joined(found).items()
        if key in texts
    }
    got = rows(run, "FROM documents")
    assert {row["doc_id"]: row for row in got} == expected
    assert len(got) == len(expected) > 200


def test_what_has_tokens_is_kept(run: str) -> None:
    kept = {row["doc_id"] for row in rows(run, "SELECT doc_id FROM documents WHERE kept")}
    assert kept == {row["doc_id"] for row in rows(run, "SELECT doc_id FROM verdicts WHERE kept")}
    assert kept > {row["doc_id"] for row in rows(run, "SELECT DISTINCT doc_id FROM spans WHERE NOT purged")} != set()
    assert rows(run, "SELECT 1 FROM documents WHERE kept <> (stage IS NULL)") == []


def test_a_purged_text_leaves_its_row(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path / "run", found, identity="purged")
    path = next(path for path in sorted((tmp_path / "run" / "documents").rglob("*.parquet")))
    table = pq.read_table(path)
    pq.write_table(table.slice(1).cast(DOCUMENT_SCHEMA), path)
    got = rows(str(tmp_path / "run"), f"SELECT * FROM documents WHERE doc_id = '{table['doc_id'][0].as_py().hex()}'")
    assert [(row["text"], row["extracted"]) for row in got] == [(None, None)]
    assert got[0]["post_filter_hash"] is not None


def test_spans_are_those_of_the_shards(run: str, found: Listing) -> None:
    first: dict[tuple[str, int], int] = {}
    expected = set()
    for stream, spans in found.spans.items():
        for span in spans:
            origin = first.setdefault((stream, span["shard"]), span["start"])
            expected.add(
                (
                    stream, stream.removesuffix(".val"), stream.endswith(".val"), span["shard"], span["start"] - origin,
                    span["length"], span["purged"], 1 if span["purged"] else None, span["doc_id"].hex(),
                )
            )  # fmt: skip
    result = query(
        run, "SELECT stream, source, held_out, shard, start, length, purged, purged_since, doc_id FROM spans"
    )
    assert set(result.rows) == expected
    assert len(result.rows) == len(expected)
    assert max(shard for _, _, _, shard, *_ in result.rows) > 1
    assert {purged for *_, purged, _, _ in result.rows} == {False, True}


def test_spans_are_those_of_the_current_version_alone(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path, found, identity="x")
    version = json.loads((tmp_path / "tokens" / "VERSION.json").read_text())
    gone = version["sources"].pop("web")
    (tmp_path / "tokens" / "VERSION.json").write_text(json.dumps(version))
    assert gone["shards"]
    assert {row["source"] for row in rows(str(tmp_path), "SELECT DISTINCT source FROM spans")} == {"text", "web"}
    assert {row["stream"] for row in rows(str(tmp_path), "SELECT DISTINCT stream FROM spans")} <= {
        "text", "text.val", "web.val",
    }  # fmt: skip


@pytest.mark.parametrize("file", ["../../secret.parquet", "text/../web/x.parquet", "/etc/passwd", "text/*.parquet", 7])
def test_a_version_that_points_elsewhere_is_refused(tmp_path: Path, found: Listing, file: object) -> None:
    write_listing(tmp_path, found, identity="x")
    path = tmp_path / "tokens" / "VERSION.json"
    version = json.loads(path.read_text())
    version["sources"]["text"]["shards"][0]["spans"] = file
    path.write_text(json.dumps(version))
    with pytest.raises(InputError, match=r"VERSION.json: sources.text.shards.0.spans: expected a file of it"):
        query(str(tmp_path), "FROM spans")


@pytest.mark.parametrize("version", ["a", None, 0, -1, 1.5, True])
def test_a_version_without_a_number_is_refused(tmp_path: Path, found: Listing, version: object) -> None:
    write_listing(tmp_path, found, identity="x")
    path = tmp_path / "tokens" / "VERSION.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    with pytest.raises(InputError, match=r"VERSION\.json: version: expected an integer ≥ 1, got"):
        query(str(tmp_path), "FROM spans")


def test_duplicates_are_the_clusters_with_their_decisions(run: str, found: Listing) -> None:
    decisions = {decision["doc_id"]: decision for decision in found.decisions}
    expected = set()
    for member in found.clusters:
        decision = decisions.get(member["doc_id"], {})
        expected.add(
            (
                member["doc_id"].hex(), member["cluster_id"].hex(), decision.get("kind"),
                hexed(decision.get("duplicate_of")), decision.get("similarity"), decision.get("band"),
            )
        )  # fmt: skip
    result = query(run, "SELECT doc_id, cluster_id, kind, duplicate_of, similarity, band FROM duplicates")
    assert set(result.rows) == expected
    assert len(result.rows) == len(expected) > len(decisions)


def test_views_join_by_hex_ids(run: str, found: Listing) -> None:
    text = """
        SELECT s.doc_id, strlen(d.text) + 1 AS bytes, s.length FROM spans s JOIN documents d USING (doc_id)
        WHERE d.stage IS NULL
    """
    got = rows(run, text)
    assert len(got) == sum(map(len, found.spans.values()))
    assert all(row["bytes"] == row["length"] for row in got)  # a token is a byte


@pytest.mark.parametrize("view", sql.VIEWS)
def test_a_run_that_has_written_nothing_yet_has_empty_views(tmp_path: Path, run: str, view: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"config": {}, "status": "running"}))
    notes: list[str] = []
    result = query(str(tmp_path), f"FROM {view}", note=notes.append)
    assert result.rows == []
    full = query(run, f"FROM {view}", limit=1)
    assert set(result.columns) <= set(full.columns)
    types = dict(zip(full.columns, full.types, strict=True))
    assert result.types == tuple(types[name] for name in result.columns)
    assert len(notes) == 1
    assert "not complete" in notes[0]


@pytest.mark.slow
def test_a_run_without_duplicates_or_with_a_source_of_which_nothing_is_kept(tmp_path: Path, found: Listing) -> None:
    found = listing(**ARGUMENTS)
    for name, part in found.verdicts.items():
        for row in part if name.startswith("web/") else ():
            row |= {"stage": "quality", "reason": "gopher.too_short"}
    found.spans["web"] = found.spans["web.val"] = []
    write_listing(tmp_path, found, identity="x")
    shutil.rmtree(tmp_path / "duplicates")
    run = str(tmp_path)
    assert rows(run, "FROM duplicates") == []
    assert {row["stream"] for row in rows(run, "FROM spans")} == {"text", "text.val"}
    assert rows(run, "SELECT * FROM verdicts WHERE stage = 'duplicate' OR (source = 'web' AND stage IS NULL)") == []
    assert len(rows(run, "FROM verdicts")) == 400


def test_partitions_without_a_row_and_temporary_files_do_no_harm(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path, found, identity="x")
    folder = tmp_path / "verdicts" / "web"
    some = next(folder.iterdir())
    pq.write_table(pq.read_table(some).slice(0, 0), folder / "empty.parquet")
    (folder / f".{some.name}.{'0' * 32}.tmp").write_bytes(b"PAR1")
    assert rows(str(tmp_path), "SELECT count(*) AS n FROM verdicts") == [{"n": 400}]


# ---- results


def test_limit_says_whether_there_is_more(run: str) -> None:
    for limit, truncated in ((399, True), (400, False), (401, False), (None, False)):
        result = query(run, "SELECT doc_id FROM verdicts", limit=limit)
        assert (len(result.rows), result.truncated) == (min(limit or 400, 400), truncated)


def test_rows_that_are_not_asked_for_are_not_computed(run: str) -> None:
    result = query(run, "SELECT a.range FROM range(100000000000) a, range(1000) b", limit=3)
    assert len(result.rows) == 3
    assert result.truncated


def test_the_bytes_of_a_result_are_bounded(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, lists and structures count in full; below the bound every row comes, in its order."""
    monkeypatch.setattr(sql, "_RESULT_BYTES", 1 << 20)
    for text in (
        "repeat('x', 10000)",
        "list_transform(range(100), lambda x: repeat('x', 100))",
        "{'a': [repeat('x', 9999)]}",
    ):
        with pytest.raises(InputError, match=r"^sql: the first [0-9]+ rows are more than 1 MiB; ask for fewer of them"):
            query(run, f"SELECT {text} FROM range(200)")
    assert len(query(run, "SELECT repeat('x', 10000) FROM range(200)", limit=50).rows) == 50
    assert query(run, "SELECT range, repeat('x', range % 7) FROM range(5000)").rows == [
        (number, "x" * (number % 7)) for number in range(5000)
    ]


@pytest.mark.slow
def test_large_rows_behind_small_ones_are_refused_before_many_are_taken(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "_RESULT_BYTES", 4 << 20)
    query(run, "SELECT 1")  # what is imported for it
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="are more than 4 MiB"):
            query(run, "SELECT repeat('y', if(range < 12000, 1, 20000)) FROM range(24000)")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_columns_have_no_name_twice(run: str) -> None:
    assert query(run, "SELECT 1 AS a, 2 AS a, 3 AS a_1").columns == ("a", "a_1", "a_1_1")


@pytest.mark.slow
def test_memory_is_bounded_and_spills_outside_of_the_run(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = "SELECT max(x) FROM (SELECT range AS x, hash(range) AS h FROM range(3000000) ORDER BY h)"
    seen: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.update(path.name for path in tmp_path.glob("*/spill/*"))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert query(run, text, memory_bytes=32 << 20, threads=1).rows == [(2_999_999,)]
    finally:
        done.set()
        watcher.join()
    assert seen
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(QuernError, match=r"^sql: Out of Memory Error") as caught:
        query(run, "SELECT len(list(range)) FROM range(50000000)", memory_bytes=64 << 20, threads=1)
    assert not isinstance(caught.value, InputError)
