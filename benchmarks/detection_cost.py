"""What it costs a training step to notice hangs, slow ranks, corruption and abnormal steps: time inside over step time.

    OMP_NUM_THREADS=1 python benchmarks/detection_cost.py [--steps 240] [--interval 100] [--preset debug]

Accounted, not compared: two runs on a shared machine differ by more than what is looked for. Two ranks train on the CPU
over gloo with ``parallel.dp_replicate=2`` and ``replicas.interval``, and every call that the trainer makes into the
watchdog, the guard, the comparison of copies, the figures of ranks, stragglers and forensics is timed on each. A call
that other ranks must answer (the comparison) is timed with its wait. The watchdog's thread is not in it: it wakes once
a second. On a GPU the guard and the comparison are kernels, and the host waits for none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quern.train.bench.corpus import write_random
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer

GOAL = 0.01
VOCAB_SIZE = 4096
CALLS = {
    "watchdog": ("enter",), "guard": ("judge",), "replicas": ("compare", "settle"),
    "stragglers": ("observe",), "link_probe": ("observe", "take_request"),
    "by_rank": ("begin", "worked", "wait", "waited", "of_this_rank", "settle", "read"),
    "back": ("judge", "judge_copies"), "forensics": ("losses", "keep", "take_request", "settle"),
}  # fmt: skip


def timed(spent: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            spent[name] += time.perf_counter() - began

    return inner


def rank(args: argparse.Namespace) -> None:
    config = TrainConfig.model_validate(
        {
            "run_dir": str(args.folder / "run"), "data": [{"path": str(path)} for path in args.paths],
            "model": {"preset": args.preset}, "seq_len": args.seq_len, "global_batch": 8, "micro_batch": 4,
            "steps": args.steps, "precision": "fp32", "device": "cpu", "schedule": {"warmup": 10},
            "checkpoint": {"interval": 0}, "metrics": {"live": False, "tensorboard": False},
            "parallel": {"dp_replicate": 2, "dp_shard": 1}, "replicas": {"interval": args.interval},
        }
    )  # fmt: skip
    spent: dict[str, float] = defaultdict(float)
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        for part, names in CALLS.items():
            for name in names:
                owner = getattr(trainer, part)
                if hasattr(owner, name):
                    setattr(owner, name, timed(spent, part, getattr(owner, name)))
        trainer.fit()
        (args.folder / f"{ranks.rank}.json").write_text(json.dumps(spent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="debug")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--interval", type=int, default=100)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--paths", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        rank(args)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_random(folder / "data", 2_000_000, 120, VOCAB_SIZE, sources=3)
        own = [*sys.argv, "--folder", str(folder), "--paths", *map(str, paths)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launcher, *own], check=True, env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"})
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        steps_s = sum(row["step_time_s"] for row in rows if row["kind"] == "step")
        ranks = [json.loads((folder / f"{number}.json").read_text()) for number in range(2)]
    print(f"{args.preset}, 8 × {args.seq_len} tokens a step, float32, two ranks, torch {torch.__version__}:")
    print(f"{args.steps} steps of {steps_s / args.steps * 1e3:.1f} ms, copies compared every {args.interval}")
    for part in CALLS:
        seconds = max(own.get(part, 0.0) for own in ranks)
        print(f"  {part:12}{seconds / args.steps * 1e6:9.1f} µs a step {seconds / steps_s:9.4%}")
    share = max(sum(own.values()) for own in ranks) / steps_s
    print(f"  all, on the rank where it is most: {share:.3%}; goal below {GOAL:.0%}")


if __name__ == "__main__":
    main()
