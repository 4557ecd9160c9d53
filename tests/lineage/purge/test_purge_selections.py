"""Every way to say what is to be purged, on the command line; and runs with the list it leaves."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from support.purge import crawls
from support.purge.crawls import Crawled

SECRET = crawls.prose(random.Random(77), 30)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run over a small crawl with families of duplicates and a page of its own text; and the crawl."""
    folder = tmp_path_factory.mktemp("base")
    draw = random.Random(5)
    pages = [*crawls.planted(draw, 14), Crawled("https://leak.example/answers", SECRET)]
    warc = crawls.write_warc(folder / "in" / "crawl.warc.gz", pages)
    return crawls.run(folder / "run", [warc]), warc


@pytest.fixture
def run(base: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(base[0], tmp_path / "run"))


def call(*arguments: Any, stdin: str = "", code: int = 0) -> str:
    result = CliRunner().invoke(app, ["lineage", *map(str, arguments)], input=stdin)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def answer(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command says as JSON, and nothing else on stdout."""

    def told(*arguments: Any, stdin: str = "") -> Any:
        capfd.readouterr()
        call(*arguments, "--json", stdin=stdin)
        return json.loads(capfd.readouterr().out)

    return told


def benchmark(folder: Path) -> Path:
    path = folder / "benchmark.jsonl"
    path.write_text(json.dumps({"question": " ".join(SECRET.split()[40:80])}) + "\n")
    return path


def kept_match(run: Path, folder: Path) -> Path:
    call("match", run, benchmark(folder), "--workers", 1, "--out", folder / "kept.parquet")
    return folder / "kept.parquet"


SELECTIONS: dict[str, Callable[[Path, Path], tuple[list[Any], str]]] = {
    "url": lambda run, folder: (["--url", "http://leak.example/answers?utm_source=x"], ""),
    "stdin": lambda run, folder: (["--urls-file", "-"], "https://leak.example/answers\nhttps://gone.example/\n"),
    "sql": lambda run, folder: (["--sql", "SELECT doc_id FROM verdicts WHERE host = 'leak.example'"], ""),
    "match": lambda run, folder: (["--match", benchmark(folder)], ""),
    "kept": lambda run, folder: (["--match", kept_match(run, folder)], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SELECTIONS)
def test_every_kind_of_selection_purges_the_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any], kind: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    given, stdin = SELECTIONS[kind](run, tmp_path)
    report = answer("purge", run, *given, "--mode", "rewrite", stdin=stdin)
    assert report["condemned"] == report["condemned_selected"] == report["documents_purged"] == 1
    assert ("has no document of URL: https://gone.example/" in "".join(report["notes"])) == (kind == "stdin")
    if kind == "url":  # what is purged is the same of all
        assert answer("verify", run, "--workers", 1)["holds"]
    rows = crawls.verdicts(run)
    assert [row["url"] for row in rows if "leak" in row["url"]] == ["https://leak.example/answers"]


@pytest.mark.slow
def test_a_list_with_signatures_keeps_a_similar_page_out_of_a_later_run(
    run: Path, tmp_path: Path, answer: Callable[..., Any]
) -> None:
    report = answer("purge", run, "--domain", "LEAK.example", "--mode", "mask", "--similar")
    assert Path(report["tombstones"]).parent == Path(report["purge_list"]) == tmp_path / "run.purge-list"
    again = {
        "https://new.example/similar": crawls.changed(random.Random(1), SECRET, 3),
        "https://new.example/other": crawls.prose(random.Random(2), 30),
    }
    warc = crawls.write_warc(tmp_path / "later.warc.gz", [Crawled(*item) for item in again.items()])
    later = crawls.verdicts(crawls.run(tmp_path / "later", [warc], purge_list=str(tmp_path / "run.purge-list")))
    assert {row["url"]: row["reason"] for row in later} == {
        "https://new.example/similar": "purged.similar",
        "https://new.example/other": None,
    }


@pytest.mark.slow
def test_a_refusal_changes_nothing(run: Path, tmp_path: Path) -> None:
    """Also of a list with signatures that the run does not have: before anything is purged."""
    record = json.loads((run / "run.json").read_text())
    record["config"]["duplicates"]["near"] = False
    (run / "run.json").write_text(json.dumps(record))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    for given, says in (
        (["--domain", "leak.example", "--similar"], "--similar: the run made no signatures"),
        (["--domain", "gone.example"], "has no document of host: gone.example"),
        (["--domain", "leak.example", "--url", "https://leak.example/answers"], "got --url and --domain"),
        ([], "expected one of --url"),
    ):
        assert says in " ".join(call("purge", run, *given, "--mode", "mask", code=2).split())
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
    assert not (tmp_path / "run.purge-list").exists()
