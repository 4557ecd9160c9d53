"""The views against plain Python over the same rows, and SQL that wants more than to read them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from runs import Listing, listing, write_listing, write_run

from quern.data_pipeline.document import DOCUMENT_SCHEMA
from quern.errors import InputError, QuernError
from quern.lineage import sql
from quern.lineage.sql import query
from quern.lineage.sql_guard import check
from quern.mixtures.order import Order, Phase
from quern.train.ledger import Ledger

ARGUMENTS: dict[str, Any] = {"seed": 3, "documents": 400, "files": 3}


@pytest.fixture(scope="module")
def found() -> Listing:
    return listing(**ARGUMENTS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In a folder that is a glob, a quotation and a partition of Hive all at once."""
    return str(write_run(tmp_path_factory.mktemp("sql") / "a[b]c=1 'd\" *", **ARGUMENTS))


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
        expected[row["doc_id"]] = row
    return expected


def digest(folder: str) -> dict[str, str]:
    """Every file below a folder and what is in it."""
    return {str(path): hashlib.md5(path.read_bytes()).hexdigest() for path in Path(folder).rglob("*") if path.is_file()}


# ---- the views


def test_verdicts_show_every_page_and_what_removed_it(run: str, found: Listing) -> None:
    got = rows(run, "SELECT * FROM verdicts")
    expected = joined(found)
    assert len(got) == len(expected) == 400
    assert {row["doc_id"]: row for row in got} == expected
    assert Counter(row["stage"] for row in got)["duplicate"] == len(found.decisions) > 20


def test_documents_are_the_pages_that_reached_the_quality_gate_with_their_texts(run: str, found: Listing) -> None:
    texts = {hexed(row["doc_id"]): row for part in found.documents.values() for row in part}
    expected = {
        key: row | {name: texts[key][name] for name in ("text", "extracted", "kept")}
        for key, row in joined(found).items()
        if key in texts
    }
    got = rows(run, "FROM documents")
    assert {row["doc_id"]: row for row in got} == expected
    assert len(got) == len(expected) > 200


def test_a_purged_text_leaves_its_row(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path / "run", found, identity="purged")
    path = next(path for path in sorted((tmp_path / "run" / "documents").rglob("*.parquet")))
    table = pq.read_table(path)
    pq.write_table(table.slice(1).cast(DOCUMENT_SCHEMA), path)
    got = rows(str(tmp_path / "run"), f"SELECT * FROM documents WHERE doc_id = '{table['doc_id'][0].as_py().hex()}'")
    assert [(row["text"], row["extracted"], row["kept"]) for row in got] == [(None, None, None)]
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
                    span["length"], span["purged"], span["doc_id"].hex(),
                )
            )  # fmt: skip
    result = query(run, "SELECT stream, source, held_out, shard, start, length, purged, doc_id FROM spans")
    assert set(result.rows) == expected
    assert len(result.rows) == len(expected)
    assert max(shard for _, _, _, shard, *_ in result.rows) > 1
    assert {purged for *_, purged, _ in result.rows} == {False, True}


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


# ---- the steps


def consumer(folder: Path | str) -> str:
    """The line that a start of the training run in ``folder`` leaves with its data run."""
    return json.dumps({"time": "2024-01-01", "train_run": str(folder), "order": "0", "identities": []}) + "\n"


def train(folder: Path, order: Order, run: Path) -> None:
    """A run of 30 steps, in three attempts: a rollback left ten steps behind, a resume three."""
    folder.mkdir()
    with Ledger(folder / "ledger.jsonl") as ledger:
        ledger.move("start", 0, 0, order, document_mask=True)
        ledger.append("skipped", step=4, data_step=4, reason="non-finite")
        ledger.append("skipped", step=18, data_step=18, reason="non-finite")
        ledger.append("checkpoint", step=20, data_step=20, name="step_00000020")
        ledger.move("rollback", 10, 20, order, document_mask=True)
        ledger.append("skipped", step=18, data_step=28, reason="spike")
        ledger.append("checkpoint", step=25, data_step=35, name="step_00000025")
        ledger.move("resume", 22, 32, order, document_mask=True)
        ledger.append("end", step=30, data_step=40)
    with open(run / "consumers.jsonl", "a") as file:
        file.write(consumer(folder))


EXPECTED_ATTEMPTS = ((0, 20, 0, 10), (10, 25, 20, 22), (22, 30, 32, 30))
"""(first step, stop, first data step, steps below this survive) of :func:`train`."""
SKIPPED = ({4, 18}, {18}, set[int]())


def expected_steps(folder: Path, order: Order) -> set[tuple[Any, ...]]:
    return {
        (
            str(folder), attempt, step, data_step, order.first_sample(data_step), order.global_batch_at(data_step),
            step not in SKIPPED[attempt], step < survives,
        )
        for attempt, (first, stop, data, survives) in enumerate(EXPECTED_ATTEMPTS)
        for step in range(first, stop)
        for data_step in [data + step - first]
    }  # fmt: skip


@pytest.fixture
def order() -> Order:
    phases = [Phase(7, global_batch=8), Phase(33, weights=(0, 1), global_batch=16)]
    return Order([1, 2], [1000, 3000], 5, phases, ids=["r/web/1", "r/text/1"], seq_len=16, global_batch=4, block=4)


COLUMNS = "train_run, attempt, step, data_step, first_sample, global_batch, applied, surviving"


def test_steps_are_those_of_every_registered_run(tmp_path: Path, found: Listing, order: Order) -> None:
    write_listing(tmp_path / "run", found, identity="x")
    for name in ("one", "two"):
        train(tmp_path / name, order, tmp_path / "run")
    with open(tmp_path / "run" / "consumers.jsonl", "a") as file:
        file.write(consumer(tmp_path / "one"))  # started again
        file.write(consumer(tmp_path / "gone"))
        file.write('{"train_run": "/to')
    notes: list[str] = []
    result = query(str(tmp_path / "run"), f"SELECT {COLUMNS} FROM steps", note=notes.append)
    expected = expected_steps(tmp_path / "one", order) | expected_steps(tmp_path / "two", order)
    assert set(result.rows) == expected
    assert len(result.rows) == len(expected) == 2 * (20 + 15 + 8)
    assert [str(tmp_path / "gone") in note for note in notes] == [True]


def test_a_training_run_has_its_own_steps_and_nothing_else(tmp_path: Path, order: Order) -> None:
    train(tmp_path / "train", order, tmp_path)
    run = str(tmp_path / "train")
    assert set(query(run, f"SELECT {COLUMNS} FROM steps").rows) == expected_steps(tmp_path / "train", order)
    (total,) = query(run, "SELECT sum(global_batch) FROM steps WHERE surviving AND applied").rows[0]
    assert total == sum(row[5] for row in expected_steps(tmp_path / "train", order) if row[6] and row[7])
    with pytest.raises(InputError, match="there is no view 'verdicts'; expected steps"):
        query(run, "FROM verdicts")


def test_ledgers_are_read_only_when_the_query_asks_for_steps(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path, found, identity="x")
    (tmp_path / "consumers.jsonl").write_text(consumer("/gone"))
    notes: list[str] = []
    query(str(tmp_path), "FROM spans", note=notes.append)
    assert notes == []
    assert query(str(tmp_path), "WITH s AS (FROM Steps) SELECT * FROM s", note=notes.append).rows == []
    assert len(notes) == 1


# ---- results


def test_limit_says_whether_there_is_more(run: str) -> None:
    for limit, truncated in ((399, True), (400, False), (401, False), (None, False)):
        result = query(run, "SELECT doc_id FROM verdicts", limit=limit)
        assert (len(result.rows), result.truncated) == (min(limit or 400, 400), truncated)


def test_rows_that_are_not_asked_for_are_not_computed(run: str) -> None:
    result = query(run, "SELECT a.range FROM range(100000000000) a, range(1000) b", limit=3)
    assert len(result.rows) == 3
    assert result.truncated


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


# ---- what is refused

ERRORS = [
    ("SELECT nosuch FROM verdicts", 'Binder Error: Referenced column "nosuch" not found'),
    ("SELECT * FROM verdicts WHERE", "Parser Error: syntax error"),
    ("SELECT 1; SELECT 2", "expected one query, got 2 statements"),
    ("", "expected one query, got 0 statements"),
    ("-- nothing", "expected one query, got 0 statements"),
    ("SELECT $1", "Values were not provided"),
    ("SELECT cast('x' AS INTEGER)", "Conversion Error"),
    ("FROM nosuch", "there is no view 'nosuch'; expected documents, duplicates, spans, steps, verdicts"),
    ("FROM source.verdict_rows", "there is no view 'verdict_rows'"),
    ("FROM verdict_rows", "there is no view 'verdict_rows'"),
    ("PIVOT verdicts ON source USING count(*)", "PIVOT that lists no values"),
    ("SELECT " + "(" * 5000 + "1" + ")" * 5000, ""),
    ("SELECT " + "[" * 900 + "1" + "]" * 900, ""),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_wrong_sql_is_one_line(run: str, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        query(run, text)
    assert str(caught.value).startswith("sql: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


HARM = [
    # other files
    "FROM read_text('{secret}')", "FROM read_blob('{secret}')", "FROM read_csv('{secret}')", "FROM '{secret}'",
    "SELECT * FROM read_parquet('{run}/documents/*/*.parquet')", "FROM parquet_scan('{run}/verdicts/*/*.parquet')",
    "FROM glob('/etc/*')", "FROM sniff_csv('{secret}')", "FROM parquet_metadata('{run}/verdicts/*/*.parquet')",
    "SELECT (SELECT content FROM read_text('{secret}'))", "FROM query('FROM read_text(''{secret}'')')",
    "FROM query_table('verdicts')", "SELECT * FROM verdicts WHERE url IN (FROM read_text('{secret}'))",
    "WITH a AS (FROM '{secret}') FROM a", "DESCRIBE SELECT * FROM read_text('{secret}')", "SUMMARIZE '{secret}'",
    "FROM json_execute_serialized_sql('{{}}')", "FROM read_json('{secret}')", "FROM read_duckdb('{secret}')",
    "FROM (VALUES (1)) a, LATERAL (FROM read_text('{secret}'))",
    "FROM '{run}/tokens/VERSION.json' WHERE (WITH \"{run}/tokens/VERSION.json\" AS (SELECT 1) SELECT 1) = 1",
    "FROM '{run}/verdicts/*/*.parquet' WHERE (WITH \"{run}/verdicts/*/*.parquet\" AS (SELECT 1) SELECT 1) = 1",
    # writes
    "COPY verdicts TO '{folder}/out.csv'", "COPY (SELECT 1) TO '{run}/verdicts/out.csv'",
    "COPY (SELECT 1) TO '{run}/documents/out.parquet'", "EXPORT DATABASE '{folder}/out'",
    "WITH a AS (COPY verdicts TO '{run}/verdicts/out.csv') SELECT 1",
    "WITH a AS (COPY verdicts TO '{run}/verdicts/out.csv') SELECT * FROM a",
    "SELECT * FROM (WITH a AS (COPY verdicts TO '{folder}/out.csv') FROM a)",
    "SELECT (WITH a AS (COPY verdicts TO '{folder}/out.csv') SELECT 1)",
    "WITH a AS (INSERT INTO steps VALUES (1) RETURNING *) FROM a", "WITH a AS (DELETE FROM steps RETURNING *) FROM a",
    "EXPLAIN ANALYZE COPY verdicts TO '{folder}/out.csv'", "CREATE TABLE t AS SELECT 1", "DROP VIEW verdicts",
    "INSERT INTO steps VALUES (1)", "UPDATE steps SET step = 1", "DELETE FROM steps", "TRUNCATE steps",
    "CREATE OR REPLACE VIEW verdicts AS SELECT 1", "CREATE MACRO f() AS TABLE FROM read_text('{secret}')", "VACUUM",
    "ATTACH '{folder}/out.db'", "ATTACH '{run}/verdicts/out.db'", "DETACH memory", "USE source", "CHECKPOINT",
    "IMPORT DATABASE '{folder}'", "FROM checkpoint()", "FROM enable_logging()", "CALL enable_logging()",
    # settings, extensions, network
    "SET memory_limit = '1TB'", "PRAGMA memory_limit = '1TB'", "SET enable_external_access = true",
    "RESET lock_configuration", "SET lock_configuration = false", "PRAGMA enable_profiling",
    "SET profile_output = '{folder}/out.json'", "INSTALL httpfs", "LOAD httpfs", "FORCE INSTALL spatial",
    "FROM 'https://example.com/x.parquet'", "FROM read_csv('https://example.com/x.csv')", "FROM duckdb_settings()",
    "CREATE SECRET s (TYPE s3)", "PREPARE p AS SELECT 1", "EXECUTE p", "CALL pragma_version()", "LOAD '{secret}'",
    "SET allowed_directories = ['/']", "SET threads = 1000", "PRAGMA version", "BEGIN", "COMMIT",
    "SELECT 1; COPY verdicts TO '{folder}/out.csv'",
]  # fmt: skip


@pytest.mark.parametrize("text", HARM)
def test_sql_reads_the_views_and_touches_nothing(run: str, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "secret").write_text("a,b\n1,SECRET\n")
    (folder / "out").mkdir()
    escaped = run.replace("'", "''")
    before = digest(run), digest(str(folder)), os.listdir()
    with pytest.raises(InputError) as caught:
        query(run, text.format(run=escaped, folder=folder, secret=folder / "secret"))
    assert "SECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (digest(run), digest(str(folder)), os.listdir()) == before


def test_the_syntax_alone_refuses_all_of_it(tmp_path: Path) -> None:
    """The first wall, without the second: a connection that may do anything, given only to be looked at."""
    with duckdb.connect() as connection:
        for text in HARM:
            with pytest.raises(InputError):
                check(connection, text.format(run=tmp_path, folder=tmp_path, secret=tmp_path / "secret"), sql.VIEWS)


@pytest.mark.parametrize("text", [text for text in HARM if "query" not in text])
def test_without_the_look_at_the_syntax_duckdb_itself_still_reaches_nothing_outside(
    run: str, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second wall: no file but those of the views, no setting, no extension."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "secret").write_text("a,b\n1,SECRET\n")
    monkeypatch.setattr(sql, "check", lambda connection, text, views: frozenset(views))
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    before = digest(str(folder))
    try:
        result = query(str(copy), text.format(run=copy, folder=folder, secret=folder / "secret"))
    except QuernError:
        pass
    else:
        assert "SECRET" not in str(result.rows)
    assert digest(str(folder)) == before


READ = [
    "SHOW TABLES", "DESCRIBE documents", "SUMMARIZE spans", "FROM verdicts LIMIT 1", "VALUES (1)", "TABLE verdicts",
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 3) FROM r",
    "FROM main.verdicts", "FROM memory.main.VERDICTS v", "SELECT * FROM information_schema.columns",
    "FROM verdicts PIVOT (count(*) FOR source IN ('web', 'text'))",
    "SELECT * FROM verdicts, unnest(failed_rules) AS f(rule)", "FROM range(3)", "FROM generate_series(1, 3)",
    "SELECT DISTINCT ON (host) host, url FROM verdicts ORDER BY host, url DESC NULLS LAST LIMIT 3 OFFSET 1",
    "SELECT url FROM verdicts INTERSECT SELECT url FROM documents", "FROM verdicts LIMIT 10%",
    "SELECT row_number() OVER (PARTITION BY host ORDER BY url) FROM verdicts QUALIFY 1 = 1",
    "SELECT * FROM verdicts TABLESAMPLE 10%", "SELECT host, count(*) FROM verdicts GROUP BY ROLLUP (host)",
    "FROM verdicts SEMI JOIN documents USING (doc_id)", "FROM verdicts WHERE url IN (SELECT url FROM documents)",
    "WITH verdicts AS (SELECT 1 AS a) SELECT a FROM verdicts", "SELECT COLUMNS('gopher.*') FROM verdicts",
    "FROM (UNPIVOT (SELECT num_words, language_score FROM verdicts) ON num_words, language_score)",
]  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_what_only_reads_is_allowed(run: str, text: str) -> None:
    before = digest(run)
    query(run, text)
    assert digest(run) == before


def test_show_tables_names_the_views(run: str) -> None:
    assert query(run, "SHOW TABLES").rows == [(name,) for name in sorted(sql.VIEWS)]


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither run.json nor ledger.jsonl"):
        query(str(tmp_path), "SELECT 1")
    with pytest.raises(InputError, match="needs a local copy"):
        query("s3://bucket/run", "SELECT 1")


def test_a_damaged_file_is_named(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path, found, identity="x")
    path = sorted((tmp_path / "verdicts" / "web").iterdir())[1]
    path.write_bytes(b"PAR1" + b"\0" * 100)
    with pytest.raises(QuernError, match=str(path)) as caught:
        query(str(tmp_path), "FROM verdicts")
    assert "\n" not in str(caught.value)
