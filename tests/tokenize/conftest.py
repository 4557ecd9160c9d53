"""Small encodings, and run directories as the earlier phases leave them."""

from __future__ import annotations

import base64
import datetime as dt
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.execution.commits import publish_commit
from quern.data_pipeline.execution.engine import InProcess
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, HASH, verdict_schema
from quern.storage import sha256
from quern.tokenize.encoding import TokenizeConfig
from quern.tokenize.writing.run import run

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
                "fetched_at": dt.datetime(2024, 2, 29, 12, number % 60, tzinfo=dt.UTC),
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


class Mortal(InProcess):
    """Dies after a number of tasks, before or after the result of the last one is taken."""

    def __init__(self, tasks: int) -> None:
        self.left = tasks

    def map(self, function: Callable, tasks: Sequence[tuple], **_: Any) -> Iterator[tuple[int, Any]]:
        for index, task in enumerate(tasks):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield index, function(*task)


def _tokenize(run_dir: Path, names: list, config: TokenizeConfig, engine: Any = None, seed: int = 5) -> Any:
    return run(str(run_dir), names, config, seed, engine or InProcess(), str(run_dir / ".work" / "tokens"))


@pytest.fixture(scope="session")
def tokenize() -> Callable[..., Any]:
    """Run over the partitions of a run directory, in process and with seed 5 unless told otherwise."""
    return _tokenize


@pytest.fixture(scope="session")
def mortal() -> type[Mortal]:
    return Mortal


@pytest.fixture
def small(make_run: Callable, make_doc: type, tiny_ranks: str) -> Callable[..., list]:
    """A run of two sources of 60 documents in ``split`` partitions each, with duplicates and clusters."""
    rng = random.Random(9)
    docs = {
        source: [
            make_doc(rng.randbytes(16), "the inner an " * rng.randint(0, 9) + source, kept=rng.random() < 0.9)
            for _ in range(60)
        ]
        for source in ("books", "web")
    }
    everything = docs["web"] + docs["books"]
    removed = [d.doc_id for d in everything[::9]]
    clusters = {d.doc_id: everything[0].doc_id for d in everything[:20]}

    def build(run_dir: Path, split: int) -> list[tuple[str, str]]:
        partitions = {(s, f"p{i}"): own[i::split] for s, own in docs.items() for i in reversed(range(split))}
        return make_run(run_dir, partitions, removed, clusters)

    build.docs, build.removed, build.clusters = docs, set(removed), clusters  # type: ignore[attr-defined]
    return build


@pytest.fixture
def config(tiny_ranks: str) -> TokenizeConfig:
    return TokenizeConfig(encoding="own", ranks=tiny_ranks, shard_tokens=500, validation=0.2)
