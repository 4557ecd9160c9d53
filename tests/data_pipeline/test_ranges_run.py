"""A run over large files cut into ranges is the run over whole files: verdicts, damage, tokens, counts, resumption."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from quern import storage
from quern.cli.main import app
from quern.data_pipeline import partition, report
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.engine import InProcess
from quern.data_pipeline.execution.run_directory import open_run
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_run.config import DataRun
from quern.tokenize.writing import run as tokens

WORDS = [
    *("river", "lantern", "harbour", "orchard", "mirror", "saddle", "copper"),
    *("window", "garden", "thunder", "ribbon", "kettle", "meadow", "anchor"),
]


def record(number: int, *, compress: bool, body: bytes | None = None) -> bytes:
    lines = [
        f"<p>The {WORDS[(number + line) % 14]} of {number} meets the {WORDS[(number * 3 + line) % 14]} on day {line}, "
        f"and number {number * line} tells nobody about it.</p>"
        for line in range(8)
    ]
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=compress)
    head = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
    page = f"<html><head><title>{number}</title></head><body>{''.join(lines)}</body></html>".encode()
    dated = {"WARC-Date": "2024-01-01T00:00:00Z", "WARC-Record-ID": f"<urn:x:{number}>"}
    writer.write_record(
        writer.create_warc_record(
            f"http://e{number % 5}.com/{number}", "response", payload=io.BytesIO(body or page), http_headers=head,
            warc_headers_dict=dated,
        )
    )  # fmt: skip
    return out.getvalue()


def write_crawls(folder: Path) -> None:
    """Packed and plain, sound and damaged; a crawl inside a page; one member of many records; nothing at all."""
    folder.mkdir(parents=True)
    packed = [record(n, compress=True) for n in range(24)]
    damaged = bytearray(b"".join(packed[:12]))
    for at in (3 * len(packed[0]), 3 * len(packed[0]) + 90, len(damaged) - 400):
        damaged[at] ^= 0xFF
    (folder / "a.warc.gz").write_bytes(bytes(damaged) + b"junk" * 60 + b"".join(packed[12:]))
    plain = [record(n, compress=False) for n in range(30, 50)]
    inner = record(90, compress=False, body=b"".join(record(n, compress=False) for n in range(60, 75)))
    (folder / "b.warc").write_bytes(b"".join([*plain[:5], inner, *plain[5:]]))
    stored = gzip.compress(record(91, compress=False, body=b"".join(packed[:9])), compresslevel=0, mtime=0)
    (folder / "c.warc.gz").write_bytes(b"".join([*(record(n, compress=True) for n in (80, 81)), stored, packed[20]]))
    (folder / "d.warc.gz").write_bytes(gzip.compress(b"".join(plain[:9]), mtime=0))
    (folder / "e.warc").write_bytes(bytes(30_000))


def config(base: Path, run: str, split_bytes: int, **more: Any) -> DataRun:
    return DataRun.model_validate(
        {
            "run_dir": str(base / run),
            "sources": [{"name": "s", "kind": "warc", "paths": str(base / "in" / "*"), "split_bytes": split_bytes}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False},
            "quality": {"order": []},
            "tokenize": {"encoding": "trained", "vocab_size": 400, "validation": 0.1, "shard_tokens": 900},
            **more,
        }
    )


def grind(settings: DataRun, console: Console | None = None) -> dict[str, Any]:
    partitions = pages.plan_sources(settings)
    plain = settings.model_dump(mode="json")
    with open_run(settings.run_dir, plain, pages.inputs_identity(partitions)) as directory:
        with RunProgress(background=False, console=console) as progress:
            result = pages.run(settings, partitions, InProcess(), progress)
        found = tokens.run(
            settings.run_dir, result.partitions, settings.tokenize, settings.seed, InProcess(),
            storage.join(directory.scratch, "tokens"),
        )  # fmt: skip
        counted = asdict(found)["sources"]
        stats = report.build_stats(directory.path, result.duplicates, counted, result.partitions)
        report.write_stats(directory.path, stats)
        directory.finish({key: stats[key] for key in ("pages", "kept", "unique")}, pages.inputs_digest(partitions))
    return {"stats": stats, "run": directory.record}


def facts(run: Path) -> dict[str, Any]:
    """Everything a run says of its pages, in an order that knows no partitions."""
    rows = {}
    for table in ("verdicts", "documents", "signatures"):
        found = [row for path in (run / table).rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
        rows[table] = sorted(found, key=lambda row: row["doc_id"])
    shards = {path.name: path.read_bytes() for path in sorted((run / "tokens").rglob("*")) if path.is_file()}
    return {"rows": rows, "tokens": shards}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The crawls, and a run that reads each file whole."""
    folder = tmp_path_factory.mktemp("ranges")
    write_crawls(folder / "in")
    made = grind(config(folder, "whole", 1 << 30))
    assert len(pages.plan_sources(config(folder, "whole", 1 << 30))) == 5
    return folder, made, facts(folder / "whole")


def in_both(stats: dict[str, Any]) -> dict[str, Any]:
    """The counts that know no partitions; damage as a set."""
    left = {key: value for key, value in stats.items() if key not in ("partitions", "timing", "sources", "damage")}
    return left | {"damage": sorted(json.dumps(one, sort_keys=True) for one in stats["damage"]["first"])}


@pytest.mark.slow
@pytest.mark.parametrize("split_bytes", [2500, pytest.param(9000, marks=pytest.mark.long)])
def test_a_run_in_ranges_makes_the_same_run(
    base: tuple[Path, Any, Any], split_bytes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, whole, expected = base
    name = f"cut-{split_bytes}"
    screen = io.StringIO()
    made = grind(config(folder, name, split_bytes), Console(file=screen, width=200))
    assert facts(folder / name) == expected
    assert in_both(made["stats"]) == in_both(whole["stats"])
    assert made["stats"]["damage"]["count"] == whole["stats"]["damage"]["count"] > 5
    assert made["run"]["config_hash"] == whole["run"]["config_hash"]
    assert made["run"]["inputs"] == whole["run"]["inputs"]
    assert made["run"]["id"] == whole["run"]["id"]
    # What the view said at the end of the pages is what there is, though some ranges were read twice.
    summary = next(line for line in screen.getvalue().splitlines() if line.startswith("pages: done"))
    num = whole["stats"]["pages"]
    partitions = len(pages.plan_sources(config(folder, name, split_bytes)))
    assert partitions > 5
    assert f"{partitions:,}/{partitions:,} partitions, {num} pages" in summary.replace(" (", ", (").replace(", (", " (")
    capfd.readouterr()
    app(["data", "status", str(folder / name), "--json"], standalone_mode=False)
    told = json.loads(capfd.readouterr().out)
    assert told["phases"]["pages"]["pages"] == num
    assert told["phases"]["pages"]["kept"] == whole["stats"]["kept"]


@pytest.mark.slow
def test_a_run_that_died_while_ranges_were_put_right_goes_on_and_may_cut_otherwise(
    base: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, expected = base
    settings = config(folder, "killed", 2500)
    process, left = pages.process_partition, [len(pages.plan_sources(settings)) + 2]

    def dying(task: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return process(task)

    with monkeypatch.context() as patch:
        patch.setattr(pages, "process_partition", dying)
        with pytest.raises(KeyboardInterrupt):
            grind(settings)
    assert left[0] < 0, "it died among ranges that were read again"
    done: list[str] = []

    def counting(task: Any) -> Any:
        done.append(task.partition.name)
        return process(task)

    with monkeypatch.context() as patch:
        patch.setattr(pages, "process_partition", counting)
        grind(settings)
    assert 0 < len(done) < len(pages.plan_sources(settings))
    assert facts(folder / "killed") == expected


@pytest.mark.slow
def test_rows_of_a_range_read_from_one_place_are_not_mixed_with_those_from_another(
    base: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range that is read again dies behind its first flush; the next driver reads it from its own beginning first."""
    folder, _, expected = base
    settings = config(folder, "mixed", 2500)
    process, judge, state = pages.process_partition, partition._judge, {"again": False, "judged": 0}

    def watched(task: Any) -> Any:
        state["again"] = task.partition.range is not None and task.partition.range.first is not None
        state["judged"] = 0
        return process(task)

    def dying(*given: Any) -> Any:
        state["judged"] += 1
        if state["again"] and state["judged"] == 2:
            raise KeyboardInterrupt
        return judge(*given)

    monkeypatch.setattr(partition, "FLUSH_PAGES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(pages, "process_partition", watched)
        patch.setattr(partition, "_judge", dying)
        with pytest.raises(KeyboardInterrupt):
            grind(settings)
    assert list((folder / "mixed" / ".work").rglob("part-*"))
    grind(settings)
    assert facts(folder / "mixed") == expected


@pytest.mark.slow
def test_an_unfinished_run_may_be_cut_otherwise(base: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, expected = base
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_encode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            grind(config(folder, "recut", 2500))
    grind(config(folder, "recut", 9000))
    assert facts(folder / "recut") == expected


def test_the_plan_counts_each_file_once(base: tuple[Path, Any, Any]) -> None:
    folder, _, _ = base
    settings = config(folder, "planned", 2500)
    partitions = pages.plan_sources(settings)
    files = list((folder / "in").iterdir())
    assert sum(partition.size for partition in partitions) == sum(path.stat().st_size for path in files)
    assert len({partition.name for partition in partitions}) == len(partitions) > len(files)
    assert pages.inputs_digest(partitions) == pages.inputs_digest(
        pages.plan_sources(config(folder, "planned", 1 << 30))
    )


def test_the_clock_of_a_page_is_told_of_work_that_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    one, two = record(1, compress=True), record(2, compress=True)
    (tmp_path / "in" / "a.warc.gz").write_bytes(one + bytes(12 << 20) + two)
    calls: list[int] = []

    class Counting(partition.Watchdog):
        def page(self) -> None:
            calls.append(1)
            super().page()

    monkeypatch.setattr(partition, "Watchdog", Counting)
    settings = config(tmp_path, "run", 1 << 30)
    with RunProgress(background=False) as progress:
        pages.run(settings, pages.plan_sources(settings), InProcess(), progress)
    assert len(calls) >= 12 + 3
