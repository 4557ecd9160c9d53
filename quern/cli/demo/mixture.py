"""The part of the demo about mixtures: a swarm of tiny runs on two kinds of page, and the weights that they propose."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

from rich.console import Console

from quern import storage
from quern.cli.mix.laws import propose_mixture
from quern.config import dump_yaml, read_yaml
from quern.train.swarm.config import DrawConfig, SwarmConfig
from quern.train.swarm.plan import plan_swarm
from quern.train.swarm.run import run_swarm

__all__ = ["mix_demo"]

MAX_EPOCHS = 2
KINDS = ("language = 'en'", "language <> 'en'")
TINY = (
    "model.num_layers=1", "model.dim=64", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=128",
    "optimizer.lr=0.004", "steps=100", "schedule.warmup=10", "checkpoint.interval=100", "checkpoint.keep_every=null",
    "validation.interval=100", "validation.windows=16", "metrics.tensorboard=false",
)  # fmt: skip


def mix_demo(folder: str, data_run: str, seed: int, console: Console) -> dict[str, Any]:
    """Take pages in English and in other languages for two sources, and find weights for them; prints and returns what
    the swarm proposes."""
    swarm = storage.join(folder, "swarm")
    storage.remove_tree(swarm)
    with as_file(files("quern.demo").joinpath("train.yaml")) as path:
        base = read_yaml(str(path))
    tokens = storage.join(data_run, "tokens", "sample")
    base |= {
        "run_dir": storage.join(folder, "train-mixed"), "seed": seed,
        "data": [{"path": tokens, "where": where, "max_epochs": MAX_EPOCHS} for where in KINDS],
    }  # fmt: skip
    given = storage.join(swarm, "base.yaml")
    storage.publish_bytes(given, dump_yaml(base).encode())
    config = SwarmConfig(
        run_dir=swarm, base=given, overrides=TINY, runs=4, at_once=2, seed=seed + 1, form="linear",
        draw=DrawConfig(strength=(1.0, 2.0)),
    )  # fmt: skip
    planned = plan_swarm(config)
    steps = planned.members[0].config.steps
    console.print(
        f"Which share of pages in English is best for both kinds? {config.runs} runs of {steps} steps on drawn mixtures"
    )
    run_swarm(planned, lambda line: None)
    told = propose_mixture(planned, console)
    console.print(
        "So few and so small runs prove little: the interval and the warnings say how far to trust a proposal\n"
    )
    return told
