"""``quern lineage sql``: tables on the terminal, also of hostile texts; JSON; errors in one line."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
import typer
from typer.testing import CliRunner, Result

from quern.cli.lineage import sql as lineage_sql
from quern.cli.lineage.sql import sql
from support.lineage.runs import write_run
from support.programs import python

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_run(tmp_path_factory.mktemp("sql") / "run", seed=5, documents=80, files=1))


@pytest.fixture(autouse=True)
def without_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of tests has threads, which a fork does not survive; those that are about it run the command."""
    monkeypatch.setattr(lineage_sql, "in_child", lambda call, *_: call())


def call(run: str, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(sql)
    return CliRunner().invoke(app, [run, *arguments])


def test_rows_are_a_table(run: str) -> None:
    result = call(run, "SELECT source, count(*) AS pages FROM verdicts GROUP BY source ORDER BY source")
    assert [line.split() for line in result.stdout.splitlines()] == [["source", "pages"], ["text", "40"], ["web", "40"]]
    assert result.stderr == "2 rows\n"


def test_hostile_texts_are_one_line_that_moves_no_cursor(run: str) -> None:
    query = (
        "SELECT chr(27) || '[2J' || chr(7) || chr(13) || chr(10) || chr(9) || '[red]' || chr(1564) || chr(8238) "
        "|| chr(155) AS "
        '"a\x1b[31m[b]", url, text FROM documents'
    )
    result = call(run, query)
    assert CONTROL.search(result.stdout) is None
    lines = result.stdout.splitlines()
    assert lines[0].startswith("a\\x1b[31m[b]")
    assert lines[1].startswith("\\x1b[2J\\x07\\r\\n\\t[red]\\u061c\\u202e\\x9b")
    assert len(lines) == 1 + int(result.stderr.split()[0])
    assert max(map(len, lines)) < 2000


def test_json_is_one_document(run: str, json_of: Callable[..., Any]) -> None:
    got = json_of(
        call, run,
        "SELECT 1 AS a, 2.50::DECIMAL(5, 2) AS b, 'nan'::DOUBLE AS c, NULL AS d, "
        "TIMESTAMPTZ '2024-01-02 03:04:05Z' AS e, DATE '2024-01-02' AS f, 'x'::BLOB AS g, [1, 2] AS h, "
        "{'k': 'v'} AS i, MAP {1: 'x'} AS j, chr(27) AS k, 3 AS a, INTERVAL 1 DAY AS l, "
        "170141183460469231731687303715884105727::HUGEINT AS m, true AS n",
    )  # fmt: skip
    assert got["rows"] == [
        {
            "a": 1, "b": 2.5, "c": None, "d": None, "e": "2024-01-02T03:04:05+00:00", "f": "2024-01-02", "g": "78",
            "h": [1, 2], "i": {"k": "v"}, "j": {"1": "x"}, "k": "\x1b", "a_1": 3, "l": "1 day, 0:00:00",
            "m": 2**127 - 1, "n": True,
        }
    ]  # fmt: skip
    assert got["truncated"] is False
    assert [column["name"] for column in got["columns"]] == [*"abcdefghijk", "a_1", *"lmn"]
    assert got["columns"][0]["type"] == "INTEGER"


@pytest.mark.slow
def test_the_limit_is_said_and_can_be_lifted(run: str, json_of: Callable[..., Any]) -> None:
    result = call(run, "SELECT doc_id FROM verdicts", "--limit", "3")
    assert len(result.stdout.splitlines()) == 4
    assert result.stderr == "3 rows; there are more (--limit 0 prints all)\n"
    assert len(json_of(call, run, "FROM range(3000)")["rows"]) == 1000
    assert len(json_of(call, run, "FROM range(3000)", "--limit", "0")["rows"]) == 3000
    assert json_of(call, run, "FROM range(3000)", "--limit", "2")["truncated"] is True


def test_memory_and_threads_are_options(run: str, json_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    connect = duckdb.connect

    def heard(*arguments: Any, config: dict[str, Any]) -> Any:
        given.append((config["memory_limit"], config["threads"]))
        return connect(*arguments, config=config)

    def here(call: Callable[[], Any], memory_bytes: int, threads: int) -> Any:
        given.append((memory_bytes, threads))
        return call()

    monkeypatch.setattr(duckdb, "connect", heard)
    monkeypatch.setattr(lineage_sql, "in_child", here)
    assert json_of(call, run, "SELECT 1 AS a", "--memory-gb", "0.5", "--threads", "3")["rows"] == [{"a": 1}]
    assert given == [(500_000_000, 3), ("500000000B", "3")]


@pytest.mark.slow
def test_what_a_function_makes_is_bounded_too(run: str) -> None:
    """The two queries took 4.4 and 3 GB; DuckDB's own limit knows neither."""
    program = """
import resource, sys
from quern.cli.main import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""
    for statement in ("SELECT len(range(150000000))", "SELECT length(repeat('x', 1500000000))"):
        command = [python(), "-c", program, "lineage", "sql", run, statement, "--memory-gb", "0.256", "--threads", "2"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        told, most_kib = done.stderr.splitlines()
        assert (done.returncode, told[:12]) == (1, "error: sql: ")
        assert int(most_kib) < 2_000_000  # its own before, twice DuckDB's, and 768 MiB


def test_a_query_whose_process_dies_is_one_line(run: str) -> None:
    program = (
        "import os, signal; from quern.cli.lineage import sql; from quern.cli.main import main\n"
        "sql.query = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\nmain()"
    )
    command = [python(), "-c", program, "lineage", "sql", run, "SELECT 1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "MiB of memory, or died otherwise (signal 9)" in done.stderr


def test_an_error_of_the_query_s_process_is_told_as_what_it_is(run: str) -> None:
    program = (
        "from quern.cli.lineage import sql; from quern.cli.main import main\n"
        "def fail(*_, **__): raise OSError(28, 'No space left on device', '/tmp/x')\n"
        "sql.query = fail\nmain()"
    )
    command = [python(), "-c", program, "lineage", "sql", run, "SELECT 1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: sql: OSError: [Errno 28] No space left on device: '/tmp/x'\n")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("SELECT nosuch FROM verdicts", 'error: sql: Binder Error: Referenced column "nosuch" not found'),
        ("SELECT '\x1b[31m", "error: sql: Parser Error"),
        ("FROM '\x1b[31m'", "there is no view"),
        ("COPY verdicts TO 'x.csv'", "expected SELECT, SHOW, DESCRIBE or SUMMARIZE over the views, got COPY"),
    ],
)
def test_errors_are_one_safe_line(run: str, statement: str, message: str) -> None:
    result = call(run, statement)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert CONTROL.search(result.stderr) is None
    assert result.stdout == ""


def test_a_training_run_that_is_gone_is_said_on_stderr(run: str, json_of: Callable[..., Any]) -> None:
    line = {"time": "t", "train_run": "/gone/\x1b[31m\nnote: fine", "order": "o", "identities": []}
    (Path(run) / "consumers.jsonl").write_text(json.dumps(line) + "\n")
    assert json_of(call, run, "FROM steps")["rows"] == []
    result = call(run, "FROM steps")
    assert "note: /gone/\\x1b[31m\\nnote: fine: expected a training run" in result.stderr
