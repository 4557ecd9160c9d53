"""What a purge costs by the shards it touches: wall, CPU and bytes, beside a plain copy of the same files.

    python benchmarks/purge.py --folder /tmp/purge --shards 1000 --shard-tokens 1000000 --touched 1 10 100 1000

A run of generated shards, texts and verdicts is made in ``--folder`` (``--keep`` leaves it there, and the next call
takes it up). Then, for each mode and number of shards, one document of each of so many shards is purged, on the run
that the purge before left. ``copy`` is ``cp`` of the touched shards' files, with fsync, in one thread, just before.

``fixed`` is a purge of a page that was dropped, which has no tokens: select, texts, tombstones, audit, and no shard.
Only its selection grows with the run: it reads the ids of every verdict.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern.data_pipeline.dedup.schemas import CLUSTER_SCHEMA, DECISION_SCHEMA
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, verdict_schema
from quern.lineage.purge.apply.transaction import Request, purge
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import Wanted
from quern.tokenize.place import keyed_hashes
from quern.tokenize.shard_format import MANIFEST, VERSION_FILE, ShardWriter, version_entry

SEED = 3
EOT = 50_256
PARTITIONS = 50
DROPPED = 100
"""Pages without tokens, to measure what a purge costs that touches no shard."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--shard-tokens", type=int, default=1_000_000)
    parser.add_argument("--documents", type=int, default=1000, help="of each shard")
    parser.add_argument("--touched", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--modes", nargs="+", default=["mask", "rewrite"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--results", type=Path, help="a file to which each measurement is appended as a line of JSON")
    return parser.parse_args()


def main() -> None:
    args = parse()
    run = args.folder / "run"
    if not (run / "run.json").exists():
        make(run, args.shards, args.shard_tokens, args.documents)
    rows = []
    for _ in range(args.rounds):
        for mode in args.modes:
            for touched in (0, *args.touched):
                row = measure(run, args.folder / "copy", mode, touched, args.workers)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                if args.results:
                    with args.results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print(table(rows))
    if not args.keep:
        shutil.rmtree(args.folder)


def make(run: Path, shards: int, shard_tokens: int, documents: int) -> None:
    """A complete run: a source ``web`` of equal shards, whose texts are stand-ins."""
    draw = np.random.default_rng(SEED)
    count = shards * documents
    ids = [own.tobytes() for own in draw.integers(0, 256, (count + DROPPED, 16), np.uint8)]
    keys = keyed_hashes(SEED, "place", ids[:count])
    order = np.argsort(keys, kind="stable")
    folder = run / "tokens" / "web"
    folder.mkdir(parents=True)
    lengths = np.full(documents, shard_tokens // documents, np.int64)
    infos = []
    for number in range(shards):
        mine = order[number * documents : (number + 1) * documents]
        tokens = draw.integers(0, EOT, int(lengths.sum()), np.uint16)
        tokens[np.cumsum(lengths) - 1] = EOT
        with ShardWriter(str(folder), number, "uint16") as writer:
            writer.add(b"".join(ids[row] for row in mine.tolist()), lengths, tokens)
            infos.append(writer.finish(first_key=int(keys[mine[0]]), last_key=int(keys[mine[-1]])))
    encoding = {"name": "own", "sha256": "0" * 64, "vocab_size": EOT + 1, "dtype": "uint16", "eot_id": EOT}
    manifest = {
        "source": "web", "encoding": "own", "ranks_sha256": "0" * 64, "vocab_size": EOT + 1, "dtype": "uint16",
        "eot_id": EOT, "seed": SEED, "shards": [asdict(info) for info in infos],
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest))
    sha256 = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    entry = version_entry("web", MANIFEST, sha256, infos)
    version = {
        "version": 1, "parent": None, "kind": "initial", "encoding": {**encoding, "ranks": "encoding.tiktoken"},
        "sources": {"web": entry},
    }  # fmt: skip
    (run / "tokens" / VERSION_FILE).write_text(json.dumps(version))
    write_tables(run, ids, count)
    (run / "run.json").write_text(json.dumps({"id": "0" * 32, "config": {}, "counts": {}, "status": "complete"}))


def write_tables(run: Path, ids: list[bytes], count: int) -> None:
    """Verdicts and texts of all documents, dealt over the partitions; the last ``DROPPED`` were dropped."""
    for part in range(PARTITIONS):
        mine = range(part, len(ids), PARTITIONS)
        own = [ids[row] for row in mine]
        stages = [None if row < count else "language" for row in mine]
        urls = [f"https://site-{row % 997}.example/{row}" for row in mine]
        hashes = [hashlib.blake2b(doc_id, digest_size=16).digest() for doc_id in own]
        schema = verdict_schema(())
        filled = {"doc_id": own, "source": ["web"] * len(own), "url": urls, "canonical_url": urls, "stage": stages,
                  "pre_filter_hash": hashes, "post_filter_hash": hashes}  # fmt: skip
        blank = {"record_offset": 0, "record_length": 0, "source_file": "part.warc.gz"}
        columns = [
            pa.array(filled[field.name], field.type)
            if field.name in filled
            else pa.repeat(pa.scalar(blank.get(field.name), field.type), len(own))
            for field in schema
        ]
        write(run / f"verdicts/web/part-{part:03d}.parquet", pa.table(columns, schema=schema))
        texts = {"doc_id": own, "text": [f"text of page {row}" for row in mine], "kept": [s is None for s in stages]}
        columns = [
            pa.array(texts[field.name], field.type) if field.name in texts else pa.nulls(len(own), field.type)
            for field in DOCUMENT_SCHEMA
        ]
        write(run / f"documents/web/part-{part:03d}.parquet", pa.table(columns, schema=DOCUMENT_SCHEMA))
    write(run / "duplicates/decisions.parquet", DECISION_SCHEMA.empty_table())
    write(run / "duplicates/clusters.parquet", CLUSTER_SCHEMA.empty_table())


def write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd")


def measure(run: Path, scratch: Path, mode: Any, touched: int, workers: int) -> dict[str, Any]:
    """One purge, and before it a copy of what it will write."""
    files, doc_ids = choose(run, touched)
    copied = copy(files, scratch)
    shutil.rmtree(scratch, ignore_errors=True)
    wanted = Wanted(doc_ids=frozenset(doc_ids))
    request = Request(
        str(run), mode, lambda path: find_deletion_set(path, wanted), {"doc": len(doc_ids)}, workers=workers
    )
    written, begun, cpu = wrote(), time.monotonic(), times()
    report = purge(request)
    wall, cpu = time.monotonic() - begun, times() - cpu
    assert report["shards_touched"] == touched
    return {
        "mode": mode, "touched": touched, "bytes": report["bytes_read"], "wall_s": round(wall, 3),
        "cpu_s": round(cpu, 3), "written_bytes": wrote() - written, "copy": copied, "parts": report["seconds"],
    }  # fmt: skip


def choose(run: Path, touched: int) -> tuple[list[Path], list[bytes]]:
    """Files of so many shards, evenly spread, and one document of each that is not purged; of none: a dropped page."""
    tokens = run / "tokens"
    version = json.loads((tokens / VERSION_FILE).read_text())
    shards = version["sources"]["web"]["shards"]
    if not touched:
        table = pq.read_table(run / "verdicts/web/part-000.parquet", columns=["doc_id", "stage"])
        dropped = [row["doc_id"] for row in table.to_pylist() if row["stage"]]
        return [], [dropped[version["version"] % len(dropped)]]
    files, doc_ids = [], []
    for at in np.linspace(0, len(shards) - 1, touched).astype(int).tolist():
        files += [tokens / shards[at]["bin"], tokens / shards[at]["spans"]]
        rows = pq.read_table(tokens / shards[at]["spans"], columns=["doc_id", "purged"]).to_pylist()
        middle = len(rows) // 2
        doc_ids.append(next(row["doc_id"] for row in rows[middle:] + rows[:middle] if not row["purged"]))
    return files, doc_ids


def copy(files: list[Path], folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    begun, cpu = time.monotonic(), times()
    for number, path in enumerate(files):
        with path.open("rb") as source, (folder / str(number)).open("wb") as target:
            shutil.copyfileobj(source, target, 16 << 20)
            target.flush()
            os.fsync(target.fileno())
    return {"wall_s": round(time.monotonic() - begun, 3), "cpu_s": round(times() - cpu, 3)}


def times() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def wrote() -> int:
    """Bytes that this process has written so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def table(rows: list[dict[str, Any]]) -> str:
    """The median of each mode and number of shards."""
    lines = [
        "| mode | shards | MB | wall s | CPU s | written MB | copy wall s | copy CPU s | wall / copy | CPU / copy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, touched in dict.fromkeys((row["mode"], row["touched"]) for row in rows):
        own = [row for row in rows if (row["mode"], row["touched"]) == (mode, touched)]

        def middle(*names: str, own: list[dict[str, Any]] = own) -> float:
            values = [row[names[0]] if len(names) == 1 else row[names[0]][names[1]] for row in own]
            return statistics.median(values)

        wall, cpu, copied, copied_cpu = (
            middle(*names) for names in (("wall_s",), ("cpu_s",), ("copy", "wall_s"), ("copy", "cpu_s"))
        )
        ratios = f"{wall / copied:.2f} | {cpu / copied_cpu:.2f}" if touched and copied and copied_cpu else "– | –"
        lines.append(
            f"| {mode} | {touched or 'none (fixed)'} | {middle('bytes') / 1e6:,.1f} | {wall:.2f} | {cpu:.2f} | "
            f"{middle('written_bytes') / 1e6:,.1f} | {copied:.2f} | {copied_cpu:.2f} | {ratios} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
