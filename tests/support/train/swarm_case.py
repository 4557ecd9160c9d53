"""A swarm over two small sources, and a trainer in its place that knows the law."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from support.train import corpora

#: Trains nothing: what it writes of held-out losses is a law of the mixture. A file "fail" beside the config ends it.
TRAINER = """
import json, math, os, sys, yaml
config = yaml.safe_load(open(sys.argv[1]))
number = os.path.basename(config["run_dir"])
folder = os.path.dirname(os.path.dirname(sys.argv[1]))
print("seen", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"], flush=True)
if os.path.exists(os.path.join(folder, "fail-" + number)):
    sys.exit("\\n".join(f"line {line} of {number}" for line in range(9)))
weights = [own["weight"] for own in config["data"]]
web, books = (weight / sum(weights) for weight in weights)
losses = {"web": 2 + math.exp(0.5 - 1.5 * web), "books": 1.5 + math.exp(0.8 - 2.0 * books)}
if os.path.exists(os.path.join(folder, "nan-" + number)):
    losses["web"] = math.nan
os.makedirs(config["run_dir"], exist_ok=True)
with open(os.path.join(config["run_dir"], "metrics.jsonl"), "a") as file:
    for step in (config["steps"] // 2, config["steps"]):
        told = {name: {"loss": loss + config["steps"] - step} for name, loss in losses.items()}
        file.write(json.dumps({"kind": "validation", "step": step, "loss": 1.0, "sources": told}) + "\\n")
"""


def write(folder: Path, steps: int = 60, max_epochs: float = 4.0, **changes: Any) -> Path:
    """A large run's config and a swarm's: 76 windows of web, 76 of books; the large run reads 240, the small 24."""
    rng = random.Random(5)
    shards = {name: corpora.make_shards(rng, [[40, 90, 7] * 12, [200] * 4]) for name in ("web", "books")}
    held_out = {f"{name}.val": corpora.make_shards(rng, [[50] * 4]) for name in shards}
    paths = corpora.write_run(folder / "data", {**shards, **held_out})
    base = {
        "run_dir": str(folder / "large"),
        "data": [{"path": path, "max_epochs": max_epochs} for path in paths[:2]],
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "tied_embeddings": True},
        "seq_len": 32, "global_batch": 4, "micro_batch": 1, "steps": steps, "precision": "fp32", "device": "cpu",
        "schedule": {"warmup": 2}, "checkpoint": {"interval": 2}, "metrics": {"tensorboard": False},
    }  # fmt: skip
    (folder / "large.yaml").write_text(yaml.safe_dump(base))
    spec = {
        "run_dir": str(folder / "swarm"),
        "base": str(folder / "large.yaml"),
        "overrides": ["steps=6"],
        "runs": 8,
        "at_once": 4,
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump({**spec, **changes}))
    return folder / "spec.yaml"
