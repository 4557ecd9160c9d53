"""What recomputation finds: bits that flip at random in a checked step, before gradients are summed; and what it costs.

    OMP_NUM_THREADS=1 python benchmarks/recomputation.py [--flips 200] [--steps 20] [--seed 1] [--json]

Two ranks of FSDP2 train; in each step a bit flips on one of them while it computes its last micro-batch: in what a
layer gives, in the gradient of that, or in its weight's gradient; layer, element, bit and rank are drawn, half of the
flips in FP32 and half in BF16. A flip that is not found is judged without the hashes: all gradients of the micro-batch
with it and without it, byte by byte. Then flips of the upper bits of the same element tell whether any change of it
counts. The cost is accounted, not compared: time inside the check over the time of steps that are not checked.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from quern.parallel.clip import local_part
from quern.parallel.local import LocalRanks
from quern.train.bench.corpus import write_random
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer
from support.processes import files_of
from support.train.recomputation_case import Fault, Injector

VOCAB_SIZE, WORLD, INTERVAL = 512, 2, 100
KINDS = ("activation", "backward", "gradient")


def config(folder: str, paths: list[str], **changes: Any) -> TrainConfig:
    base = {
        "run_dir": folder, "data": [{"path": path, "max_epochs": 1000} for path in paths], "seq_len": 64,
        "model": {"num_layers": 2, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "tied_embeddings": False},
        "global_batch": 8, "micro_batch": 2, "device": "cpu", "schedule": {"warmup": 1}, "optimizer": {"lr": 1e-12},
        "guard": {"loss_z": 1e9, "grad_norm_z": 1e9, "max_skips": 10_000}, "checkpoint": {"interval": 0},
        "metrics": {"live": False, "tensorboard": False}, "forensics": {"window": 0}, "verify_shards": False,
    }  # fmt: skip
    return TrainConfig.model_validate(base | changes)


def flips(folder: str, paths: list[str], precision: str, num: int, seed: int) -> list[dict[str, Any]]:
    """One flip a step; what became of each. The weights stay where they are, by their learning rate."""
    settings = config(folder, paths, precision=precision, steps=num, replicas={"recompute_interval": 1})
    rng, outcomes = random.Random(f"{seed} {precision}"), []
    with open_ranks("cpu") as ranks, open_trainer(settings, ranks) as trainer:
        trainer.saves.due = lambda done: False  # type: ignore[method-assign]
        modules = [n for n, m in trainer.model.named_modules() if hasattr(m, "weight") and n not in ("embed", "head")]
        injectors = {name: Injector(trainer.model.get_submodule(name)) for name in modules}
        batches, take = [], trainer.feed.take
        trainer.feed.take = lambda step: batches.append(take(step)) or batches[-1]  # type: ignore[method-assign,func-returns-value]
        trainer.start_loop()
        for step in range(num):
            kind, module, rank = rng.choice(KINDS), rng.choice(modules), rng.randrange(WORLD)
            bit = rng.randrange(16 if precision == "bf16" and kind != "gradient" else 32)
            fault = Fault(rank, module, kind, rng.randrange(1 << 30), bit, 0, 1)
            arm = partial(_arm, injectors, ranks.rank)
            arm(fault)
            judge, trainer.back.judge_copies = trainer.back.judge_copies, lambda found: None  # type: ignore[method-assign]
            trainer.train_step(step)
            trainer.back.judge_copies = judge  # type: ignore[method-assign]
            found, trainer.recomputation.found = trainer.recomputation.found, []
            outcome = {"kind": kind, "module": module, "bit": bit, "found": bool(found)}
            if found:
                outcome["named"] = rank in found[0].ranks
                outcome["alone"] = found[0].ranks == (rank,)
            else:
                bits = [None, bit, *(top for top in (15, 14, 13) if bit < 16), 31, 30, 29]
                computed = [_computed(trainer, batches[-1], arm, fault, own) for own in bits]
                outcome["changed"] = _anywhere(computed[1] != computed[0])
                outcome["matters"] = _anywhere(any(own != computed[0] for own in computed[2:]))
            batches.clear()
            outcomes.append(outcome)
    return outcomes


def _arm(injectors: dict[str, Injector], rank: int, fault: Fault | None) -> None:
    for name, own in injectors.items():
        own.fault = fault if fault is not None and (fault.rank, fault.module) == (rank, name) else None
        own.begin(0)


def _computed(trainer: Trainer, batch: Any, arm: Any, fault: Fault, bit: int | None) -> dict[str, bytes]:
    """The loss and gradients of this rank's last micro-batch, with a flip of a bit or without."""
    seen: list[bytes] = []
    plain = trainer.recomputation._digest

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(local_part(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return plain(tensor)

    arm(None if bit is None else Fault(fault.rank, fault.module, fault.kind, fault.element, bit, 0, 0))
    trainer.recomputation._digest = kept
    trainer.recomputation._computed(batch.micro_batches[-1], batch.valid_tokens)
    trainer.recomputation._digest = plain
    return {str(place): own for place, own in enumerate(sorted(seen))}


def _anywhere(holds: bool) -> bool:
    told = torch.tensor(int(holds))
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def cost(folder: str, paths: list[str], steps: int, micro_batches: int) -> dict[str, float]:
    """Medians of a step that is not checked, and of what a check adds, in seconds."""
    settings = config(
        folder, paths, precision="bf16", steps=2 * steps, seq_len=128,
        model={"num_layers": 4, "dim": 128, "num_heads": 4, "num_kv_heads": 2},
        global_batch=WORLD * 2 * micro_batches, replicas={"recompute_interval": 2},
    )  # fmt: skip
    with open_ranks("cpu") as ranks, open_trainer(settings, ranks) as trainer:
        inside = [0.0]
        own = trainer.recomputation
        own.check = _timed(own.check, inside)  # type: ignore[method-assign]
        digest = own._digest
        trainer.start_loop()
        took, checks = [], []
        for step in range(2 * steps):
            inside[0] = 0.0
            own._digest = _timed(digest, inside)
            began = time.perf_counter()
            trainer.train_step(step)
            (took if step % 2 == 0 else checks).append(time.perf_counter() - began if step % 2 == 0 else inside[0])
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {"step_s": median(took), "check_s": median(checks), "parameters": float(size)}


def _timed(call: Any, into: list[float]) -> Any:
    """Adds to what is there; calls inside of each other count once."""

    def timed(*args: Any) -> Any:
        before, began = into[0], time.perf_counter()
        result = call(*args)
        into[0] = before + time.perf_counter() - began
        return result

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    outcomes: list[dict[str, Any]] = []
    costs: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        paths = write_random(Path(name, "data"), 200_000, 60, VOCAB_SIZE, sources=1)
        with LocalRanks(WORLD, timeout_s=3600, files=files_of(flips)) as ranks:
            for precision, num in (("fp32", args.flips - args.flips // 2), ("bf16", args.flips // 2)):
                told = ranks.call(flips, str(Path(name, precision)), paths, precision, num, args.seed)[0]
                outcomes += [{"precision": precision, **own} for own in told]
            for micro_batches in (1, 4):
                folder = str(Path(name, f"cost{micro_batches}"))
                costs[micro_batches] = ranks.call(cost, folder, paths, args.steps, micro_batches)[0]
    if args.json:
        json.dump({"flips": outcomes, "cost": costs}, sys.stdout)
        print()
        return
    for kind in (*KINDS, "all"):
        own = [outcome for outcome in outcomes if kind in (outcome["kind"], "all")]
        found = [outcome for outcome in own if outcome["found"]]
        why = Counter(
            "MISSED" if outcome["changed"] else "rounded away" if outcome["matters"] else "of no effect"
            for outcome in own if not outcome["found"]
        )  # fmt: skip
        rest = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items())) or "none"
        named, alone = (sum(outcome[key] for outcome in found) for key in ("named", "alone"))
        share = len(found) / max(len(own), 1)
        print(f"{kind:11}{len(own):4} flips: {len(found)} found ({share:.1%}), their rank named in {named}, it alone "
              f"in {alone}; not found: {rest}")  # fmt: skip
    for micro_batches, own in costs.items():
        share = own["check_s"] / INTERVAL / own["step_s"]
        print(f"FSDP 2, BF16, {micro_batches} micro-batches of 2 × 128 tokens: step {own['step_s'] * 1e3:.0f} ms, "
              f"check {own['check_s'] * 1e3:.0f} ms: {share:.2%} of the time at interval {INTERVAL}")  # fmt: skip
    print(f"torch {torch.__version__}; repeat: OMP_NUM_THREADS=1 {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
