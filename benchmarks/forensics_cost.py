"""What forensics cost a training step: time inside them, over the time of the steps; and what a file costs.

    OMP_NUM_THREADS=1 python benchmarks/forensics_cost.py [--steps 240] [--seq-len 256] [--micro-batch 4] [--json]

Accounted, not compared: two runs on a shared machine differ by more than what is looked for. Every call that the
trainer makes into :class:`quern.train.step.forensics.Forensics` is timed, in a run in float32 on the CPU without
a spike; keeping the norms that the global norm is made of is two list operations inside ``global_grad_norm`` and is
left out. Then every step of a short run is written down.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quern.train.bench.corpus import write_random
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.step.forensics import Forensics

GOAL = 0.005
VOCAB_SIZE = 4096
CALLS = ("losses", "keep", "take_request", "settle")
FILES = 20


class Account:
    """Seconds inside each of :data:`CALLS`."""

    def __init__(self, forensics: Forensics) -> None:
        self.seconds = dict.fromkeys(CALLS, 0.0)
        for name in CALLS:
            setattr(forensics, name, self._timed(name, getattr(forensics, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self.seconds[name] += time.perf_counter() - began
            return result

        return timed


def run(args: argparse.Namespace, folder: Path, paths: list[str], steps: int, written: int) -> dict[str, Any]:
    """Seconds of all steps and of forensics; the last ``written`` steps go to a file each."""
    config = TrainConfig.model_validate(
        {
            "run_dir": str(folder), "data": [{"path": path} for path in paths], "model": {"preset": args.preset},
            "seq_len": args.seq_len, "global_batch": args.global_batch, "micro_batch": args.micro_batch,
            "steps": steps, "precision": "fp32", "device": "cpu", "schedule": {"warmup": 10},
            "checkpoint": {"interval": 0}, "metrics": {"live": False, "tensorboard": False},
            "forensics": {"steps": list(range(steps - written, steps))},
        }
    )  # fmt: skip
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        account = Account(trainer.forensics)
        trainer.fit()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted((folder / "forensics").glob("*.json")) if written else []
    return {
        "steps": steps,
        "steps_s": sum(row["step_time_s"] for row in rows if row["kind"] == "step"),
        "forensics_s": account.seconds,
        "file_bytes": max((file.stat().st_size for file in files), default=0),
        "files": len(files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="debug")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("quiet", "written"):
            (folder / part).mkdir()
        paths = write_random(folder / "data", 2_000_000, 120, VOCAB_SIZE, sources=3)
        quiet = run(args, folder / "quiet", paths, args.steps, 0)
        written = run(args, folder / "written", paths, FILES + 10, FILES)
    share = sum(quiet["forensics_s"].values()) / quiet["steps_s"]
    file_s = written["forensics_s"]["settle"] / FILES
    if args.json:
        json.dump({"quiet": quiet, "written": written, "share": share, "file_s": file_s, "goal": GOAL}, sys.stdout)
        print()
        return
    step_s = quiet["steps_s"] / args.steps
    print(f"{args.preset}, {args.global_batch} × {args.seq_len} tokens a step, float32, {args.threads} thread(s), "
          f"torch {torch.__version__}: {args.steps} steps of {step_s * 1e3:.1f} ms")  # fmt: skip
    for name, seconds in quiet["forensics_s"].items():
        print(f"  {name:14}{seconds / args.steps * 1e6:9.1f} µs a step {seconds / quiet['steps_s']:9.4%}")
    print(f"  forensics / step: {share:.4%}; goal below {GOAL:.1%}")
    print(f"  a file ({written['files']} written, {written['file_bytes']:,} bytes): {file_s * 1e3:.1f} ms, "
          f"{file_s / step_s:.2f} of a step")  # fmt: skip
    print(f"repeat: OMP_NUM_THREADS={args.threads} {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
