"""The whole road on real text: a model trained on millions of tokens beats counting them."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from quern.cli.demo.baselines import loss, nll, read_stream
from quern.storage.parquet import read_table
from quern.tokenize.shards import ShardReader
from support.programs import python

SOURCES = ("papers", "code", "books", "speeches", "wikipedia")
#: Small, so that a model of a million parameters has time to learn; what the 3-gram knows is then about spelling.
VOCAB_SIZE = 320
SEQ_LEN, BATCH, WINDOWS = 256, 8, 64


def quern(*arguments: object, threads: int = 2) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    subprocess.run([python(), "-m", "quern.cli.main", *map(str, arguments)], check=True, env=environment)


@pytest.fixture(scope="module")
def corpus(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    config = {
        "run_dir": str(folder / "run"),
        "sources": [
            {"name": name, "kind": "jsonl", "paths": str(shared / "data" / "text" / f"{name}.jsonl.gz")}
            for name in SOURCES
        ],
        "language": {"keep": None, "threshold": 0, "pre_skip": False},
        "pii": {"action": "measure"},
        "toxicity": {"action": "measure"},
        "quality": {"order": []},
        "tokenize": {"encoding": "trained", "vocab_size": VOCAB_SIZE, "validation": 0.02},
    }
    (folder / "data.yaml").write_text(yaml.safe_dump(config))
    quern("data", "run", folder / "data.yaml")
    return folder / "run"


def clusters(run: Path, streams: list[str]) -> set[bytes]:
    """The duplicate clusters with a document in one of the streams."""
    table = read_table(str(run / "duplicates" / "clusters.parquet")).select(["doc_id", "cluster_id"]).to_pydict()
    of = dict(zip(table["doc_id"], table["cluster_id"], strict=True))
    readers = [ShardReader(path) for path in streams]
    docs = [doc for r in readers for n in range(len(r.shards)) for doc in r.spans(n)["doc_id"].to_pylist()]
    return {of[doc] for doc in docs if doc in of}


@pytest.mark.shared
@pytest.mark.ray
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "million", [pytest.param(2.5, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.exhaustive)]
)
def test_millions_of_tokens_of_real_text_beat_the_interpolated_trigram(
    corpus: Path, tmp_path: Path, million: float
) -> None:
    """It is passed after 1.3 million, where the learning rate is high still."""
    steps = math.ceil(million * 1e6 / (BATCH * SEQ_LEN))
    tokens = {name: ShardReader(str(corpus / "tokens" / name)).total_tokens for name in SOURCES}
    config = {
        "run_dir": str(tmp_path / "run"),
        "data": [{"path": str(corpus / "tokens" / name), "weight": tokens[name] / 1e6} for name in SOURCES],
        "model": {"num_layers": 4, "dim": 128, "num_heads": 4, "ffn_dim": 384, "qk_norm": True,
                  "tied_embeddings": True},
        "seq_len": SEQ_LEN, "global_batch": BATCH, "micro_batch": BATCH, "steps": steps, "precision": "fp32",
        "device": "cpu", "optimizer": {"lr": 0.003}, "schedule": {"warmup": 50}, "checkpoint": {"interval": 0},
        "validation": {"interval": 0, "windows": WINDOWS},
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    quern("train", tmp_path / "train.yaml")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (held_out,) = [row for row in rows if row["kind"] == "validation"]
    paths = [str(corpus / "tokens" / name) for name in SOURCES]
    kept = [path + ".val" for path in paths if ShardReader(path + ".val").num_windows(SEQ_LEN)]
    train, validation = [read_stream(path) for path in paths], [read_stream(path) for path in kept]
    losses = {}
    for order in (1, 2, 3):
        parts = [loss(nll(train, stream, order, VOCAB_SIZE), SEQ_LEN, WINDOWS) for stream in validation]
        total, targets = map(sum, zip(*parts, strict=True))
        assert targets == held_out["tokens"]
        losses[order] = total / targets
    print(f"held-out nats a token: {losses} model {held_out['loss']}")
    assert losses[3] < losses[2] < losses[1] < math.log(VOCAB_SIZE)
    assert held_out["loss"] < losses[3]
    assert not clusters(corpus, kept) & clusters(corpus, paths)
