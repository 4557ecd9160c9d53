"""SQL that is wrong, or wants more than to read the views."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from quern.errors import InputError, QuernError
from quern.lineage.sql import query as sql
from quern.lineage.sql.query import query
from quern.storage.sql_guard import check
from support.lineage.runs import Listing, write_listing
from support.named_cases import each, with_each

pytestmark = pytest.mark.slow

ARGUMENTS: dict[str, Any] = {"seed": 3, "documents": 60, "files": 2}


def digest(folder: str) -> dict[str, str]:
    """Every file below a folder and what is in it."""
    return {str(path): hashlib.md5(path.read_bytes()).hexdigest() for path in Path(folder).rglob("*") if path.is_file()}


ERRORS = [
    ("SELECT nosuch FROM verdicts", 'Binder Error: Referenced column "nosuch" not found'),
    ("SELECT * FROM verdicts WHERE", "Parser Error: syntax error"),
    ("SELECT 1; SELECT 2", "expected one query, got 2 statements"),
    ("", "expected one query, got 0 statements"),
    ("-- nothing", "expected one query, got 0 statements"),
    ("SELECT $1", "Values were not provided"),
    ("SELECT cast('x' AS INTEGER)", "Conversion Error"),
    ("FROM nosuch", "there is no view 'nosuch'; expected documents, duplicates, measures, spans, steps, verdicts"),
    ("FROM source.verdict_rows", "there is no view 'verdict_rows'"),
    ("FROM verdict_rows", "there is no view 'verdict_rows'"),
    ("PIVOT verdicts ON source USING count(*)", "PIVOT that lists no values"),
    ("SELECT " + "(" * 5000 + "1" + ")" * 5000, ""),
    ("SELECT " + "[" * 900 + "1" + "]" * 900, ""),
]


@with_each(*ERRORS)
def test_wrong_sql_is_one_line(text: str, message: str, *, run: str) -> None:
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
    'SELECT count(*) FROM "{run}/duplicates/cluster[".information_schema."s].parquet"', "FROM a.b.c.verdicts",
    'FROM "{run}/duplicates/cluster[".main.verdicts', "FROM information_schema.views", "FROM sqlite_master",
    # what the machine is like
    "SELECT current_setting('allowed_directories')", "SHOW allowed_directories",
    "SELECT * FROM (SHOW secret_directory)",
    "SELECT list_transform([1], x -> \"Current_Setting\"('secret_directory'))", "SELECT getenv('HOME')",
    "WITH a AS (WITH pragma_database_list AS (SELECT 1) FROM pragma_database_list) FROM pragma_database_list",
    "SHOW DATABASES", "SHOW VARIABLES",
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


def test_sql_reads_the_views_and_touches_nothing(run: str, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "secret").write_text("a,b\n1,SECRET\n")
    (folder / "out").mkdir()
    escaped = run.replace("'", "''")
    before = digest(run), digest(str(folder)), os.listdir()

    def check_one(text: str) -> None:
        with pytest.raises(InputError) as caught:
            query(run, text.format(run=escaped, folder=folder, secret=folder / "secret"))
        assert "SECRET" not in str(caught.value)
        assert "\n" not in str(caught.value)

    each(HARM, check_one)
    assert (digest(run), digest(str(folder)), os.listdir()) == before


def test_the_syntax_alone_refuses_all_of_it(tmp_path: Path) -> None:
    """The first wall, without the second: a connection that may do anything, given only to be looked at."""
    with duckdb.connect() as connection:
        for text in HARM:
            with pytest.raises(InputError):
                check(connection, text.format(run=tmp_path, folder=tmp_path, secret=tmp_path / "secret"), sql.VIEWS)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_without_the_look_at_the_syntax_duckdb_itself_still_reaches_nothing_outside(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The second wall: no file but those of the views, no setting, no extension.

    ``every``: which harm is tried, every so-many-th.
    """
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "secret").write_text("a,b\n1,SECRET\n")
    monkeypatch.setattr(sql, "check", lambda connection, text, views: frozenset(views))
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    shutil.copytree(run, whole)
    shutil.copytree(whole, copy)
    query(str(copy), "SELECT 1")  # whatever it keeps beside the run is there
    before, intact = digest(str(folder)), digest(str(copy))

    def check_one(text: str) -> None:
        try:
            result = query(str(copy), text.format(run=copy, folder=folder, secret=folder / "secret"))
        except QuernError:
            pass
        else:
            assert "SECRET" not in str(result.rows)
        assert digest(str(folder)) == before
        if digest(str(copy)) != intact:  # it has harmed the run, of which the next one gets a whole copy
            shutil.rmtree(copy)
            shutil.copytree(whole, copy)
            query(str(copy), "SELECT 1")

    each([text for text in HARM if "query" not in text][::every], check_one)


READ = [
    "SHOW TABLES", "SHOW ALL TABLES", "SHOW verdicts", "DESCRIBE documents", "SUMMARIZE spans",
    "FROM information_schema.tables", "WITH own AS (SELECT 1 AS a) SELECT a FROM own",
    "FROM verdicts LIMIT 1", "VALUES (1)", "TABLE verdicts",
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 3) FROM r",
    "FROM main.verdicts", "FROM memory.main.VERDICTS v", "SELECT * FROM information_schema.columns",
    "FROM verdicts PIVOT (count(*) FOR source IN ('web', 'text'))",
    "SELECT * FROM verdicts, unnest(failed_rules) AS f(rule)", "FROM range(3)", "FROM generate_series(1, 3)",
    "SELECT DISTINCT ON (host) host, url FROM verdicts ORDER BY host, url DESC NULLS LAST LIMIT 3 OFFSET 1",
    "SELECT url FROM verdicts INTERSECT SELECT url FROM documents", "FROM verdicts LIMIT 10%",
    "SELECT row_number() OVER (PARTITION BY host ORDER BY url) FROM verdicts QUALIFY 1 = 1",
    "SELECT * FROM verdicts TABLESAMPLE 10%", "SELECT host, count(*) FROM verdicts GROUP BY ROLLUP (host)",
    "FROM verdicts SEMI JOIN documents USING (doc_id)", "FROM verdicts WHERE url IN (SELECT url FROM documents)",
    "WITH verdicts AS (SELECT 1 AS a) SELECT a FROM verdicts", "WITH tables AS (SELECT 1 AS a) FROM tables",
    "SELECT COLUMNS('gopher.*') FROM verdicts",
    "FROM (UNPIVOT (SELECT num_words, language_score FROM verdicts) ON num_words, language_score)",
]  # fmt: skip


def test_what_only_reads_is_allowed(run: str) -> None:
    before = digest(run)
    each(READ, lambda text: query(run, text))
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
