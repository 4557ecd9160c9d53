"""What is lost is said: sources without a record end a run with an error, gates that take nearly all are alarms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.data_pipeline.execution.run_directory import open_run
from quern.data_run.config import DataRun
from support.data_pipeline import in_process
from support.data_pipeline.digests import pages_hash

WORDS = "the small river carries water and stones from every mountain to that wide sea where people have built a town"
GERMAN = "Der kleine Fluss trägt das Wasser von den Bergen in das Meer und die Leute sehen den Schiffen zu"


def rows(path: Path, texts: list[str], field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def english(num: int, words: int = 60, salt: str = "") -> list[str]:
    """Texts of their own: no two share a shingle of five words."""
    spoken = WORDS.split()
    return [" ".join(f"{spoken[i % len(spoken)]} {salt}{n}x{i}" for i in range(words // 2)) for n in range(num)]


def config(tmp_path: Path, sources: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "run_dir": str(tmp_path / "run"),
        "sources": [{"kind": "jsonl", **source} for source in sources],
        "language": {"keep": []},
        "quality": {"order": []},
        "tokenize": {"encoding": "trained", "vocab_size": 300},
        **more,
    }


def quern_run(tmp_path: Path, settings: Mapping[str, Any], *more: str) -> Any:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(dict(settings)))
    with in_process.engine():
        return CliRunner().invoke(app, ["data", "run", str(tmp_path / "c.yaml"), *more])


def errors(result: Any) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def alarms(tmp_path: Path) -> list[dict[str, Any]]:
    return list(json.loads((tmp_path / "run" / "stats.json").read_text())["alarms"])


@pytest.mark.slow
def test_a_source_without_a_readable_record_is_an_error_after_all_else_is_written(tmp_path: Path) -> None:
    lost = {"name": "lost", "paths": rows(tmp_path / "l.jsonl", english(3), "content"), "text_field": "body"}
    good = {"name": "good", "paths": rows(tmp_path / "g.jsonl", english(5))}
    settings = config(tmp_path, [good, lost])
    result = quern_run(tmp_path, settings)
    assert result.exit_code == 1, result.output
    assert errors(result) == [
        "error: source lost: none of its 3 records could be read, 3 as read.no_field: no text in the field 'body'; set "
        "sources.1.text_field to the field that holds the text, or set sources.1.allow_empty=true"
    ]
    sentence = "source lost loses 3 of 3 documents at read, all as read.no_field; no document of it is kept"
    assert f"alarm: {sentence}" in result.stdout
    assert sentence in (tmp_path / "run" / "report.html").read_text()
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "complete"
    assert (tmp_path / "run" / "tokens" / "VERSION.json").exists()
    assert "allow_empty" not in json.dumps(run)

    again = quern_run(tmp_path, settings)
    assert (again.exit_code, errors(again)) == (1, errors(result))
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    (tmp_path / "run" / "stats.json").write_text(json.dumps({**stats, "alarms": []}))  # as of an earlier version
    again = quern_run(tmp_path, settings)
    assert (again.exit_code, errors(again)) == (1, errors(result))
    (tmp_path / "run" / "stats.json").write_text(json.dumps(stats))
    allowed = quern_run(tmp_path, settings, "sources.1.allow_empty=true")
    assert allowed.exit_code == 0, allowed.output
    assert f"alarm: {sentence}" in allowed.stdout


@pytest.mark.parametrize(
    ("name", "content", "kind", "expected"),
    [
        ("a.parquet", b"PAR1" + b"x" * 100, "parquet", "no record could be read: not a readable Parquet file: "),
        ("a.jsonl", b"", "jsonl", "its files hold no record; check sources.0.kind and sources.0.paths"),
        ("a.jsonl", b"PAR1\x15\n", "jsonl", "its only record could not be read, as read.bad_json: check"),
    ],
)  # fmt: skip
def test_files_of_another_kind_are_an_error(
    tmp_path: Path, name: str, content: bytes, kind: str, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    result = quern_run(tmp_path, config(tmp_path, [{"name": "s", "kind": kind, "paths": str(tmp_path / name)}]))
    assert result.exit_code == 1, result.output
    (line,) = errors(result)
    assert expected in line
    assert line.startswith("error: source s: ")


def test_alarms_about_duplicates_are_told_and_stored_like_all_others(tmp_path: Path) -> None:
    urls = [f"https://many.example/{n // 2}" for n in range(40)]
    letters = str.maketrans("0123456789", "abcdefghij")  # figures are equal to the search for duplicates
    texts = [text.translate(letters) for text in english(40)]
    pages = [{"text": text, "url": url} for text, url in zip(texts, urls, strict=True)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    result = quern_run(
        tmp_path, config(tmp_path, [{"name": "s", "paths": f"{tmp_path}/m.jsonl"}], duplicates={"alarm_share": 0.4})
    )
    assert result.exit_code == 0, result.output
    source, host = alarms(tmp_path)
    assert {key: source[key] for key in source if key != "text"} == {
        "what": "source", "name": "s", "gate": "duplicates", "entered": 40, "lost": 20, "reason": "url",
    }  # fmt: skip
    assert (host["what"], host["name"], host["gate"], host["lost"]) == ("host", "many.example", "duplicates", 20)
    page = (tmp_path / "run" / "report.html").read_text()
    section = page[page.index(">Alarms</h2>") :].partition("<h2")[0]
    for alarm in (source, host):
        assert result.stdout.count(f"alarm: {alarm['text']}") == 1
        assert (section.count(alarm["text"]), page.count(alarm["text"])) == (1, 1)


def test_a_file_that_gives_nothing_is_named_beside_others_that_do(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows(tmp_path / "in" / "good.jsonl", english(30))
    rows(tmp_path / "in" / "other.jsonl", english(25, salt="o"), "content")
    rows(tmp_path / "in" / "small.jsonl", english(3, salt="s"), "content")
    result = quern_run(tmp_path, config(tmp_path, [{"name": "s", "paths": f"{tmp_path}/in/*.jsonl"}]))
    assert result.exit_code == 0, result.output
    (alarm,) = (alarm for alarm in alarms(tmp_path) if alarm["gate"] != "duplicates")
    assert alarm["text"] == "file other.jsonl of source s loses 25 of 25 documents at read, all as read.no_field"
    assert (alarm["what"], alarm["gate"], alarm["entered"], alarm["lost"]) == ("file", "read", 25, 25)


def test_quality_rules_that_take_a_source_are_named(tmp_path: Path) -> None:
    sources = [
        {"name": "notes", "paths": rows(tmp_path / "n.jsonl", [f"{number} {WORDS}" for number in range(40)])},
        {"name": "web", "paths": rows(tmp_path / "w.jsonl", [f"{number} {WORDS} {WORDS}" for number in range(40)])},
    ]
    gopher = {"order": ["gopher"], "gopher": {"min_words": 30}}
    settings = config(tmp_path, sources, quality=gopher, duplicates={"near": False})
    result = quern_run(tmp_path, settings)
    assert result.exit_code == 0, result.output
    found = [alarm for alarm in alarms(tmp_path) if alarm["what"] == "source" and alarm["name"] == "notes"]
    assert [(alarm["gate"], alarm["entered"], alarm["lost"]) for alarm in found] == [("quality", 40, 40)]
    assert found[0]["text"].endswith("; no document of it is kept")


def test_a_language_is_an_alarm_where_it_is_wanted(tmp_path: Path) -> None:
    """German is short here and falls to a rule for length."""
    texts = [f"{WORDS} {WORDS} {number}" for number in range(30)] + [f"{GERMAN} {number}" for number in range(30)]
    settings = config(
        tmp_path,
        [{"name": "s", "paths": rows(tmp_path / "s.jsonl", texts)}],
        language={"keep": ["en", "de"]},
        quality={"order": ["gopher"], "gopher": {"min_words": 25}},
    )
    result = quern_run(tmp_path, settings)
    assert result.exit_code == 0, result.output
    found = [
        (alarm["what"], alarm["name"], alarm["gate"], alarm["entered"], alarm["lost"])
        for alarm in alarms(tmp_path)
        if alarm["gate"] != "duplicates"
    ]
    assert found == [("language", "de", "quality", 30, 30)]


def test_a_language_that_is_not_kept_is_an_alarm_only_as_a_whole_source(tmp_path: Path) -> None:
    sources = [
        {"name": "en", "paths": rows(tmp_path / "e.jsonl", [f"{WORDS} {number}" for number in range(30)])},
        {"name": "de", "paths": rows(tmp_path / "f.jsonl", [f"{GERMAN} {number}" for number in range(30)])},
    ]
    quern_run(tmp_path, config(tmp_path, sources, language={"keep": ["en"]}, duplicates={"near": False}))
    assert [alarm["text"] for alarm in alarms(tmp_path)] == [
        "source de loses 30 of 30 documents because language.keep leaves their languages out, all as "
        "language.not_wanted; no document of it is kept"
    ]


def test_copies_of_another_source_are_said_to_be_that(tmp_path: Path) -> None:
    texts = english(30)
    (tmp_path / "b").mkdir()
    rows(tmp_path / "b" / "own.jsonl", english(10, salt="o"))
    sources = [
        {"name": "a", "paths": rows(tmp_path / "a.jsonl", texts), "priority": 1},
        {"name": "b", "paths": [str(tmp_path / "b" / "own.jsonl"), rows(tmp_path / "b" / "copy.jsonl", texts)]},
    ]
    result = quern_run(tmp_path, config(tmp_path, sources, duplicates={"near": False}))
    assert result.exit_code == 0, result.output
    said = "source b loses 30 of 40 documents (75%) as duplicates: 30 exact; 30 of documents of source a"
    assert f"alarm: {said}" in result.stdout
    assert [alarm["text"] for alarm in alarms(tmp_path)] == [
        said,
        "file copy.jsonl of source b loses 30 of 30 documents as duplicates",
    ]


def test_the_key_at_its_default_changes_no_hash_and_no_refusal(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", ["a"])
    plain, allowed = (
        DataRun.model_validate_json(json.dumps(config(tmp_path, [{"name": "s", "paths": path, **more}])))
        for more in ({}, {"allow_empty": True})
    )
    assert "allow_empty" not in plain.model_dump(mode="json")["sources"][0]
    assert pages_hash(plain) == pages_hash(allowed)
    ids = []
    for given in (plain, allowed, plain):
        with open_run(str(tmp_path / "run"), given.model_dump(mode="json")) as run:
            ids.append(run.record["id"])
    with open_run(str(tmp_path / "other"), allowed.model_dump(mode="json")) as run:
        ids.append(run.record["id"])
    assert len(set(ids)) == 1
    assert DataRun.model_validate(allowed.model_dump(mode="json")).sources[0].allow_empty
