"""A run of four ranks that meets faults, and one that leaves out the same data and meets none."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quern.config import dump_yaml
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.tools.reader import iter_weights
from quern.train.config import TrainConfig
from support.programs import python
from support.train import run_case as case

LAUNCHER = """
import os, sys
from quern.cli.train import ranks
from quern.train.init_from import load_run_config

python, program, plan, config = sys.argv[1:]
os.environ["CHAOS_LAUNCHER"] = str(os.getpid())
ranks.module = lambda *_: [python, program, plan, config]
sys.exit(ranks.supervise(load_run_config(config, ()), config, [], 4, 40))
"""
PLACES = ("forward_backward", "clip", "update", "save_if_due")
ENDS = ("kill", "stop", "raise", "kill all", "damage")
"""Faults after which the ranks are started again."""


@dataclass
class Chaos:
    """What came of it."""

    run: Path
    starts: int
    """Of the command."""
    code: int
    seconds: float
    said: str


def settings(run: Path, paths: list[str], steps: int, **changes: Any) -> TrainConfig:
    guard = {"health_window": 2, "non_finite": "rollback_and_skip", **changes.pop("guard", {})}
    return case.settings(
        run, paths, steps=steps, global_batch=8, micro_batch=1, guard=guard,
        checkpoint={"interval": 4, "keep_last": 4, "mode": "thread"}, parallel={"dp_replicate": 2, "dp_shard": 2},
        watchdog={"least_s": 6, "factor": 6}, comm={"timeout_s": 60.0},
        out_of_memory="full_checkpointing", replicas={"interval": 3}, **changes,
    )  # fmt: skip


def drawn(seed: int, kinds: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Each of ``kinds`` in a step, a place and on a rank that the seed decides; none in a step before the second
    checkpoint, as damage to the only one would have the run begin anew."""
    rng = random.Random(seed)
    at = sorted(rng.sample(range(9, steps - 2), len(kinds)))
    return [
        {"kind": kind, "step": step, "rank": rng.randrange(4), "place": rng.choice(PLACES)}
        for kind, step in zip(rng.sample([*kinds], len(kinds)), at, strict=True)
    ]


def meet(folder: Path, config: TrainConfig, events: list[dict[str, Any]], spoilt: list[int], most: int = 9) -> Chaos:
    """Give the same command until it ends by itself, as a batch system would."""
    marks = folder / "marks"
    marks.mkdir(parents=True, exist_ok=True)
    plan, file = folder / "plan.json", folder / "config.yaml"
    plan.write_text(json.dumps({"folder": str(marks), "events": events, "spoilt": spoilt}))
    file.write_text(dump_yaml(config))
    program = Path(__file__).with_name("chaos_rank.py")
    command = [python(), "-c", LAUNCHER, python(), str(program), str(plan), str(file)]
    tests = str(Path(__file__).parents[2])
    paths = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    began, said, starts, done = time.monotonic(), "", 0, None
    while starts < most:
        starts += 1
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
        said += done.stderr
        if done.returncode >= 0:
            break
        time.sleep(2.0)  # the ranks of a launcher that was killed end with it
    assert done is not None
    return Chaos(Path(config.run_dir), starts, done.returncode, time.monotonic() - began, said)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    return dict(iter_weights(list_checkpoints(str(run))[-1].path))
