"""Writes the runs of ``old_runs.tar.gz``, with the code of the commit whose runs they are to be: 1372051.

In a checkout of that commit: ``PYTHONPATH=. .venv/bin/python old_runs.py OUT``. OUT gets ``docs.jsonl``; a complete
data run, ``complete``; one that was killed before its tokens, ``unfinished``; a training run on the complete one, which
was killed in step 5 of 8 and whose newest checkpoint is that of step 4, ``train``; and ``expected.json``: the losses of
the same training and the tokens of the same data run where nothing was killed. All paths are relative to OUT.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

from quern.data_pipeline.engine import InProcess
from quern.tokenize.config import DataRun
from quern.train.ranks import open_ranks

from quern.cli import data
from quern.config import dump_yaml
from quern.train.config import TrainConfig
from quern.train.setup import open_trainer

WORDS = """
water bread river stone winter summer house garden letter market village captain engine paper silver window mountain
forest morning evening teacher student question answer kitchen harbour bridge station journey doctor
""".split()  # noqa: SIM905


def documents() -> list[dict[str, str]]:
    rng = random.Random(7)
    found = []
    for number in range(40):
        lines = [
            f"The {' '.join(rng.choice(WORDS) for _ in range(9))} and that is what the old {rng.choice(WORDS)} said."
            for _ in range(6)
        ]
        found.append({"id": f"doc-{number}", "url": f"https://example.org/{number}", "text": "\n".join(lines)})
    found.append({"id": "copy", "url": "https://example.com/copy", "text": found[3]["text"]})
    found.append({"id": "near", "url": "https://example.com/near", "text": found[5]["text"] + "\nRead more."})
    return found


def data_config(run: str) -> DataRun:
    plain = {
        "run_dir": run, "seed": 3, "workers": 1,
        "sources": [{"name": "docs", "kind": "jsonl", "paths": "docs.jsonl"}],
        "language": {"keep": ["en"]}, "quality": {"order": ["gopher"], "gopher": {"min_words": 20}},
        "tokenize": {"encoding": "trained", "vocab_size": 300, "validation": 0.1},
    }  # fmt: skip
    return DataRun.model_validate_json(json.dumps(plain))


def train_config(run: str) -> TrainConfig:
    plain = {
        "run_dir": run, "data": [{"path": "complete/tokens/docs", "max_epochs": 100}],
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "ffn_dim": 32, "tied_embeddings": True},
        "seq_len": 64, "global_batch": 4, "micro_batch": 4, "steps": 8, "seed": 5, "precision": "fp32", "device": "cpu",
        "optimizer": {"lr": 0.01}, "schedule": {"warmup": 2}, "checkpoint": {"interval": 4, "mode": "sync"},
        "validation": {"interval": 0}, "metrics": {"tensorboard": False, "live": False},
    }  # fmt: skip
    return TrainConfig.model_validate_json(json.dumps(plain))


@contextmanager
def alone(*_):
    yield InProcess()


def killed(work) -> None:
    """In a process of its own, which ends as by kill -9."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def unfinished() -> None:
    data.tokenize.run = lambda *_: os._exit(9)
    data.run_data(data_config("unfinished"))


def train(run: str, kill_at: int | None = None) -> dict[int, float]:
    config = train_config(run)
    with open_ranks(config.device) as ranks, open_trainer(config, ranks) as trainer:
        trainer.on_gradients = lambda trainer, step: os._exit(9) if step == kill_at else None
        trainer.fit()
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def main() -> None:
    os.makedirs(sys.argv[1], exist_ok=True)
    os.chdir(sys.argv[1])
    Path("docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents()))
    os.utime("docs.jsonl", (1_700_000_000, 1_700_000_000))  # which an archive keeps, other than parts of a second
    data.open_engine = alone
    for name in ("complete", "whole"):
        data.run_data(data_config(name))
    for name in ("complete", "unfinished"):
        Path(f"{name}.yaml").write_text(dump_yaml(data_config(name)))
    killed(unfinished)
    killed(lambda: train("train", 5))
    losses = train("straight")
    shards = sorted(Path("whole/tokens").rglob("*.bin"))
    tokens = {str(path.relative_to("whole")): hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}
    Path("expected.json").write_text(json.dumps({"losses": losses, "tokens": tokens}))
    for name in ("whole", "straight"):
        shutil.rmtree(name)
    Path("complete", "report.html").unlink()  # large, and read by nobody


if __name__ == "__main__":
    main()
