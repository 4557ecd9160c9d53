"""Small encodings, and run directories as the earlier phases leave them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.commits import publish_commit
from quern.data_pipeline.document import DOCUMENT_SCHEMA, HASH, verdict_schema
from quern.storage import sha256

MERGES = (b"th", b"he", b"the", b"in", b"an", b" a", b" t", b" the", b"er", b"on", b"  ", b"    ", b"aa", b"aaaa")


def ranks_file(tokens: Iterable[bytes]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


@pytest.fixture(scope="session")
def tiny_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """270 ranks: the bytes and a few English merges."""
    path = tmp_path_factory.mktemp("ranks") / "tiny.tiktoken"
    path.write_bytes(ranks_file([*(bytes([b]) for b in range(256)), *MERGES]))
    return str(path)


@pytest.fixture(scope="session")
def wide_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """65,792 ranks: the bytes, and every pair of bytes with the pairs of capitals last, so that texts reach them."""
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    pairs.sort(key=lambda pair: pair.isalpha())
    path = tmp_path_factory.mktemp("ranks") / "wide.tiktoken"
    path.write_bytes(ranks_file([*(bytes([b]) for b in range(256)), *pairs]))
    return str(path)


@dataclass(frozen=True)
class Doc:
    doc_id: bytes
    text: str
    kept: bool = True


Partitions = Mapping[tuple[str, str], Iterable[Doc]]


def _make_run(
    run_dir: Path, partitions: Partitions, removed: Iterable[bytes] = (), clusters: Mapping[bytes, bytes] | None = None
) -> list[tuple[str, str]]:
    for (source, partition), given in partitions.items():
        docs = list(given)
        rows = [{"doc_id": d.doc_id, "text": d.text, "extracted": None, "kept": d.kept} for d in docs]
        verdicts = [
            {
                "doc_id": d.doc_id,
                "source": source,
                "url": f"https://example.org/{d.doc_id.hex()}",
                "source_file": f"/in/{partition}.warc.gz",
                "record_offset": 100 * number,
                "record_length": 90,
                "stage": None if d.kept else "quality",
            }
            for number, d in enumerate(docs)
        ]
        outputs = {}
        for folder, table in (
            ("documents", pa.Table.from_pylist(rows, DOCUMENT_SCHEMA)),
            ("verdicts", pa.Table.from_pylist(verdicts, verdict_schema([]))),
        ):
            path = run_dir / folder / source / f"{partition}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path, row_group_size=7)
            outputs[f"{folder}/{source}/{partition}.parquet"] = sha256(str(path))
        publish_commit(
            str(run_dir),
            "pages",
            source,
            partition,
            inputs={},
            config="",
            outputs=outputs,
            counts={"pages": len(docs), "kept": sum(d.kept for d in docs)},
        )
    (run_dir / "duplicates").mkdir(exist_ok=True, parents=True)
    hashes = [pa.field(name, HASH, nullable=False) for name in ("doc_id", "cluster_id")]
    decisions = [{"doc_id": doc_id, "kind": "near"} for doc_id in sorted(removed)]
    members = [{"doc_id": a, "cluster_id": b} for a, b in sorted((clusters or {}).items())]
    schema = pa.schema([hashes[0], pa.field("kind", pa.string())])
    pq.write_table(pa.Table.from_pylist(decisions, schema), run_dir / "duplicates" / "decisions.parquet")
    pq.write_table(pa.Table.from_pylist(members, pa.schema(hashes)), run_dir / "duplicates" / "clusters.parquet")
    return list(partitions)


@pytest.fixture(scope="session")
def make_doc() -> type[Doc]:
    return Doc


@pytest.fixture(scope="session")
def make_run() -> Callable[..., list[tuple[str, str]]]:
    """Write documents, verdicts, page commits and duplicates of a run; returns its (source, partition) pairs."""
    return _make_run


def _token_files(run_dir: Path) -> dict[str, bytes]:
    root = run_dir / "tokens"
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file() and p.name[0] != "."
    }


@pytest.fixture(scope="session")
def token_files() -> Callable[[Path], dict[str, bytes]]:
    """Every file below ``tokens/`` with its bytes."""
    return _token_files


@pytest.fixture(scope="session")
def read_stream() -> Callable[[Path, str], list[dict]]:
    """The shards of a stream as VERSION.json lists them: a dict of bin bytes and spans rows each."""

    def read(run_dir: Path, stream: str) -> list[dict]:
        root = run_dir / "tokens"
        entry = json.loads((root / "VERSION.json").read_text())["sources"][stream]
        return [
            {"bin": (root / s["bin"]).read_bytes(), "spans": pq.read_table(root / s["spans"]).to_pylist()}
            for s in entry["shards"]
        ]

    return read
