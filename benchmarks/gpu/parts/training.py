"""A trainer over random tokens, for the parts that look into its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quern.train.bench.corpus import write_random
from quern.train.bench.measure import draw_on_device
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer


def config_of(spec: dict[str, Any], folder: str, source: str) -> TrainConfig:
    """A run in ``folder`` over the tokens at ``source``; ``changes`` are top-level keys of the config."""
    return TrainConfig.model_validate({
        "run_dir": str(Path(folder, "run")), "data": [{"path": source, "max_epochs": 1000}], "model": spec["model"],
        "seq_len": spec["seq_len"], "global_batch": spec["batch"], "micro_batch": spec["batch"] // 2,
        "steps": spec["steps"], "device": spec["device"], "checkpoint": {"interval": 0},
        "schedule": {"kind": "constant", "warmup": spec["steps"]},
        "validation": {"interval": 0}, "metrics": {"tensorboard": False, "live": False}, **spec["changes"],
    })  # fmt: skip


@contextmanager
def trainer_of(spec: dict[str, Any], folder: str) -> Iterator[Trainer]:
    """Before its first step."""
    tokens = 2 * spec["steps"] * spec["batch"] * spec["seq_len"]
    (source,) = write_random(str(Path(folder, "data")), tokens, spec["mean_document"], spec["vocab_size"])
    config = config_of(spec, folder, source)
    Path(folder, "run").mkdir()
    with open_ranks(config.device) as ranks, open_trainer(config, ranks, draw_on_device) as trainer:
        trainer.start_loop()
        yield trainer
