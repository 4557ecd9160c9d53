"""Hostile pages each get one verdict within their budget, and their neighbours never notice."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.engine import Engine, InProcess, open_engine
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.page.url import MAX_CHARS
from quern.data_run.config import DataRun
from quern.tokenize.shards import ShardReader
from quern.tokenize.writing import run as tokens
from support.data_pipeline import hostile_pages

#: What may differ between two runs of which one has more records.
BY_PLACE = ("doc_id", "source_file", "record_offset")


def config(folder: Path, kind: str, source: Path, **changes: Any) -> DataRun:
    return DataRun.model_validate(
        {
            "run_dir": str(folder / "run"),
            "sources": [{"name": "s", "kind": kind, "paths": str(source)}],
            "language": {"keep": ["en"], "threshold": 0.3},
            "quality": {"action": "measure"},
            "duplicates": {"near": False},
            "tokenize": {"encoding": "trained", "vocab_size": 400, "validation": 0.0, "shard_tokens": 1 << 20},
            **changes,
        }
    )


def go(settings: DataRun, engine: Engine | None = None) -> tuple[list[dict[str, Any]], dict[bytes, str]]:
    """(verdict rows in file order, kept and dropped texts by doc_id) of one run."""
    with RunProgress(background=False) as progress:
        pages.run(settings, pages.plan_sources(settings), engine or InProcess(), progress)
    (verdicts,) = (Path(settings.run_dir) / "verdicts").rglob("*.parquet")
    (documents,) = (Path(settings.run_dir) / "documents").rglob("*.parquet")
    texts = pq.read_table(documents)
    return pq.read_table(verdicts).to_pylist(), dict(
        zip(texts["doc_id"].to_pylist(), texts["text"].to_pylist(), strict=True)
    )


def neighbours(rows: list[dict[str, Any]], texts: dict[bytes, str]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        if (row["url"] or "").startswith("https://good.example/"):
            plain = {name: value for name, value in row.items() if name not in BY_PLACE}
            found.append({**plain, "text": texts.get(row["doc_id"])})
    return found


def check_texts(texts: dict[bytes, str]) -> None:
    for text in texts.values():
        text.encode()  # no lone surrogates
        assert "\0" not in text
        assert "root:" not in text, "a file of this machine"


WRITERS: dict[str, Callable[[Path, bool], Any]] = {
    "jsonl": hostile_pages.jsonl,
    "parquet": hostile_pages.parquet,
    "wet": hostile_pages.wet,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What becomes of the neighbours in a WARC of their own."""
    folder = tmp_path_factory.mktemp("alone")
    hostile_pages.warc(folder / "in.warc.gz", hostile=False)
    found = neighbours(*go(config(folder, "warc", folder / "in.warc.gz")))
    assert [row["reason"] for row in found] == [None] * hostile_pages.NUM_NEIGHBOURS, "they are pages one keeps"
    return found


def check_warc(
    expected: dict[str, hostile_pages.Hostile],
    rows: list[dict[str, Any]],
    texts: dict[bytes, str],
    alone: list[dict[str, Any]],
) -> None:
    assert neighbours(rows, texts) == alone
    check_texts(texts)
    assert len(rows) == len(expected) + hostile_pages.NUM_NEIGHBOURS, "one verdict a record"
    left = dict(expected)
    for row in rows:
        if row["url"].startswith("https://good.example/"):
            continue
        address = next(one for one in left if one.startswith(row["url"]) and (one == row["url"] or len(one) > 10_000))
        hostile = left.pop(address)
        assert row["stage"] != "quarantine", (hostile.name, row["reason"])
        if hostile.verdict is not None:
            assert (row["stage"], row["reason"]) == hostile.verdict, hostile.name
        else:
            assert row["stage"] in (None, "extract", "language"), (hostile.name, row["reason"])
    assert not left


def memory_kib(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


@pytest.mark.slow
def test_hostile_pages_of_a_crawl(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    expected = hostile_pages.warc(tmp_path / "in.warc.gz", hostile=True)
    gc.collect()
    before = memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    rows, texts = go(config(tmp_path, "warc", tmp_path / "in.warc.gz"))
    peak = memory_kib("VmHWM")
    gc.collect()
    after = memory_kib("VmRSS")
    check_warc(expected, rows, texts, alone)
    assert (peak - before) >> 10 < 400, "MiB that the dearest page took"
    assert (after - before) >> 10 < 150, "MiB that stayed"


@pytest.mark.long
def test_hostile_pages_of_a_crawl_on_ray(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    """No clock is needed: with a fraction of the usual time each page gets the verdict of its shape.

    Then one more page, of the one known shape that no bound sees, runs into the clock; the others stay as they are.
    """
    expected = hostile_pages.warc(tmp_path / "in.warc.gz", hostile=True)
    settings = config(tmp_path, "warc", tmp_path / "in.warc.gz", isolation={"page_timeout_s": 12})
    with open_engine(1) as engine:
        rows, texts = go(settings, engine)
        check_warc(expected, rows, texts, alone)
        hidden = " ".join(f'a{n}=">" ' + " ".join(f"b{n}x{m}" for m in range(100)) for n in range(3_000))
        page = hostile_pages.Hostile("hidden", hostile_pages.article(1, f"<p {hidden}>x</p>").encode())
        more = tmp_path / "more"
        more.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hostile_pages, "pages", lambda: iter([page]))
            hostile_pages.warc(more / "in.warc.gz", hostile=True)
        settings = config(more, "warc", more / "in.warc.gz", isolation={"page_timeout_s": 4})
        rows, texts = go(settings, engine)
    assert [(row["stage"], row["reason"]) for row in rows if row["url"] == page.address] == [
        ("quarantine", "quarantine.timeout")
    ]
    assert neighbours(rows, texts) == alone


@pytest.mark.long
@pytest.mark.parametrize("kind", list(WRITERS))
def test_hostile_texts_of_other_sources(kind: str, tmp_path: Path) -> None:
    found = []
    for hostile in (False, True):
        folder = tmp_path / str(hostile)
        folder.mkdir()
        WRITERS[kind](folder / "in", hostile)
        settings = config(folder, kind, folder / "in")
        rows, texts = go(settings)
        check_texts(texts)
        found.append([{**row, "record_length": None} for row in neighbours(rows, texts)])
    assert found[0] == found[1]
    assert [row["reason"] for row in found[0]] == [None] * hostile_pages.NUM_NEIGHBOURS
    expected = {name: verdict for name, (_, verdict) in hostile_pages.TEXTS.items()}
    if kind == "jsonl":
        expected |= {name: verdict for name, (_, verdict) in hostile_pages.LINES.items()}
    assert len(rows) == len(expected) + hostile_pages.NUM_NEIGHBOURS, "one verdict a record"
    by_id = {row["record_id"]: row for row in rows}
    if kind == "jsonl":  # of a line that cannot be read, no id is known
        unknown = [row for row in rows if row["record_id"] is None]
        assert sorted(row["reason"] for row in unknown) == sorted(
            ["read.too_large"] * 2 + ["read.too_deep", "read.bad_json", "read.undecodable"]
        )
        for name in ("deep", "many", "number", "no-utf-8", "text-34mb"):
            expected.pop(name)
        by_id["id-1mb"] = by_id["i" * MAX_CHARS]  # what is told of an id
    for name, verdict in expected.items():
        row = by_id[name]
        if verdict is not None:
            assert (row["stage"], row["reason"]) == verdict, name
        else:
            assert row["stage"] in (None, "language", "toxicity"), (name, row["reason"])
    if kind == "jsonl":
        check_tokens(settings, rows)


def check_tokens(settings: DataRun, rows: list[dict[str, Any]]) -> None:
    """What a page writes is never the control token: there is one of those behind each document, and no other."""
    names = tuple((part.source, part.name) for part in pages.plan_sources(settings))
    scratch = str(Path(settings.run_dir) / ".work" / "tokens")
    tokens.run(settings.run_dir, names, settings.tokenize, settings.seed, InProcess(), scratch)
    reader = ShardReader(str(Path(settings.run_dir) / "tokens" / "s"))
    ends = int((reader.tokens(0, reader.total_tokens) == reader.eot_id).sum())
    removed = pq.read_table(Path(settings.run_dir) / "duplicates" / "decisions.parquet").num_rows
    assert ends == reader.num_documents == sum(row["stage"] is None for row in rows) - removed
