"""Duplicate removal over N documents on Ray: time, CPU, memory of each process, and whether every decision is right.

    python benchmarks/dedup_scale.py --documents 2000000 --folder DIR [--workers 2] [--oracle 200000] [--json]
        [--peer-python PYTHON]

Verdicts and signatures are written to DIR in a run's own layout, unless they are there (``dedup_corpus.py`` says what
is planted: clusters from 2 to a million members, chains whose ends differ, one band key that a tenth of all documents
share, equal texts and URLs). The phase then runs in a process of its own; one that was killed goes on behind its last
stage when the command is repeated. Its decisions are compared with a brute force that shares no code with it: bands
compared as they are, pairs as Python sets, clusters as lists that are joined. Over all documents where there are at
most ``--oracle``; else over that many, whole clusters without the largest and without those that merely share a key, of
whom it is checked that none is removed.

With ``--peer-python``, datatrove's stages 2 and 3 run on the same signatures (its files are made beforehand and not
counted) with as many processes. They verify nothing: what they remove is compared in number only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
from dedup_corpus import MOST_BACK, NUM_PERM, ROWS, Corpus
from dedup_oracle import BruteForce, Doc
from process_tree import measure

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.passes import run as dedup
from quern.data_pipeline.execution.engine import OnDeath, open_engine

CONFIG = DuplicatesConfig()
DONE = "phase.json"


def write_corpus(corpus: Corpus, folder: Path, workers: int) -> None:
    """Every partition that is not there yet."""
    for old in ("verdicts", "signatures"):
        held = {path.stem for path in (folder / old).rglob("*.parquet")}
        if not held <= {corpus.name(index) for index in range(corpus.partitions)}:
            raise SystemExit(f"{folder}: holds another corpus; give another --folder")
    todo = [
        index
        for index in range(corpus.partitions)
        if not (folder / "signatures" / "crawl" / f"{corpus.name(index)}.parquet").exists()
    ]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(corpus.write, [(str(folder), index) for index in todo], chunksize=1)


class Timed:
    """An engine that notes the seconds of every stage."""

    def __init__(self, engine: Any, progress: Path) -> None:
        self.engine, self.num_workers, self.progress = engine, engine.num_workers, progress

    def map(
        self,
        function: Callable[..., Any],
        tasks: Sequence[tuple[Any, ...]],
        *,
        label: str,
        on_death: OnDeath | None = None,
    ) -> Iterator[tuple[int, Any]]:
        began = time.perf_counter()
        yield from self.engine.map(function, tasks, label=label, on_death=on_death)
        with self.progress.open("a") as out:
            out.write(json.dumps({"label": label, "tasks": len(tasks), "seconds": time.perf_counter() - began}) + "\n")


def run_phase(corpus: Corpus, folder: Path, workers: int) -> None:
    """What is measured."""
    names = [("crawl", corpus.name(index)) for index in range(corpus.partitions)]
    with open_engine(workers) as engine:
        report = dedup.run(
            str(folder),
            names,
            {},
            CONFIG,
            Timed(engine, folder / "stages.jsonl"),
            str(folder / "work"),
            inputs=f"planted {corpus.documents}",
        )
    (folder / DONE).write_text(json.dumps(asdict(report)))


class Peaks:
    """Highest memory of every kind of process below this one, looked at twice a second."""

    def __init__(self) -> None:
        self.mib: dict[str, dict[str, float]] = {}
        self.disk_mib = 0.0
        self._stop = threading.Event()

    def __enter__(self) -> Peaks:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.5):
            for process in psutil.Process().children(recursive=True):
                try:
                    line, info = process.cmdline(), process.memory_full_info()
                except psutil.Error:
                    continue
                kind = "driver" if "phase" in line else "worker" if line and line[0].startswith("ray::") else "ray"
                peak = self.mib.setdefault(kind, {"pss": 0.0, "rss": 0.0})
                peak["pss"] = max(peak["pss"], info.pss / 2**20)
                peak["rss"] = max(peak["rss"], info.rss / 2**20)


def closed_sample(corpus: Corpus, most: int) -> np.ndarray:
    """Documents whose decisions depend on no others: all, or some whole clusters and some in none."""
    if corpus.documents <= most:
        return np.arange(corpus.documents)
    first = corpus.sharing + corpus.largest
    numbers = np.arange(first, min(corpus.first_free, first + 2 * most))
    cluster = corpus.cluster(numbers)[0]
    known, sizes = np.unique(cluster, return_counts=True)
    taken, total = [], 0
    for name, size in zip(known[:-1].tolist(), sizes[:-1].tolist(), strict=True):
        if total + size <= 0.8 * most:
            taken.append(name)
            total += size
    end = min(corpus.documents, corpus.first_free + most - total)
    while end < corpus.documents:  # back to where no later document has the text or the URL of an earlier one
        facts = corpus.facts(np.arange(end, min(corpus.documents, end + MOST_BACK)))
        if min(facts["text"].min(), facts["url"].min()) >= end:
            break
        end -= 1
    return np.concatenate((numbers[np.isin(cluster, taken)], np.arange(corpus.first_free, end)))


def read_documents(corpus: Corpus, folder: Path, numbers: np.ndarray) -> list[Doc]:
    """Documents from the tables' rows."""
    part, row = corpus.place(numbers)
    columns = ["doc_id", "source", "canonical_url", "fetched_at", "post_filter_hash", "text.num_words"]
    found = []
    for index in np.unique(part).tolist():
        rows = row[part == index]
        verdicts = pq.read_table(_path(folder, "verdicts", corpus, index), columns=columns).take(rows).to_pylist()
        table = pq.read_table(_path(folder, "signatures", corpus, index)).take(rows)
        for verdict, signature, shingles in zip(verdicts, table["signature"], table["shingles"], strict=True):
            found.append(
                Doc(
                    verdict["doc_id"],
                    verdict["source"],
                    corpus.name(index),
                    verdict["post_filter_hash"],
                    verdict["canonical_url"],
                    None if verdict["fetched_at"] is None else verdict["fetched_at"].timestamp(),
                    verdict["text.num_words"],
                    array("I", signature.values.to_numpy().tobytes()),
                    array("Q", np.unique(shingles.values.to_numpy()).tobytes()),
                )
            )
    return found


def _path(folder: Path, kind: str, corpus: Corpus, index: int) -> Path:
    return folder / kind / "crawl" / f"{corpus.name(index)}.parquet"


def compare(corpus: Corpus, folder: Path, most: int) -> dict[str, Any]:
    """How many decisions were compared and how many differ."""
    numbers = closed_sample(corpus, most)
    expected = BruteForce(read_documents(corpus, folder, numbers), CONFIG, {})
    sample = {doc.doc_id for doc in expected.order}
    decisions, names = {}, {}
    of_sharing = 0
    sharing = {halves.astype(">u8").tobytes() for halves in corpus.ids(np.arange(corpus.sharing))}
    for batch in pq.ParquetFile(folder / "duplicates" / "decisions.parquet").iter_batches(1 << 15):
        for row in batch.to_pylist():
            of_sharing += row["doc_id"] in sharing
            if row["doc_id"] in sample:
                decisions[row["doc_id"]] = (row["kind"], row["duplicate_of"], row["similarity"], row["band"])
    for batch in pq.ParquetFile(folder / "duplicates" / "clusters.parquet").iter_batches(1 << 15):
        for one, name in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if one in sample:
                names[one] = name
    whole = len(numbers) == corpus.documents
    ends = expected.rows.keys() | decisions.keys()
    return {
        "documents": len(numbers),
        "removed": len(expected.rows),
        "wrong_decisions": sum(expected.rows.get(id_) != decisions.get(id_) for id_ in ends),
        "members": len(expected.clusters),
        "wrong_clusters": sum(
            expected.clusters.get(id_) != names.get(id_) for id_ in expected.clusters.keys() | names.keys()
        ),
        "removed_that_merely_share_a_key": of_sharing,
        "candidate_pairs": expected.num_candidates if whole else None,
    }


def run_peer(corpus: Corpus, folder: Path, python: str, workers: int) -> dict[str, Any]:
    """datatrove's buckets and clusters from the same signatures."""
    peer = folder / "peer"
    shutil.rmtree(peer, ignore_errors=True)
    fields = [(f"field{i + 1}", "<u4") for i in range(ROWS + 1)]
    for index in range(corpus.partitions):
        column = pq.read_table(_path(folder, "signatures", corpus, index), columns=["signature"])["signature"]
        values = column.combine_chunks().flatten().to_numpy().reshape(-1, NUM_PERM)
        for band in range(CONFIG.bands):
            own = np.empty((len(values), ROWS + 1), dtype=np.uint32)
            own[:, :ROWS], own[:, ROWS] = values[:, band * ROWS : (band + 1) * ROWS], np.arange(len(values))
            own = own[np.lexsort(own.T[::-1])]
            path = peer / "sig" / f"bucket_{band:03d}" / f"{index:05d}.minhash.sig"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(own.view(np.dtype(fields)).tobytes())
    script = Path(__file__).with_name("dedup_peer.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result: dict[str, Any] = {}
    for stage in ("buckets", "cluster"):
        with Peaks() as peaks:
            command = [python, str(script), stage, str(peer), str(CONFIG.bands), str(ROWS), str(workers)]
            usage = measure(command, env=env, log=str(folder / f"peer-{stage}.log"))
        largest = max((peak["rss"] for peak in peaks.mib.values()), default=0.0)
        result[stage] = {"wall_s": usage.wall_s, "cpu_s": usage.cpu_s, "largest_rss_mib": largest}
    result["removed"] = sum(path.stat().st_size // 4 for path in (peer / "out").glob("*.remove"))
    shutil.rmtree(peer)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--oracle", type=int, default=200_000, help="documents that are decided by brute force too")
    parser.add_argument("--peer-python", help="the Python of an environment with datatrove")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["write", "phase"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    corpus, folder = Corpus(args.documents), args.folder.resolve()
    if args.only == "write":
        write_corpus(corpus, folder, args.workers)
        return
    if args.only == "phase":
        run_phase(corpus, folder, args.workers)
        return
    command = [sys.executable, __file__, "--documents", str(args.documents), "--folder", str(folder)]
    command += ["--workers", str(args.workers), "--only"]
    result: dict[str, Any] = {"documents": corpus.documents, "partitions": corpus.partitions, "workers": args.workers}
    began = time.perf_counter()
    subprocess.run([*command, "write"], check=True)  # no child of this process is to stay
    result["written_s"] = time.perf_counter() - began
    if not (folder / DONE).exists():
        with Peaks() as peaks:
            usage = measure([*command, "phase"], log=str(folder / "phase.log"))
        stages = [json.loads(line) for line in (folder / "stages.jsonl").read_text().splitlines()]
        result |= {"usage": asdict(usage), "peak_mib": peaks.mib, "stages": stages}
        result["tables_mib"] = sum(path.stat().st_size for path in (folder / "duplicates").iterdir()) / 2**20
    result["report"] = json.loads((folder / DONE).read_text())
    began = time.perf_counter()
    result["compared"] = compare(corpus, folder, args.oracle)
    result["compared_s"] = time.perf_counter() - began
    if args.peer_python:
        result["peer"] = run_peer(corpus, folder, args.peer_python, args.workers)
    if args.json:
        print(json.dumps(result))
    else:
        print_result(result)
        print(f"repeat: {shlex.join(['python', *sys.argv])}  (after removing {args.folder}/{DONE} and work/)")
    found = result["compared"]
    if found["wrong_decisions"] or found["wrong_clusters"] or found["removed_that_merely_share_a_key"]:
        raise SystemExit("the decisions are not those of brute force")


def print_result(result: dict[str, Any]) -> None:
    report = result["report"]
    print(f"{result['documents']:,} documents in {result['partitions']} partitions, {result['workers']} workers")
    if "usage" in result:
        usage = result["usage"]
        for stage in result["stages"]:
            print(f"  {stage['label']:32} {stage['tasks']:6} tasks {stage['seconds']:8.1f} s")
        print(
            f"  {usage['wall_s']:.0f} s, CPU {usage['cpu_s']:.0f} s, whole tree at most {usage['peak_pss_mib']:.0f} MiB"
        )
        for kind, peak in sorted(result["peak_mib"].items()):
            print(f"  largest {kind:8} {peak['pss']:7.0f} MiB PSS {peak['rss']:7.0f} MiB RSS")
    print(f"  removed {report['removed']}, clusters {report['clusters']:,}, largest {report['largest_cluster']:,}")
    print(
        f"  largest band {report['largest_band']:,}, candidate pairs {report['candidate_pairs']:,}, "
        f"verified {report['verified_pairs']:,}"
    )
    print(f"  against brute force ({result['compared_s']:.0f} s): {result['compared']}")
    if "peer" in result:
        peer = result["peer"]
        for stage in ("buckets", "cluster"):
            own = peer[stage]
            print(
                f"  datatrove {stage}: {own['wall_s']:.0f} s, CPU {own['cpu_s']:.0f} s, "
                f"largest process {own['largest_rss_mib']:.0f} MiB"
            )
        if "usage" in result:
            both = [sum(peer[stage][what] for stage in ("buckets", "cluster")) for what in ("wall_s", "cpu_s")]
            ratios = [both[0] / result["usage"]["wall_s"], both[1] / result["usage"]["cpu_s"]]
            print(f"  datatrove against quern: {ratios[0]:.1f} × the time, {ratios[1]:.1f} × the CPU")
        print(f"  datatrove removes {peer['removed']:,}, unverified")


if __name__ == "__main__":
    main()
