"""Documents a second and memory of ``quern mix select``, and its time beside the package of DSIR's authors.

    python benchmarks/selection.py --folder DIR [--documents 500000 1000000 2000000] [--words 16] [--join N] [--json]
    python benchmarks/selection.py --texts FILE.jsonl --target FILE.jsonl [--peer PYTHON] [--json]

The first generates runs of so many documents of random words (drawn with weights 1 / rank from 50,000), in files of
100,000, chooses 10,000 documents of each in a process of its own, and gives documents a second and the most memory of
that process (VmHWM), which should be flat from as many documents on as are joined with their spans at once (--join;
2,000,000 by default, and one file at least). A run is begun while --seconds suffice for it.

The second counts and weighs the texts of a file in one process, whose CPU seconds are taken. With --peer data-selection
does so too, by that interpreter, which has it and NLTK, before and after; then the ratio is given, and the greatest
difference of log weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA
from quern.data_run.selection import pool
from quern.data_run.selection.run import Selection, select
from quern.mixtures.importance.features import Features
from quern.mixtures.importance.weights import log_ratio
from quern.tokenize.shard_format import ShardInfo, first_version, spans_file, write_manifest

VOCABULARY, FILE_DOCUMENTS, CHOSEN, BUCKETS = 50_000, 100_000, 10_000, 10_000

PEER = """
import json, sys, tempfile, time
import numpy as np
from data_selection import HashedNgramDSIR
texts, target, out = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    own = HashedNgramDSIR([texts], [target], cache_dir=folder, num_proc=1)
    start = time.process_time()
    own.fit_importance_estimator(num_tokens_to_fit="all")
    own.compute_importance_weights()
    print(json.dumps(time.process_time() - start))
    np.save(out, np.load(f"{folder}/log_importance_weights/0.npy"))
"""


# ---- many documents


def write_run(run: Path, documents: int, words: int) -> None:
    """Tables of texts and the spans of their documents; there are no tokens."""
    rng = np.random.default_rng(documents)
    names = np.array([np.base_repr(10**6 + number, 36).lower() for number in range(VOCABULARY)])
    shares = 1 / np.arange(1, VOCABULARY + 1)
    edges = np.cumsum(shares / shares.sum())
    (run / "documents" / "web").mkdir(parents=True)
    (run / "tokens" / "web").mkdir(parents=True)
    shards = []
    for number, first in enumerate(range(0, documents, FILE_DOCUMENTS)):
        count = min(FILE_DOCUMENTS, documents - first)
        ids = rng.bytes(16 * count)
        drawn = names[np.searchsorted(edges, rng.random((count, words)))]
        texts = [" ".join(row) for row in drawn.tolist()]
        column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(ids)])
        columns = [column, pa.array(texts), pa.nulls(count, pa.string()), pa.array(np.ones(count, bool))]
        table = pa.Table.from_arrays(columns, schema=DOCUMENT_SCHEMA)
        pq.write_table(table, run / "documents" / "web" / f"part-{number:05d}.parquet", row_group_size=4096)
        name = f"shard_{number:05d}"
        spans = spans_file(ids, np.full(count, words + 1), np.zeros(count, bool))
        (run / "tokens" / "web" / f"{name}.spans.parquet").write_bytes(spans)
        tokens = count * (words + 1)
        shards.append(ShardInfo(f"{name}.bin", f"{name}.spans.parquet", tokens, count, "", "", "0" * 16, "f" * 16))
    encoding = {
        "name": "none",
        "ranks": "encoding.tiktoken",
        "sha256": "",
        "vocab_size": 1,
        "dtype": "uint16",
        "eot_id": 0,
    }
    told = {"source": "web", "encoding": "none", "vocab_size": 1, "dtype": "uint16", "eot_id": 0, "seed": 0}
    entry = write_manifest(str(run / "tokens"), "web", "manifest.json", shards, told)
    storage.write_json(str(run / "tokens" / "VERSION.json"), first_version(encoding, {"web": entry}))
    storage.write_json(str(run / "run.json"), {"id": run.name, "config": {}, "counts": {}, "status": "complete"})
    target = names[rng.integers(0, VOCABULARY // 2, (1000, words))].tolist()
    (run / "target.jsonl").write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in target))


def select_once(run: str, join: int) -> None:
    """What the process of one run does: prints seconds and MB."""
    pool.JOIN_DOCUMENTS = join
    start = time.perf_counter()
    asked = Selection(run, "bench", (f"{run}/target.jsonl",), keep_documents=CHOSEN, min_words=1, num_buckets=BUCKETS)
    found = select(asked, workers=1)
    seconds = time.perf_counter() - start
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"documents": found["documents"], "seconds": seconds, "peak_mb": int(peak.split()[1]) / 1000}))


def scale(folder: Path, sizes: list[int], words: int, seconds: float, join: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    begun = time.monotonic()
    for size in sizes:
        expected = size / found[-1]["documents"] * found[-1]["seconds"] if found else 0
        if time.monotonic() - begun + expected > seconds:
            break
        run = folder / f"run-{size}-{words}"
        if not (run / "target.jsonl").exists():
            write_run(run, size, words)
        storage.remove_tree(str(run / "measures"))
        command = [sys.executable, __file__, "--once", str(run), "--join", str(join)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        row = json.loads(done.stdout)
        found.append({**row, "documents_per_s": row["documents"] / row["seconds"]})
    return found


# ---- beside data-selection


def texts_in(path: str) -> Iterator[str]:
    with open(path) as lines:
        for line in lines:
            yield json.loads(line)["text"]


def beside(texts: str, target: str, peer: str | None, folder: str) -> dict[str, Any]:
    def ask() -> tuple[float, np.ndarray]:
        out = f"{folder}/weights.npy"
        done = subprocess.run([str(peer), "-c", PEER, texts, target, out], check=True, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        return float(json.loads(done.stdout.splitlines()[-1])), np.load(out)

    answers = [ask()] if peer else []
    start = time.process_time()
    own = Features(BUCKETS)
    ratio = log_ratio(own.count(texts_in(target)), own.count(texts_in(texts)))
    lines, weights = texts_in(texts), []
    while batch := list(islice(lines, 256)):
        weights.append(own.log_weights(batch, ratio)[0])
    seconds = time.process_time() - start
    found: dict[str, Any] = {"documents": sum(map(len, weights)), "seconds": seconds}
    if peer:
        answers.append(ask())
        found["peer_seconds"] = [answer[0] for answer in answers]
        found["ratio"] = sum(answer[0] for answer in answers) / 2 / seconds
        found["worst_difference"] = float(np.abs(np.concatenate(weights) - answers[0][1]).max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--documents", type=int, nargs="+", default=[500_000, 1_000_000, 2_000_000])
    parser.add_argument("--words", type=int, default=16)
    parser.add_argument("--join", type=int, default=pool.JOIN_DOCUMENTS)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--texts")
    parser.add_argument("--target")
    parser.add_argument("--peer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        select_once(given.once, given.join)
        return
    if (given.folder is None) is (given.texts is None) or (given.texts is None) is not (given.target is None):
        parser.error("expected --folder, or --texts and --target")
    if given.texts:
        with tempfile.TemporaryDirectory() as folder:
            rows = [beside(given.texts, given.target, given.peer, folder)]
    else:
        rows = scale(given.folder, given.documents, given.words, given.seconds, given.join)
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            "  ".join(f"{name} {value if isinstance(value, list) else f'{value:,.4g}'}" for name, value in row.items())
        )
    if given.folder and rows:
        hours = 10_000_000 / rows[-1]["documents_per_s"] / 3600
        print(f"10,000,000 documents of {given.words} words: {hours:.2f} h of one process, by the last rate")


if __name__ == "__main__":
    main()
