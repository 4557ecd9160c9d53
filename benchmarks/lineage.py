"""How fast lineage answers on a large run: show, exposure of one document, the documents of a step; and its index.

    python benchmarks/lineage.py --folder DIR [--documents 10_000_000] [--tokens 10_000_000_000] [--queries 50] [--json]

The run is generated into DIR and stays there for the next call: verdict rows of full width (80 measurements) in the row
groups that ``quern data run`` writes, three kept documents of four, each with a span, and a training run over one epoch
in steps of ``--global-batch`` sequences. Shards are sparse files: every token is 0. *Cold* is a new process, Python's
start included, with the index and the tables dropped from the page cache; *warm* is one process, after a few queries.
The peer is what one does without an index: DuckDB over the same Parquet files, for the row of one URL.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern.data_pipeline.dedup.decide import CLUSTER_SCHEMA, DECISION_SCHEMA
from quern.data_pipeline.document import verdict_schema
from quern.mixtures.order import Order
from quern.tokenize.shard_format import MANIFEST, SPANS_SCHEMA, VERSION_FILE, ShardInfo, version_entry
from quern.train.ledger import Ledger

MEASURES = tuple(f"family.measure_{number:02}" for number in range(80))
ROWS_PER_FILE, ROW_GROUP = 40_000, 512
SHARD_TOKENS = 1 << 30
SEQ_LEN = 4096
COLD_S, WARM_S, MEMORY_MB = 2.0, 0.1, 1000


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
        "eot_id": 256, "seed": 0, "shards": [info.to_dict() for info in infos],
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


def warm(run: str, training: str, queries: int, seed: int) -> dict[str, Any]:
    """Median seconds of each question in this process, and its memory."""
    from quern.lineage.exposure import clean, exposures
    from quern.lineage.steps import read_step
    from quern.lineage.store import Lineage
    from quern.lineage.trace import trace
    from quern.lineage.training import TrainingRun

    rng = np.random.default_rng(seed)
    lineage, trained = Lineage(run), TrainingRun(training)
    chosen = rng.integers(0, lineage.num_documents, 2 * queries)
    urls = lineage.documents(chosen).urls
    found: dict[str, list[float]] = {"find": [], "show": [], "exposure": [], "step": []}
    documents = []

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        found[name].append(time.perf_counter() - began)
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    medians = {name: median(times[len(times) // 4 :]) for name, times in found.items()}
    worst = {name: max(times[len(times) // 4 :]) for name, times in found.items()}
    return {"median_s": medians, "worst_s": worst, "documents_a_step": median(documents), "memory_mb": peak,
            "url": urls[0]}  # fmt: skip


def cold(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall seconds and peak MB of a command whose files are not in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".bin":
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "quern.cli.main", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"{shlex.join(command)} failed with status {status}")
    return seconds, usage.ru_maxrss / 1024


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=10_000_000_000)
    parser.add_argument("--global-batch", type=int, default=1024)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--warm", nargs=2, metavar=("RUN", "TRAIN_RUN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        print(json.dumps(warm(*args.warm, args.queries, 0)))
        return
    run, training = args.folder / "run", args.folder / "train"
    if not (run / "run.json").exists():
        write_run(run, args.documents, args.tokens, np.random.default_rng(0))
    if not training.exists():
        tokens = sum(shard["tokens"] for shard in json.loads((run / "tokens" / "web" / MANIFEST).read_text())["shards"])
        write_training(training, run, tokens, args.global_batch)
    index = run / "lineage"
    build_s = None
    if not index.exists():
        began = time.perf_counter()
        _, build_mb = cold(["lineage", "index", str(run)], run)
        build_s = time.perf_counter() - began
    size = sum(path.stat().st_size for path in index.rglob("*") if path.is_file())
    command = [sys.executable, __file__, "--folder", str(args.folder), "--queries", str(args.queries)]
    inside = json.loads(subprocess.check_output([*command, "--warm", str(run), str(training)], text=True))
    url = inside["url"]
    outside = {
        "show": ["lineage", "show", str(run), "--url", url],
        "exposure": ["lineage", "exposure", str(training), "--url", url],
        "step": ["lineage", "step", str(training), "7", "--json"],
    }
    colds = {name: min(cold(arguments, args.folder) for _ in range(3)) for name, arguments in outside.items()}
    scan_s = scan(str(run), url)
    result = {
        "documents": args.documents, "tokens": args.tokens, "index_bytes": size,
        "bytes_a_document": size / args.documents, "build_s": build_s,
        "build_mb": build_mb if build_s else None, **inside, "cold_s": {n: s for n, (s, _) in colds.items()},
        "cold_mb": {n: mb for n, (_, mb) in colds.items()}, "scan_s": scan_s,
        "scan_to_find": scan_s / inside["median_s"]["find"],
    }  # fmt: skip
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{args.documents:,} documents, {args.tokens:,} tokens; index {size / 1e6:,.0f} MB, "
          f"{size / args.documents:.0f} bytes a document")  # fmt: skip
    if build_s is not None:
        print(f"built in {build_s:.0f} s, {args.documents / build_s:,.0f} documents a second, peak {build_mb:,.0f} MB")
    print(f"{'':<10}{'warm, median':>14}{'worst':>10}{'cold':>10}{'peak MB':>10}")
    for name in ("show", "exposure", "step"):
        print(f"{name:<10}{inside['median_s'][name] * 1e3:>11.1f} ms{inside['worst_s'][name] * 1e3:>7.1f} ms"
              f"{colds[name][0]:>8.2f} s{colds[name][1]:>10,.0f}")  # fmt: skip
    print(
        f"a step has {inside['documents_a_step']:,.0f} documents; the warm process took {inside['memory_mb']:,.0f} MB"
    )
    print(f"one URL: {inside['median_s']['find'] * 1e3:.2f} ms; DuckDB over the tables {scan_s:.1f} s, "
          f"{result['scan_to_find']:,.0f} times as long")  # fmt: skip
    good = all(inside["median_s"][name] < WARM_S for name in ("show", "exposure", "step"))
    good &= all(seconds < COLD_S and mb < MEMORY_MB for seconds, mb in colds.values())
    print("every goal is met" if good and inside["memory_mb"] < MEMORY_MB else "a goal is missed")


if __name__ == "__main__":
    main()
