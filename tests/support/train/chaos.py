"""A run of four ranks that meets faults, and one that leaves out the same data and meets none."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from quern.config import dump_yaml
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.tools.reader import iter_weights
from quern.train.config import TrainConfig
from quern.train.history.ledger import latest_order, read_ledger
from quern.train.report.account import account
from quern.train.report.history import open_run
from support.programs import python
from support.remote.s3_server import Fault, Server
from support.train import run_case as case
from support.train.exposures import exposures

LAUNCHER = """
import os, sys
from quern.cli.train import ranks
from quern.train.init_from import load_run_config

python, program, plan, config, least = sys.argv[1:]
os.environ["CHAOS_LAUNCHER"] = str(os.getpid())
ranks.module = lambda *_: [python, program, plan, config]
sys.exit(ranks.supervise(load_run_config(config, ()), config, [], 4, 40, int(least)))
"""
PLACES = ("forward_backward", "clip", "update", "save_if_due")


@dataclass
class Chaos:
    """What came of it."""

    run: Path
    starts: int
    """Of the command."""
    code: int
    seconds: float
    said: str
    folder: Path
    """Of marks of what has happened, and of what each life took."""


def settings(run: Path, paths: list[str], steps: int, store: str | None = None, **changes: Any) -> TrainConfig:
    guard = {"health_window": 2, "non_finite": "rollback_and_skip", **changes.pop("guard", {})}
    return case.settings(
        run, paths, steps=steps, global_batch=8, micro_batch=1, guard=guard,
        checkpoint={"interval": 4, "keep_last": 4, "mode": "thread", "store": store},
        parallel={"dp_replicate": 2, "dp_shard": 2},
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


def meet(
    folder: Path, config: TrainConfig, events: list[dict[str, Any]], spoilt: list[int], server: Server | None = None,
    most: int = 9, least: int = 4,
) -> Chaos:  # fmt: skip
    """Give the same command until it ends by itself, as a batch system would; ``server`` has the run's store, and
    ``least`` ranks are enough."""
    marks, lost = folder / "marks", folder / "lost"
    marks.mkdir(parents=True, exist_ok=True)
    plan, file = folder / "plan.json", folder / "config.yaml"
    plan.write_text(json.dumps({"folder": str(marks), "events": events, "spoilt": spoilt}))
    file.write_text(dump_yaml(config))
    program = Path(__file__).with_name("chaos_rank.py")
    command = [python(), "-c", LAUNCHER, python(), str(program), str(plan), str(file), str(least)]
    tests = str(Path(__file__).parents[2])
    paths = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CHAOS_LOST": str(lost)}
    environment |= server.environment() if server else {}
    began, said, starts, done = time.monotonic(), "", 0, None
    while starts < most:
        starts += 1
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
        said += done.stderr
        if done.returncode >= 0:
            break
        time.sleep(2.0)  # the ranks of a launcher that was killed end with it
        if lost.exists():
            assert server is not None
            lost.unlink()
            lose(Path(config.run_dir), server)
    assert done is not None
    return Chaos(Path(config.run_dir), starts, done.returncode, time.monotonic() - began, said, folder)


def lose(run: Path, server: Server) -> None:
    """The disk with a run's checkpoints is lost, and so is a file of the newest that the store has whole."""
    shutil.rmtree(run / "checkpoints")
    names = server.objects()
    whole = sorted(name.partition("/")[0] for name in names if name.endswith("manifest.json"))
    assert len(whole) > 1
    gone = max((name for name in names if name.startswith(whole[-1])), key=lambda name: names[name])
    server.boto.delete_object(Bucket=server.bucket, Key=f"runs/one/{gone}")


def cut_uploads(seed: int, count: int, server: Server) -> None:
    """So many of the requests that carry a file end in the middle, where the seed says."""
    rng = random.Random(seed)
    server.proxy.faults = [Fault("cut request", "PUT", "step_", skip=rng.randrange(4, 12)) for _ in range(count)]


def wrong_exposures(met: Chaos, config: TrainConfig, steps: int, spoilt: list[int]) -> list[str]:
    """Where the ledger says something else of a window than what the lives took of it. Of a data step the last that
    was taken is in the weights: here no step but the spoilt ones is left out, so data steps are steps."""
    last: dict[tuple[str, int], tuple[float, list[tuple[int, int, int]]]] = {}
    for file in (met.folder / "taken").iterdir():
        for line in file.read_text().splitlines():
            at, step, samples = json.loads(line)
            key = (file.name.partition("-")[0], step)
            last[key] = max(last.get(key, (0.0, [])), (at, [tuple(own) for own in samples]))
    taken = {own: step for (_, step), (_, samples) in last.items() for own in samples}
    entries = read_ledger(met.run / "ledger.jsonl")
    order = latest_order(entries)
    assert order is not None
    wrong = [] if len(taken) == steps * config.global_batch else [f"{len(taken)} windows were taken"]
    for (source, epoch, window), step in taken.items():
        found = exposures(entries, steps, order, source, epoch, window)
        told = [(own.step, own.data_step, own.applied) for own in found]
        if told != [(step, step, step not in spoilt)]:
            wrong.append(f"window {window} of source {source}: {told}, was in step {step}")
    return wrong


def account_gap(run: Path) -> float:
    """By which share of the time from the first line of the run's files to the last the account's parts miss it."""
    lines = [line for name in ("ledger.jsonl", "metrics.jsonl") for line in (run / name).read_text().splitlines()]
    times = [datetime.fromisoformat(row["time"]).timestamp() for row in map(json.loads, lines) if "time" in row]
    spent = account(open_run(str(run)))
    assert spent is not None
    assert min(spent.values()) >= 0
    return abs(sum(spent.values()) / (max(times) - min(times)) - 1)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    return dict(iter_weights(list_checkpoints(str(run))[-1].path))
