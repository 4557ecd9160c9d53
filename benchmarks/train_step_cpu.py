"""Tokens a second of the trainer on CPU in float32, beside a plain loop; and what its accounts cost.

    OMP_NUM_THREADS=1 python benchmarks/train_step_cpu.py [--pairs 30] [--block 3] [--no-document-mask] [--json]
                                                          [--accounts 200]

Both sides train the same model from the same weights over the same batches in one process, in turns of ``--block``
steps: the trainer as ``Trainer.fit`` runs it (guard, metrics, ledger, loader and all), and
``tests/support/oracles/fast_loop.py``, a loop without any of that whose tensors lie ready. The loader works ahead while
the peer has its turn, so all time inside it is added to the trainer's. The ratio is the median over pairs of turns, its
interval a bootstrap's. The losses of both sides are compared on the way.

The accounts come from ``--accounts`` steps of the trainer alone: time in the loader and in the order, and time the
loop stood still for data, each over the time of those steps.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from quern.train.batches.feed import to_device
from quern.train.bench.corpus import write_random
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer
from support.oracles.fast_loop import FastLoop
from support.oracles.plain_loop import Settings

GOAL = 0.98
VOCAB_SIZE = 4096
CPU = torch.device("cpu")


class Turns:
    """Sits where the trainer's profiler does, after each step, and lets the peer have its turn there."""

    def __init__(self, trainer: Trainer, peer: FastLoop, block: int, warm_up: int) -> None:
        self.trainer, self.peer, self.block, self.warm_up = trainer, peer, block, warm_up
        self.own_s: list[float] = []
        self.peer_s: list[float] = []
        self.peer_losses: list[float] = []
        self._loader = trainer.feed._loader
        self._mark = self._inside = 0.0

    def __enter__(self) -> Self:
        self._again()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def _again(self) -> None:
        self._inside, self._mark = self._loader.spent_s, time.perf_counter()

    def step(self, step: int) -> None:
        if step + 1 == self.trainer.config.steps or (step + 1) % self.block:
            return  # the last step also saves
        own_s = time.perf_counter() - self._mark + self._loader.spent_s - self._inside
        batches = [self._batches(number) for number in range(step + 1 - self.block, step + 1)]
        began = time.perf_counter()
        losses = [self.peer.step(batch)[0] for batch in batches]
        peer_s = time.perf_counter() - began
        self.peer_losses += losses
        if step + 1 > self.warm_up * self.block:
            self.own_s.append(own_s)
            self.peer_s.append(peer_s)
        self._again()

    def _batches(self, data_step: int) -> list[tuple[torch.Tensor | None, ...]]:
        mask = self.trainer.config.document_mask
        found = []
        for batch in self._loader.take(data_step).micro_batches:
            inputs = to_device(batch, CPU, document_mask=True)
            assert inputs.documents is not None
            found.append(
                (inputs.tokens_BL, inputs.targets_BL, torch.from_numpy(batch.positions_BL),
                 inputs.documents.ids_BL if mask else None)
            )  # fmt: skip
        return found


def config_of(args: argparse.Namespace, folder: Path, paths: list[str], steps: int) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run_dir": str(folder),
            "data": [{"path": path, "weight": 1 + number} for number, path in enumerate(paths)],
            "document_mask": args.document_mask,
            "model": {"preset": args.preset},
            "seq_len": args.seq_len,
            "global_batch": args.global_batch,
            "micro_batch": args.micro_batch,
            "steps": steps,
            "precision": "fp32",
            "device": "cpu",
            "schedule": {"warmup": min(10, steps)},
            "checkpoint": {"interval": 0},
            "metrics": {"live": False},
        }
    )


def pairs(args: argparse.Namespace, folder: Path, paths: list[str]) -> dict[str, Any]:
    """Seconds of each turn of both sides, and the largest relative difference of their losses."""
    config = config_of(args, folder / "pairs", paths, (args.pairs + args.warm_up) * args.block + 1)
    (folder / "pairs").mkdir()
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        settings = Settings(steps=config.steps, lr=config.optimizer.lr, warmup=config.schedule.warmup)
        turns = Turns(trainer, FastLoop(weights, trainer.model.shape, settings), args.block, args.warm_up)
        trainer.profiler = turns  # type: ignore[assignment]
        trainer.fit()
    rows = [json.loads(line) for line in (folder / "pairs" / "metrics.jsonl").read_text().splitlines()]
    own = [row["loss"] for row in rows if row["kind"] == "step"]
    apart = max(abs(a - b) / abs(b) for a, b in zip(own, turns.peer_losses, strict=False))
    return {"own_s": turns.own_s, "peer_s": turns.peer_s, "losses_apart": apart}


def accounts(args: argparse.Namespace, folder: Path, paths: list[str]) -> dict[str, float]:
    """Seconds of a run of the trainer alone, and those inside loader and order and spent waiting."""
    config = config_of(args, folder / "accounts", paths, args.accounts)
    (folder / "accounts").mkdir()
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.fit()
        loader = trainer.feed._loader
        inside = {"loader": loader.spent_s, "order": loader.order_s}
    rows = [json.loads(line) for line in (folder / "accounts" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    return {
        **inside,
        "wait": sum(row["data_wait_s"] for row in steps),
        "wait after the first": sum(row["data_wait_s"] for row in steps[1:]),
        "steps": sum(row["step_time_s"] for row in steps),
    }


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """95 % of a bootstrap of the median."""
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="debug")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--mean-document", type=float, default=120)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--block", type=int, default=3, help="steps of a turn")
    parser.add_argument("--warm-up", type=int, default=2, help="turns that do not count")
    parser.add_argument("--accounts", type=int, default=0, help="steps; 0 = none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-document-mask", dest="document_mask", action="store_false")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_random(folder / "data", 2_000_000, args.mean_document, VOCAB_SIZE, sources=3)
        if args.pairs:
            result |= pairs(args, folder, paths)
        if args.accounts:
            result["accounts"] = accounts(args, folder, paths)
    if args.pairs:
        ratios = np.divide(result["peer_s"], result["own_s"])
        result |= {"ratio": float(np.median(ratios)), "interval": interval(ratios), "goal": GOAL}
    if args.json:
        json.dump(result, sys.stdout)
        print()
        return
    tokens = args.block * args.global_batch * args.seq_len
    masks = "document masks" if args.document_mask else "no document masks"
    print(f"{args.preset}, {VOCAB_SIZE} ids, {args.global_batch} × {args.seq_len} tokens a step, float32, {masks}, "
          f"{args.threads} thread(s), torch {torch.__version__}")  # fmt: skip
    if args.pairs:
        for side, key in (("trainer, with all time in the loader", "own_s"), ("plain loop", "peer_s")):
            print(f"  {side:40}{tokens / median(result[key]):10,.0f} tokens/s")
        low, high = result["interval"]
        print(f"  trainer / plain loop: {result['ratio']:.3f} ({low:.3f} to {high:.3f}, "
              f"{len(result['own_s'])} pairs of {args.block} steps); goal {GOAL}")  # fmt: skip
        print(f"  losses apart by at most {result['losses_apart']:.1e} of their value")
    if args.accounts:
        seconds = result["accounts"]
        print(f"  accounts of {args.accounts} steps, {seconds['steps']:.1f} s:")
        for side in ("loader", "order", "wait", "wait after the first"):
            print(f"    {side:24}{seconds[side] * 1e3:9.1f} ms {seconds[side] / seconds['steps']:9.4%}")
    print(f"repeat: OMP_NUM_THREADS={args.threads} {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
