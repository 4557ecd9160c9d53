"""What a build takes does not grow with the run: rows are generated in bulk and built in a process of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.dedup.schemas import CLUSTER_SCHEMA, DECISION_SCHEMA
from quern.data_pipeline.page.document import verdict_schema
from quern.tokenize.shard_format import MANIFEST, VERSION_FILE, ShardWriter, version_entry

ROWS_A_FILE = 12_500

BUILD = """
import json, re, sys
from quern.lineage.index import joins
from quern.lineage.store import IndexedRun
import pyarrow.compute

def most():  # of this process alone: what getrusage says includes its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10

before = most()
joins.BUCKET_ROWS = 1 << 14
lineage = IndexedRun(sys.argv[1], segment_documents=25_000)
print(json.dumps([lineage.num_documents, most() - before]))
"""


def write_bulk(run: Path, files: int) -> np.ndarray:
    """``files`` verdict files, a stream of two thirds of the documents, the rest removed; the doc_ids, S16 in order."""
    draw = np.random.default_rng(files)
    schema = verdict_schema([])
    (run / "verdicts" / "web").mkdir(parents=True)
    (run / "duplicates").mkdir()
    all_ids = []
    for file in range(files):
        ids = draw.bytes(16 * ROWS_A_FILE)
        all_ids.append(ids)
        hosts = [f"host{n % 977}.example" for n in range(ROWS_A_FILE)]
        paths = [f"/{n}/{file}/{'x' * 60}" for n in range(ROWS_A_FILE)]
        own = {
            "doc_id": hashes(ids),
            "source": pa.array(["web"] * ROWS_A_FILE),
            "url": pa.array([f"https://{host}{path}" for host, path in zip(hosts, paths, strict=True)]),
            "surt": pa.array([f"example,{host[:-8]}){path}" for host, path in zip(hosts, paths, strict=True)]),
            "host": pa.array(hosts),
            "source_file": pa.array(["/in"] * ROWS_A_FILE),
            "post_filter_hash": hashes(draw.bytes(16 * ROWS_A_FILE)),
        }
        columns = [own.get(field.name, pa.nulls(ROWS_A_FILE, field.type)) for field in schema]
        table = pa.Table.from_arrays(columns, names=schema.names)
        pq.write_table(table, run / "verdicts" / "web" / f"{file:05d}.parquet", row_group_size=512)
    ids = np.frombuffer(b"".join(all_ids), "V16")
    kept, removed = ids[np.arange(len(ids)) % 3 < 2], ids[np.arange(len(ids)) % 3 == 2]
    survivors = hashes(kept[: len(removed)].tobytes())
    own = {
        "doc_id": hashes(removed.tobytes()),
        "kind": pa.array(["near"] * len(removed)),
        "duplicate_of": survivors,
        "cluster_id": survivors,
    }
    columns = [own.get(field.name, pa.nulls(len(removed), field.type)) for field in DECISION_SCHEMA]
    pq.write_table(pa.Table.from_arrays(columns, schema=DECISION_SCHEMA), run / "duplicates" / "decisions.parquet")
    clusters = pa.Table.from_arrays([own["doc_id"], survivors], schema=CLUSTER_SCHEMA)
    pq.write_table(clusters, run / "duplicates" / "clusters.parquet")
    folder = run / "tokens" / "web"
    folder.mkdir(parents=True)
    order = draw.permutation(len(kept))
    with ShardWriter(str(folder), 0, "uint16") as writer:
        writer.add(kept[order].tobytes(), np.full(len(kept), 2), np.zeros(2 * len(kept), "uint16"))
        info = writer.finish(first_key=0, last_key=1)
    manifest = {
        "encoding": "own",
        "vocab_size": 9,
        "dtype": "uint16",
        "eot_id": 0,
        "seed": 1,
        "shards": [asdict(info)],
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    sha256 = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    entry = version_entry("web", MANIFEST, sha256, [info])
    version = {"version": 1, "encoding": {"ranks": "none"}, "sources": {"web": entry}}
    (run / "tokens" / VERSION_FILE).write_text(json.dumps(version))
    (run / "run.json").write_text('{"id": "bulk"}')
    return kept[order]


def hashes(data: bytes) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(data) // 16, [None, pa.py_buffer(data)])


def build(run: Path) -> tuple[int, int]:
    """Documents, and bytes the build took at most beyond the imports."""
    done = subprocess.run([sys.executable, "-c", BUILD, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    documents, size = json.loads(done.stdout)
    return documents, size


@pytest.mark.long
def test_six_times_the_documents_take_no_more_memory(tmp_path: Path) -> None:
    from quern.lineage.store import IndexedRun

    sizes = {}
    for files in (4, 24):
        run = tmp_path / str(files)
        streamed = write_bulk(run, files)
        documents, sizes[files] = build(run)
        assert documents == files * ROWS_A_FILE
    print(f"{sizes[4] >> 20} MiB for 50,000 documents, {sizes[24] >> 20} MiB for 300,000")
    assert sizes[4] > 1 << 20
    assert sizes[24] < 1.4 * sizes[4] + (16 << 20)

    # many segments and many buckets: the joins have lost and mixed up nothing
    lineage = IndexedRun(str(run))
    assert not lineage.built.new
    assert len(lineage.built.record["segments"]) == 12
    spans, _ = lineage.spans_in(lineage.streams[0], [0], [lineage.streams[0].total_tokens])
    assert b"".join(lineage.documents(spans.numbers).doc_ids) == streamed.tobytes()
    assert lineage.spans_of(spans.numbers).starts.tolist() == list(range(0, 2 * len(streamed), 2))
    decisions = pq.read_table(run / "duplicates" / "decisions.parquet", columns=["doc_id", "duplicate_of"])
    for removed, survivor in zip(*(column.to_pylist()[::9973] for column in decisions.columns), strict=True):
        numbers = [int(lineage.find(doc=doc_id)[0]) for doc_id in (removed, survivor)]
        assert lineage.removed_for(numbers[1]).tolist() == numbers[:1]
        found = lineage.decision(numbers[0])
        assert found is not None
        assert found["duplicate_of"] == survivor
        assert lineage.cluster(numbers[0]).tolist() == numbers[:1]
