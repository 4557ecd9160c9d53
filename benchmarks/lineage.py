"""How fast lineage answers on a large run: show, exposure of one document, the documents of a step; and its index.

    python benchmarks/lineage.py --folder DIR [--documents 10_000_000] [--tokens 10_000_000_000] [--rebuild] [--json]

The run is generated into DIR and stays there for the next call, its index too, and what that cost: verdict rows of full
width (80 measurements) in the row groups that ``quern data run`` writes, three kept documents of four, each with a
span, and a training run over one epoch in steps of ``--global-batch`` sequences. Shards are sparse files: every token
is 0. *Warm* is one process, after a few queries; *new* is a new process, Python's start included, whose files are in
the page cache; *disk* is one whose files are not. Memory is the process's own (RssAnon) and with the pages of mapped
files that were in use (VmHWM). The peer is what one does without an index: DuckDB over the same Parquet files, for the
row of one URL.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern.data_pipeline.dedup.schemas import CLUSTER_SCHEMA, DECISION_SCHEMA
from quern.data_pipeline.page.document import verdict_schema
from quern.mixtures.order import Order
from quern.tokenize.shard_format import MANIFEST, SPANS_SCHEMA, VERSION_FILE, ShardInfo, version_entry
from quern.train.history.ledger import Ledger

MEASURES = tuple(f"family.measure_{number:02}" for number in range(80))
ROWS_PER_FILE, ROW_GROUP = 40_000, 512
SHARD_TOKENS = 1 << 30
SEQ_LEN = 4096
NEW_S, WARM_S, MEMORY_MB = 2.0, 0.1, 1000
QUESTIONS = ("show", "exposure", "step")


# ---- the run


def write_run(run: Path, documents: int, tokens: int, rng: np.random.Generator) -> None:
    """Verdicts, decisions, spans, sparse shards, run.json last."""
    ids = rng.bytes(16 * documents)
    kept = rng.random(documents) < 0.75
    for first in range(0, documents, ROWS_PER_FILE):
        rows = np.arange(first, min(first + ROWS_PER_FILE, documents))
        path = run / "verdicts" / "web" / f"part-{first // ROWS_PER_FILE:05}.warc.gz.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = _verdicts(rows, ids[16 * first : 16 * (int(rows[-1]) + 1)], kept[rows], rng)
        pq.write_table(table, path, row_group_size=ROW_GROUP, compression="zstd")
    (run / "duplicates").mkdir()
    pq.write_table(DECISION_SCHEMA.empty_table(), run / "duplicates" / "decisions.parquet")
    pq.write_table(CLUSTER_SCHEMA.empty_table(), run / "duplicates" / "clusters.parquet")
    places = rng.permutation(np.flatnonzero(kept))
    lengths = np.maximum(2, rng.lognormal(0, 1, len(places)))
    lengths = np.maximum(2, lengths * (tokens / lengths.sum())).astype(np.int64)
    _write_tokens(run / "tokens", np.frombuffer(ids, "V16")[places], lengths)
    (run / "run.json").write_text(json.dumps({"id": "generated", "config": {}, "counts": {}, "status": "complete"}))


def _verdicts(rows: np.ndarray, ids: bytes, kept: np.ndarray, rng: np.random.Generator) -> pa.Table:
    count = len(rows)
    hosts = pa.array((rng.zipf(1.3, count) % 500_000).astype(np.int64)).cast(pa.string())
    pages = pc.binary_join_element_wise("section-", pa.array(rows % 97).cast(pa.string()), "/an-article-with-a-title-",
                                        pa.array(rows).cast(pa.string()), "")  # fmt: skip
    host = pc.binary_join_element_wise("site", hosts, ".example", "")
    urls = pc.binary_join_element_wise("https://", host, "/", pages, "")
    surts = pc.binary_join_element_wise("example,site", hosts, ")/", pages, "")
    files = pa.array([f"crawl-data/CC-MAIN-2026-30/warc/part-{rows[0] // ROWS_PER_FILE:05}.warc.gz"])
    null = pa.nulls(count, pa.string())
    hashes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(rng.bytes(16 * count))])
    columns: dict[str, Any] = {
        "doc_id": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(ids)]),
        "source": pa.array(["web"]).take(pa.array(np.zeros(count, np.int32))),
        "url": urls, "canonical_url": urls, "surt": surts, "host": host,
        "source_file": files.take(pa.array(np.zeros(count, np.int32))),
        "record_offset": pa.array(np.cumsum(rng.integers(5_000, 50_000, count))),
        "record_length": pa.array(rng.integers(5_000, 50_000, count)),
        "pre_filter_hash": hashes, "post_filter_hash": hashes,
        "stage": pa.array(np.where(kept, None, "quality"), pa.string()),
        "reason": pa.array(np.where(kept, None, "gopher.num_words"), pa.string()),
    }  # fmt: skip
    values = rng.random(1000)
    schema = verdict_schema(MEASURES)
    for field in schema:
        if field.name in MEASURES:
            columns[field.name] = pa.array(values[rng.integers(0, 1000, count)])
        elif field.name not in columns:
            columns[field.name] = (
                null.cast(field.type) if not pa.types.is_nested(field.type) else pa.nulls(count, field.type)
            )
    return pa.Table.from_arrays([columns[field.name] for field in schema], schema=schema)


def _write_tokens(root: Path, ids: np.ndarray, lengths: np.ndarray) -> None:
    folder = root / "web"
    folder.mkdir(parents=True)
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))
    (root / "encoding.tiktoken").write_bytes(ranks)
    encoding = {
        "name": "bytes", "ranks": "encoding.tiktoken", "sha256": hashlib.sha256(ranks).hexdigest(), "vocab_size": 257,
        "dtype": "uint16", "eot_id": 256,
    }  # fmt: skip
    ends = np.cumsum(lengths)
    infos, first = [], 0
    while first < len(ids):
        base = int(ends[first - 1]) if first else 0
        stop = min(len(ids), int(np.searchsorted(ends, base + SHARD_TOKENS)) + 1)
        number, tokens = len(infos), int(ends[stop - 1]) - base
        with open(folder / f"shard_{number:05}.bin", "wb") as file:
            file.truncate(2 * tokens)
        own = ids[first:stop].tobytes()
        table = pa.Table.from_arrays(
            [
                pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), stop - first, [None, pa.py_buffer(own)]),
                pa.array(ends[first:stop] - lengths[first:stop] - base),
                pa.array(lengths[first:stop]),
                pa.array(np.zeros(stop - first, bool)),
            ],
            schema=SPANS_SCHEMA,
        )
        spans = f"shard_{number:05}.spans.parquet"
        pq.write_table(table, folder / spans, row_group_size=1 << 16, compression="zstd")
        sha256 = hashlib.sha256((folder / spans).read_bytes()).hexdigest()
        infos.append(
            ShardInfo(f"shard_{number:05}.bin", spans, tokens, stop - first, "0" * 64, sha256, "0" * 16, "f" * 16)
        )
        first = stop
    manifest = {
        "source": "web", "encoding": "bytes", "ranks_sha256": encoding["sha256"], "vocab_size": 257, "dtype": "uint16",
        "eot_id": 256, "seed": 0, "shards": [asdict(info) for info in infos],
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest))
    sha256 = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    entry = version_entry("web", MANIFEST, sha256, infos)
    record = {"version": 1, "parent": None, "kind": "initial", "encoding": encoding, "sources": {"web": entry}}
    (root / VERSION_FILE).write_text(json.dumps(record))


def write_training(folder: Path, run: Path, tokens: int, global_batch: int) -> int:
    """A run over one epoch that was never stopped; returns its steps."""
    windows = (tokens - 1) // SEQ_LEN
    steps = windows // global_batch
    order = Order([1], [windows], 1, ids=["generated/web/1"], seq_len=SEQ_LEN, global_batch=global_batch)
    folder.mkdir()
    with Ledger(folder / "ledger.jsonl") as ledger:
        ledger.move(
            "start", 0, 0, order, document_mask=True, dp=64, micro_batch=1, versions={"generated/web/1": 1},
            paths={"generated/web/1": str(run / "tokens" / "web")},
        )  # fmt: skip
        ledger.append("end", step=steps)
    (folder / "config.yaml").write_text("")
    return steps


# ---- what is measured


@dataclass(frozen=True)
class Cost:
    """Of a process: seconds by the clock and of the processors, the most memory of its own and in all (MB)."""

    wall_s: float
    cpu_s: float
    anon_mb: float
    peak_mb: float


def memory() -> dict[str, float]:
    return _memory("self")


def _memory(process: int | str) -> dict[str, float]:
    """RssAnon, which pages of mapped files are not in, and VmHWM, the most that was ever resident, in MB."""
    lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) / 1024 for line in lines if line[0] in ("RssAnon:", "VmHWM:")}


def measured(command: list[str]) -> tuple[Cost, str]:
    """What ``quern`` with these arguments costs as a new process, Python's start included; and what it printed."""
    anon = peak = 0.0
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "quern.cli.main", *command], stdout=output)
        while not (done := os.wait4(process.pid, os.WNOHANG))[0]:
            with suppress(OSError):  # it ends while it is looked at
                found = _memory(process.pid)
                anon, peak = max(anon, found.get("RssAnon", 0)), max(peak, found.get("VmHWM", 0))
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        if done[1]:
            raise SystemExit(f"{shlex.join(command)} failed with status {done[1]}")
        output.seek(0)
        return Cost(seconds, done[2].ru_utime + done[2].ru_stime, anon, peak), output.read()


def dropped(folder: Path) -> None:
    """Take every file but the shards out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".bin":
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(run: str, training: str, queries: int, seed: int) -> dict[str, Any]:
    """Median and worst seconds of each question in this process, by the clock and of the processor, and its memory."""
    from quern.lineage.exposure import clean, exposures
    from quern.lineage.steps import read_step
    from quern.lineage.store import IndexedRun
    from quern.lineage.trace import trace
    from quern.lineage.training import TrainingRun

    rng = np.random.default_rng(seed)
    lineage, trained = IndexedRun(run), TrainingRun(training)
    chosen = rng.integers(0, lineage.num_documents, 2 * queries)
    urls = lineage.documents(chosen).urls
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("find", *QUESTIONS)}
    documents = []

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began, began_cpu = time.perf_counter(), time.process_time()
        result = call()
        found[name].append((time.perf_counter() - began, time.process_time() - began_cpu))
        return result

    for url in urls:
        (number,) = timed("find", lambda url=url: lineage.find(url=url)).tolist()
        timed("show", lambda number=number: trace(lineage, number))

        def expose(number: int = number) -> Any:
            rows = exposures(trained, [(lineage, [number])])
            return clean(trained, rows)

        timed("exposure", expose)
    for step in rng.integers(0, trained.reached, 10 + queries // 2).tolist():

        def read(step: int = step) -> Any:
            read = read_step(trained, step)
            return lineage.documents(read.documents.numbers)

        documents.append(len(timed("step", read)))
    later = {name: np.array(times[len(times) // 4 :]) for name, times in found.items()}
    return {
        "median_s": {name: float(np.median(times[:, 0])) for name, times in later.items()},
        "median_cpu_s": {name: float(np.median(times[:, 1])) for name, times in later.items()},
        "worst_s": {name: float(times[:, 0].max()) for name, times in later.items()},
        "documents_a_step": median(documents), "peak_mb": memory()["VmHWM"], "anon_mb": memory()["RssAnon"],
        "url": urls[0],
    }  # fmt: skip


def scan(run: str, url: str) -> float:
    """Seconds that DuckDB needs for the row of one URL, over the same files."""
    import duckdb

    began = time.perf_counter()
    connection = duckdb.connect()
    rows = connection.execute(
        "select * from read_parquet($1) where url = $2", [f"{run}/verdicts/*/*.parquet", url]
    ).fetchall()
    assert len(rows) == 1
    return time.perf_counter() - began


def build(run: Path, note: Path, rebuild: bool) -> dict[str, Any]:
    """What the index cost that stands there, built now if it does not stand; ``note`` keeps it for the next call."""
    if rebuild:
        shutil.rmtree(run / "lineage", ignore_errors=True)
    cost, printed = measured(["lineage", "index", str(run), "--json"])
    found = json.loads(printed)
    if found["built"]:
        note.write_text(json.dumps(asdict(cost)))
    costs = json.loads(note.read_text()) if note.exists() else None
    return {"documents": found["documents"], "segments": found["segments"], "build": costs,
            "index_bytes": sum(found["size_bytes"].values())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=10_000_000_000)
    parser.add_argument("--global-batch", type=int, default=1024)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3, help="new processes a command; the quickest counts")
    parser.add_argument("--rebuild", action="store_true", help="build the index anew, also where it stands")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--warm", nargs=2, metavar=("RUN", "TRAIN_RUN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        run, training = args.warm
        print(json.dumps(warm(run, training, args.queries, 0)))
        return
    run, training = args.folder / "run", args.folder / "train"
    if not (run / "run.json").exists():
        write_run(run, args.documents, args.tokens, np.random.default_rng(0))
    manifest = json.loads((run / "tokens" / "web" / MANIFEST).read_text())
    tokens = sum(shard["tokens"] for shard in manifest["shards"])
    if not training.exists():
        write_training(training, run, tokens, args.global_batch)
    index = build(run, args.folder / "build.json", args.rebuild)
    command = [sys.executable, __file__, "--folder", str(args.folder), "--queries", str(args.queries)]
    inside = json.loads(subprocess.check_output([*command, "--warm", str(run), str(training)], text=True))
    url = inside["url"]
    outside = {
        "show": ["lineage", "show", str(run), "--url", url],
        "exposure": ["lineage", "exposure", str(training), "--url", url],
        "step": ["lineage", "step", str(training), "7", "--json"],
    }
    new, cold = {}, {}
    for name in QUESTIONS:
        runs = [measured(outside[name])[0] for _ in range(args.rounds)]
        new[name] = Cost(min(cost.wall_s for cost in runs), min(cost.cpu_s for cost in runs),
                         max(cost.anon_mb for cost in runs), max(cost.peak_mb for cost in runs))  # fmt: skip
        dropped(args.folder)
        cold[name] = measured(outside[name])[0].wall_s
    scan_s = scan(str(run), url)
    goals = {
        **{f"{name}, warm": inside["median_s"][name] < WARM_S for name in QUESTIONS},
        **{f"{name}, new process": new[name].wall_s < NEW_S for name in QUESTIONS},
        **{f"{name}, memory": new[name].peak_mb < MEMORY_MB for name in QUESTIONS},
        "warm process, memory": inside["peak_mb"] < MEMORY_MB,
        **({"index, memory": index["build"]["peak_mb"] <= MEMORY_MB} if index["build"] else {}),
    }
    result = {
        **index, "tokens": tokens, "bytes_a_document": index["index_bytes"] / index["documents"], "warm": inside,
        "new": {name: asdict(cost) for name, cost in new.items()}, "cold_s": cold, "scan_s": scan_s,
        "scan_to_find": scan_s / inside["median_s"]["find"], "goals": goals,
    }  # fmt: skip
    print(json.dumps(result, indent=2) if args.json else report(result))


def report(result: dict[str, Any]) -> str:
    """The table."""
    documents, made, inside = result["documents"], result["build"], result["warm"]
    lines = [
        f"{documents:,} documents, {result['tokens']:,} tokens; index {result['index_bytes'] / 1e6:,.0f} MB in "
        f"{result['segments']} segments, {result['bytes_a_document']:.0f} bytes a document"
    ]
    if made is not None:
        lines.append(
            f"built and checked in {made['wall_s']:.0f} s, {documents / made['wall_s']:,.0f} documents a second; "
            f"CPU {made['cpu_s']:.0f} s, {documents / made['cpu_s']:,.0f}; "
            f"peak {made['anon_mb']:,.0f} MB of its own, {made['peak_mb']:,.0f} MB with mapped files"
        )
    lines.append(
        f"{'':<10}{'warm ms':>9}{'CPU':>8}{'worst':>9}{'new s':>8}{'CPU':>7}{'disk s':>8}{'own MB':>8}{'peak':>7}"
    )
    for name in ("find", *QUESTIONS):
        row = f"{name:<10}{inside['median_s'][name] * 1e3:>9.1f}{inside['median_cpu_s'][name] * 1e3:>8.1f}"
        row += f"{inside['worst_s'][name] * 1e3:>9.1f}"
        if name in result["new"]:
            new = result["new"][name]
            row += f"{new['wall_s']:>8.2f}{new['cpu_s']:>7.2f}{result['cold_s'][name]:>8.2f}"
            row += f"{new['anon_mb']:>8,.0f}{new['peak_mb']:>7,.0f}"
        lines.append(row)
    missed = [name for name, met in result["goals"].items() if not met]
    lines += [
        f"a step has {inside['documents_a_step']:,.0f} documents; the warm process took {inside['anon_mb']:,.0f} MB of "
        f"its own, {inside['peak_mb']:,.0f} MB with mapped files",
        f"one URL: {inside['median_s']['find'] * 1e3:.2f} ms; DuckDB over the tables {result['scan_s']:.1f} s, "
        f"{result['scan_to_find']:,.0f} times as long",
        "every goal is met" if not missed else f"missed: {'; '.join(missed)}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
