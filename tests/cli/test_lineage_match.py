"""``quern lineage match``: the table, the JSON document, the file; wrong inputs in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from quern.cli.lineage.match import match
from quern.lineage.match import Matches
from support.lineage import runs

QUESTION = "If a mill grinds nine sacks of wheat an hour, how many sacks does it grind in a day?"


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, Any]:
    """A run at ``run`` with the question in one document, whose listing row is returned; ``items.jsonl`` beside it."""
    found = runs.listing(seed=2, documents=60)
    (host, *_) = (row for row in found.spans["web"] if not row["purged"])
    found.texts[host["doc_id"]] = f"Quiz!\n{QUESTION.upper()}\nGo on"
    for rows in found.spans.values():
        start = 0
        for row in rows:
            row["start"], row["length"] = start, len(found.texts[row["doc_id"]].encode()) + 1
            start += row["length"]
    for row in found.rows:
        if row["doc_id"] == host["doc_id"]:
            original = next(
                r for r in found.verdicts[row["file"].removesuffix(".parquet")] if r["doc_id"] == row["doc_id"]
            )
            original["url"] = "http://example.org/\x1b[31mred"
    runs.write_listing(tmp_path / "run", found, identity="r")
    lines = [{"id": "mill\x1b[2J", "question": QUESTION}, {"id": "2", "question": "Why?"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return host


Command = Callable[..., Result]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    app = typer.Typer()
    app.command()(match)

    def run(*arguments: str, run: str = "run", items: str = "items.jsonl") -> Result:
        return CliRunner().invoke(app, [str(tmp_path / run), str(tmp_path / items), *arguments])

    return run


def test_table_json_and_file_say_the_same(
    tmp_path: Path, planted: dict[str, Any], command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "kept.parquet")
    shown = command("--workers", "1", "--out", kept)
    assert shown.exit_code == 0, shown.output
    start, stop = planted["start"] + 6, planted["start"] + 6 + len(QUESTION) - 1
    text = " ".join(shown.output.split())
    assert f"{planted['doc_id'].hex()} http://example.org/\\x1b[31mred" in text
    assert f"100.0% 7 n-grams of item mill\\x1b[2J (line 1), tokens {start:,} to {stop:,} of web" in text
    assert "1 document holds text of 1 of 2 items (13 words in a row)" in text
    assert "not looked for: 1 item with no text of 8 words (2)" in text
    assert "\x1b" not in shown.output
    capfd.readouterr()
    assert command("--json", "--workers", "1").exit_code == 0
    value = json.loads(capfd.readouterr().out)
    (document,) = value["documents"]
    assert document["doc_id"] == planted["doc_id"].hex()
    assert document["stream"] == document["source"] == "web"
    (item,) = document["items"]
    assert (item["line"], item["grams"], item["coverage"], item["spans"]) == (1, 7, 1.0, [[start, stop]])
    assert value["not_looked_for"] == [{"id": "2", "line": 2}]
    assert (value["items"], value["items_found"], value["n"]) == (2, 1, 13)
    found = Matches.load(kept)
    assert (found.doc_ids, found.starts.tolist(), found.stops.tolist()) == ([planted["doc_id"]], [start], [stop])


def test_options_reach_the_search(planted: dict[str, Any], command: Command) -> None:
    assert "1 document holds text of 1 of 2 items (30 words in a row)" in command("-n", "30", "--workers", "1").output
    assert "none of its 2 items can be looked for" in command("--field", "id", "--workers", "1").output
    assert "1 document holds" in command("--min-coverage", "1", "--workers", "1").output
    result = command("--field", "answer", "--workers", "1")
    assert result.exit_code == 2
    assert "items.jsonl: line 1: answer: no such field (it has id, question)" in result.output


def test_wrong_inputs_end_in_one_line(tmp_path: Path, planted: dict[str, Any], command: Command) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"question": "x"}\n{"question": \n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "short.jsonl").write_text('{"id": "a", "question": "Why is it so?"}\n{"id": "b", "answer": 4}\n')
    for arguments, message in (
        ({"items": "none.jsonl"}, "none.jsonl: no such file"),
        ({"items": "wrong.jsonl"}, "wrong.jsonl: line 2: not valid JSON"),
        ({"run": "nowhere"}, "nowhere"),
        ({"items": "empty.jsonl"}, "empty.jsonl: holds no item: expected an object a line, got an empty file"),
        ({"items": "blank.jsonl"}, "blank.jsonl: holds no item: expected an object a line, got 2 blank lines"),
        ({"items": "short.jsonl"}, "short.jsonl: none of its 2 items can be looked for: expected text of 8 words"),
    ):
        result = command("--workers", "1", **arguments)
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert len(result.output.strip().splitlines()) == 1
