"""Tokens by language and host, in ``stats.json``, on the terminal and in the report, against the rows of the tables."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from rich.console import Console

from quern.data_pipeline import report
from quern.data_run.config import DataRun
from support.data_pipeline import in_process

#: In three languages, a host each.
SENTENCES = (
    "The small river carries the water from the mountains to the sea, page",
    "Der kleine Fluss trägt das Wasser von den Bergen bis ans Meer, Seite",
    "La petite rivière porte les eaux de la montagne à la mer, page",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens_by")
    web = folder / "web.jsonl"
    pages = [
        {"url": f"https://{host}.org/{number}", "text": f"{words} {number}. " * 40}
        for number in range(20)
        for host, words in zip("abc", SENTENCES, strict=True)
    ]
    web.write_text("".join(json.dumps(page) + "\n" for page in pages))
    notes = folder / "notes.jsonl"
    notes.write_text(json.dumps({"text": "A note without an address, of some words more than nothing. " * 30}) + "\n")
    in_process.run_config(
        {
            "run_dir": str(folder / "run"), "tokenize": {"encoding": "trained", "vocab_size": 320, "validation": 0.1},
            "sources": [{"name": "web", "kind": "jsonl", "paths": [str(web)]},
                        {"name": "notes", "kind": "jsonl", "paths": [str(notes)],
                         "recipe": {"quality": {"order": []}, "language": {"keep": None, "threshold": 0}}}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False}, "quality": {"order": []},
            "duplicates": {"near": False},
        }
    )  # fmt: skip
    return folder / "run"


def by_hand(run: Path, column: str, unknown: str) -> dict[str, tuple[int, int]]:
    """Name → tokens and documents, held-out ones too."""
    rows = ds.dataset(run / "verdicts").to_table(columns=["doc_id", column]).to_pylist()
    names = {row["doc_id"]: row[column] or unknown for row in rows}
    tokens, documents = Counter[str](), Counter[str]()
    for path in sorted((run / "tokens").glob("*/*.spans.parquet")):
        for row in ds.dataset(path).to_table(columns=["doc_id", "length"]).to_pylist():
            tokens[names[row["doc_id"]]] += row["length"]
            documents[names[row["doc_id"]]] += 1
    return {name: (tokens[name], documents[name]) for name in tokens}


def test_they_are_the_sums_over_the_spans(run: Path) -> None:
    stats = json.loads((run / "stats.json").read_text())
    total = stats["tokens"]["tokens"]
    for what, unknown in (("language", "(not identified)"), ("host", "(no host)")):
        expected = by_hand(run, what, unknown)
        own = stats["tokens_by"][what]
        assert {name: (tokens, documents) for name, tokens, documents in own["most"]} == expected
        assert (own["names"], own["tokens"]) == (len(expected), total)
        assert own["most"] == sorted(own["most"], key=lambda row: (-row[1], row[0]))
    assert {"en", "de", "fr"} <= by_hand(run, "language", "(not identified)").keys()
    assert "(no host)" in by_hand(run, "host", "(no host)")


def test_terminal_and_page_show_the_most(run: Path) -> None:
    stats = json.loads((run / "stats.json").read_text())
    shown = io.StringIO()
    report.print_funnel(stats, Console(file=shown, width=300))
    name, tokens, _ = stats["tokens_by"]["language"]["most"][0]
    assert f"tokens by language: {name} {tokens:,} (" in shown.getvalue()
    assert "tokens by host: " in shown.getvalue()
    page = (run / "report.html").read_text()
    for what in ("language", "host"):
        for name, tokens, _ in stats["tokens_by"][what]["most"][:5]:
            assert name in page
            assert f"{tokens:,}" in page or f"{tokens:,}".replace(",", "\u202f") in page


def test_a_report_made_anew_has_them_too(run: Path, tmp_path: Path) -> None:
    before = (run / "report.html").read_bytes(), json.loads((run / "stats.json").read_text())
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    config = DataRun.model_validate_json(json.dumps(record["config"]))
    for name in ("report.html", "stats.json"):
        (run / name).unlink()
    with in_process.engine():
        in_process.run.run_resolved(config)
    assert json.loads((run / "stats.json").read_text())["tokens_by"] == before[1]["tokens_by"]
    assert (run / "report.html").read_bytes() == before[0]


def test_they_are_left_out_of_what_is_not_read_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quern.data_run import run as module

    small = report.Budget(rows=1)
    found = report.survey_run(str(run), budget=small, lengths=module._token_lengths(str(run), 1))
    assert not found.complete
    assert module._tokens_by(found) == {}
    monkeypatch.setattr(report, "Budget", lambda: small)
    assert module._token_lengths(str(run), 2) is None
