"""Exported texts against the decoded tokens of the corpus, read back by DuckDB, pyarrow and plain Python."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from quern import storage
from quern.cli.main import app
from quern.errors import InputError
from quern.lineage.store import IndexedRun
from quern.lineage.texts import export_texts
from support.purge import corpus_scan, small_run

pytestmark = pytest.mark.slow

COLUMN = "text.num_words"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which a rewrite left out the pages of one site, and a mask those of another."""
    base = tmp_path_factory.mktemp("texts")
    small_run.write_input(base / "in")
    small_run.make(small_run.settings(str(base / "run"), base / "in"))
    for mode, domain in (("rewrite", "a.example"), ("mask", "leak.example")):
        told = CliRunner().invoke(app, ["lineage", "purge", str(base / "run"), "--mode", mode, "--domain", domain])
        assert told.exit_code == 0, told.output
    return base / "run"


def decoded(run: Path) -> dict[str, dict[str, str]]:
    """Stream → doc_id → text, from the tokens alone."""
    lines = (run / "tokens" / "encoding.tiktoken").read_text().split("\n")
    ranks = {int(rank): base64.b64decode(token) for token, rank in (line.split() for line in lines if line)}
    return {
        stream: {
            piece.doc_id.hex(): b"".join(ranks[token] for token in piece.tokens[:-1]).decode()
            for shard in shards
            for piece in shard
            if not piece.purged
        }
        for stream, shards in corpus_scan.scan(run).items()
    }


def json_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.glob("s/*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            yield path.name.split("-")[0], json.loads(line)


def test_every_format_holds_the_decoded_tokens_of_the_current_version(run: Path, tmp_path: Path) -> None:
    expected, lineage = decoded(run), IndexedRun(str(run))
    texts = {"train": expected["s"], "validation": expected["s.val"]}
    table = corpus_scan.verdicts(run, ["doc_id", "url", COLUMN])
    of = {row["doc_id"].hex(): (row["url"], row[COLUMN]) for row in table}
    assert min(map(len, texts.values())) >= 3
    for format in ("jsonl", "parquet", "hf"):
        export_texts(lineage, format, str(tmp_path / format), columns=[COLUMN], file_bytes=2000)  # type: ignore[arg-type]
        record = json.loads((tmp_path / format / "export.json").read_text())
        assert record["documents"] == sum(map(len, texts.values()))
        assert len(record["files"]) > 2
        for file in record["files"]:
            data = (tmp_path / format / file["file"]).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
    for split, wanted in texts.items():
        plain = [row for own, row in json_rows(tmp_path / "jsonl") if own == split]
        assert {row["id"]: row["text"] for row in plain} == wanted
        assert len(plain) == len(wanted)
        files = str(tmp_path / "parquet" / "s" / f"{split}-*.parquet")
        assert dict(duckdb.sql(f"SELECT id, text FROM '{files}'").fetchall()) == wanted
        rows = [
            row for path in sorted(tmp_path.glob(f"hf/s/{split}-*.parquet")) for row in pq.read_table(path).to_pylist()
        ]
        assert rows == plain
        assert all((row["url"], row[COLUMN]) == of[row["id"]] for row in rows)


def test_the_card_names_the_files_of_each_source_and_split(run: Path, tmp_path: Path) -> None:
    export_texts(IndexedRun(str(run)), "hf", str(tmp_path / "out"))
    card = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---")[1])
    (config,) = card["configs"]
    assert config["config_name"] == "s"
    for entry in config["data_files"]:
        (path,) = (tmp_path / "out").glob(entry["path"])
        assert path.name.startswith(entry["split"])


def test_a_cut_off_export_has_no_record_and_nothing_half_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage, asked = IndexedRun(str(run)), []

    def fails(numbers: Any) -> Any:
        asked.append(len(numbers))
        if len(asked) > 1:
            raise KeyboardInterrupt
        return IndexedRun.spans_of(lineage, numbers)

    monkeypatch.setattr(lineage, "spans_of", fails)
    with pytest.raises(KeyboardInterrupt):
        export_texts(lineage, "jsonl", str(tmp_path / "out"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(InputError, match=r"out: is not empty; expected a new folder"):
        export_texts(lineage, "jsonl", str(tmp_path / "out"))


def test_times_hashes_and_lists_of_the_verdicts_are_plain(run: Path, tmp_path: Path) -> None:
    columns = ["fetched_at", "post_filter_hash", "failed_rules", "record_offset"]
    export_texts(IndexedRun(str(run)), "jsonl", str(tmp_path / "out"), columns=columns)
    of = {row["doc_id"].hex(): row for row in corpus_scan.verdicts(run, ["doc_id", *columns])}
    for _, row in json_rows(tmp_path / "out"):
        verdict = of[row["id"]]
        time = verdict["fetched_at"]
        assert row["fetched_at"] == row["date"] == (None if time is None else time.isoformat())
        assert row["post_filter_hash"] == verdict["post_filter_hash"].hex()
        assert (row["failed_rules"], row["record_offset"]) == (verdict["failed_rules"], verdict["record_offset"])


def test_a_folder_of_another_name_and_a_store_may_hold_the_export(tmp_path: Path) -> None:
    folder = tmp_path / "documents" / "x"  # the word is that of a folder of the run
    small_run.write_input(folder / "in", documents=24)
    small_run.make(small_run.settings(str(folder / "run"), folder / "in"))
    out = "memory://texts-of-a-run"
    done = export_texts(IndexedRun(str(folder / "run")), "parquet", out)
    assert sorted(name.split("texts-of-a-run/")[1] for name in storage.list_files(out)) == [
        "export.json", *sorted(file["file"] for file in done.files)
    ]  # fmt: skip
    rows = pq.read_table(pa.BufferReader(storage.read_bytes(f"{out}/s/train-00000.parquet"))).to_pylist()
    assert {row["id"]: row["text"] for row in rows} == decoded(folder / "run")["s"]


def test_what_is_not_there_is_named(run: Path, tmp_path: Path) -> None:
    lineage = IndexedRun(str(run))
    with pytest.raises(InputError, match=r"--source: .*run has no source 'web' \(it has s\)"):
        export_texts(lineage, "jsonl", str(tmp_path / "out"), sources=["web"])
    with pytest.raises(InputError, match=r"verdicts/s/.*: has no column 'gopher.nothing'"):
        export_texts(lineage, "parquet", str(tmp_path / "out"), columns=["gopher.nothing"])
    bare = IndexedRun(str(run))
    bare.streams = ()
    with pytest.raises(InputError, match=r"has no tokens"):
        export_texts(bare, "jsonl", str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"--column: url is there already"):
        export_texts(lineage, "parquet", str(tmp_path / "out"), columns=["url"])
    told = CliRunner().invoke(app, ["data", "export", str(run), "--format", "csv", "--out", str(tmp_path / "out")])
    assert told.exit_code == 2
    assert "--format: expected one of jsonl, parquet, hf, got 'csv'" in told.stderr
