"""The trainer against the plain loop: same weights, order and precision, so the same losses."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer
from support.oracles import plain_loop
from support.train.corpora import VOCAB_SIZE, Doc, write_run

pytestmark = pytest.mark.slow

STEPS, SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH = 90, 32, 8, 4
SOURCES = {"prose": 3.0, "code": 1.0}


def sentence(rng: random.Random, kind: str) -> Doc:
    """A document whose next token mostly follows from the one before, by a rule of its source; a few are purged."""
    length = max(2, round(rng.lognormvariate(3.2, 0.8)))
    if rng.random() < 0.05:
        return Doc((VOCAB_SIZE - 1,) * length, purged=True)
    step, base = (7, 3) if kind.startswith("prose") else (11, 90)
    tokens = [rng.randrange(40)]
    while len(tokens) < length - 1:
        tokens.append((step * tokens[-1] + base) % 150 if rng.random() < 0.8 else rng.randrange(150))
    return Doc((*tokens[: length - 1], VOCAB_SIZE - 1))


def corpus(folder: Path) -> tuple[list[str], dict[str, list[list[Doc]]]]:
    rng = random.Random(5)
    sizes = {"prose": (150, 130), "code": (120,), "prose.val": (12,), "code.val": (9,)}
    shards = {name: [[sentence(rng, name) for _ in range(size)] for size in many] for name, many in sizes.items()}
    return write_run(folder, shards)[: len(SOURCES)], shards


def stream(shards: list[list[Doc]]) -> tuple[list[int], list[tuple[int, int, bool]]]:
    """A source's tokens, and its documents as (start, length, purged)."""
    tokens: list[int] = []
    spans = []
    for doc in (doc for shard in shards for doc in shard):
        spans.append((len(tokens), len(doc.tokens), doc.purged))
        tokens += doc.tokens
    return tokens, spans


def plain_steps(trainer: Trainer, shards: dict[str, list[list[Doc]]], mask: bool) -> Iterator[list[plain_loop.Batch]]:
    """Every step as one micro-batch in the order's own sequence: the trainer shares the samples out otherwise."""
    streams = [stream(shards[name]) for name in SOURCES]
    order = trainer.start.mixture.order
    for step in range(STEPS):
        rows = zip(*(part.tolist() for part in order.batch(step)), strict=True)
        windows = [plain_loop.window(*streams[source], window, SEQ_LEN, mask) for source, _, window in rows]
        assert len(windows) == GLOBAL_BATCH
        yield [plain_loop.batch_of(windows)]


def plain_validation(weights: plain_loop.Weights, shape: Any, shards: dict[str, list[list[Doc]]], mask: bool) -> float:
    """Mean loss over every target of every held-out window."""
    total, targets = 0.0, 0
    for name in SOURCES:
        tokens, spans = stream(shards[f"{name}.val"])
        for index in range(plain_loop.num_windows(tokens, SEQ_LEN)):
            batch = plain_loop.batch_of([plain_loop.window(tokens, spans, index, SEQ_LEN, mask)])
            total += float(plain_loop.token_losses(weights, shape, batch).sum())
            targets += int((np.asarray(batch.targets) != plain_loop.IGNORE).sum())
    return total / targets


@pytest.mark.parametrize(
    "mask", [True, pytest.param(False, marks=pytest.mark.long)], ids=["document masks", "no masks"]
)
def test_losses_are_those_of_the_plain_loop(tmp_path, mask):
    (tmp_path / "run").mkdir()
    paths, shards = corpus(tmp_path / "data")
    config = TrainConfig.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "data": [
                {"path": path, "weight": weight, "max_epochs": 50}
                for path, weight in zip(paths, SOURCES.values(), strict=True)
            ],
            "document_mask": mask,
            "model": {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "tied_embeddings": True},
            "seq_len": SEQ_LEN,
            "global_batch": GLOBAL_BATCH,
            "micro_batch": MICRO_BATCH,
            "steps": STEPS,
            "precision": "fp32",
            "device": "cpu",
            "optimizer": {"lr": 4e-3, "clip": 0.7},
            "schedule": {"kind": "cosine", "warmup": 10},
            "checkpoint": {"interval": 0},
            "validation": {"interval": 0, "windows": None},
            "metrics": {"live": False, "tensorboard": False},
        }
    )
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        shape = trainer.model.shape
        first = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        batches = plain_steps(trainer, shards, mask)
        trainer.fit()
    settings = plain_loop.Settings(steps=STEPS, lr=4e-3, clip=0.7, warmup=10)
    records = list(plain_loop.train(first, shape, batches, settings, torch.float32))

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert [row["valid_tokens"] for row in steps] == [record.valid_tokens for record in records]
    np.testing.assert_allclose([row["lr"] for row in steps], [record.lr for record in records], rtol=1e-12)
    np.testing.assert_allclose([row["loss"] for row in steps[:50]], [record.loss for record in records[:50]], rtol=1e-5)
    np.testing.assert_allclose(
        [row["grad_norm"] for row in steps[:50]], [record.grad_norm for record in records[:50]], rtol=1e-3
    )
    (held_out,) = [row for row in rows if row["kind"] == "validation"]
    expected = plain_validation(records[-1].weights, shape, shards, mask)
    assert held_out["loss"] == pytest.approx(expected, rel=1e-3)
    # the corpus has something to learn, so equal losses are no accident of standing still
    assert expected < 0.8 * records[0].loss
    assert records[0].loss == pytest.approx(math.log(VOCAB_SIZE), rel=0.01)
    assert any(record.grad_norm > 0.7 for record in records)
    assert any(record.grad_norm < 0.7 for record in records)
