"""A trainer killed (SIGKILL) at random moments, many in the midst of a save: the run is what it would have been."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from quern.config import dump_yaml
from quern.train.__main__ import main
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.tools.reader import verify
from quern.train.history.ledger import data_step, latest_order, surviving
from support.train import run_case as case
from support.train.exposures import exposures
from support.waits import until

KILLS = 20
#: Staging folders and folders moved aside: what a save leaves that was cut off.
HALF = re.compile(r"\.step_\d{8}\.[0-9a-f]{32}\.(tmp|replaced)")
STEPS = 100_000


def config_for(run: Path, paths: list[str], steps: int = STEPS, **changes):
    """Longer than twenty lives; a constant rate, so that the number of steps decides nothing else."""
    changes = {"checkpoint": {"interval": 1, "keep_last": 2}} | changes
    data = [{"path": path, "weight": weight, "max_epochs": 1e9} for path, weight in zip(paths, (3, 1), strict=True)]
    schedule = {"kind": "constant", "warmup": 3}
    return case.settings(run, paths, steps=steps, data=data, schedule=schedule, precision="bf16", **changes)


def newest_step(run: Path) -> int:
    return max((checkpoint.step for checkpoint in list_checkpoints(str(run))), default=0)


def half_written(run: Path) -> set[str]:
    root = run / "checkpoints"
    return {name for name in os.listdir(root) if HALF.fullmatch(name)} if root.exists() else set()


def a_life(context, file: Path, run: Path, rng: random.Random) -> None:
    """A process that trains until it is killed: somewhere within the next few steps after it has made some, or, every
    second one, as soon as a save of its own is seen under way."""
    process = context.Process(target=main, args=([str(file)],))
    process.start()
    try:
        before, left = newest_step(run), half_written(run)
        wanted = before + rng.choice([0, 1, 1, 2, 3])
        until(lambda: newest_step(run) >= wanted or not process.is_alive())
        if rng.random() < 0.5:
            deadline = time.monotonic() + 120
            while half_written(run) <= left and process.is_alive() and time.monotonic() < deadline:
                pass  # a save is over in milliseconds
            time.sleep(rng.choice([0, 0, 0.001, 0.003]))
        else:
            time.sleep(rng.uniform(0, 0.05 if wanted > before else 0.5))
        assert process.is_alive(), "the trainer ended of itself"
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.parametrize(
    "interval", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_twenty_kills(tmp_path, interval):
    paths = case.write_corpus(tmp_path / "data")
    run, file = tmp_path / "run", tmp_path / "run.yaml"
    checkpoint = {"interval": interval, "keep_last": 2}
    file.write_text(dump_yaml(config_for(run, paths, checkpoint=checkpoint)))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["quern.train.setup", "torch.distributed.checkpoint.state_dict"])
    rng = random.Random(interval)
    cut_off = lives = 0
    while lives < KILLS or (cut_off < 3 and lives < 5 * KILLS):  # where a kill strikes is chance
        lives += 1
        a_life(context, file, run, rng)
        cut_off += bool(half_written(run))
        for found in list_checkpoints(str(run)):
            assert verify(found.path) == []  # what bears a checkpoint's name is whole
    assert cut_off > 2, f"{cut_off} of {lives} kills struck a save; the test shows less than it should"

    newest = newest_step(run)
    assert newest > 5
    steps = newest + 3
    last = case.live(config_for(run, paths, steps, checkpoint=checkpoint))
    assert last.start.step == newest
    assert last.complete
    assert not half_written(run)
    straight = case.live(config_for(tmp_path / "whole", paths, steps, checkpoint={"interval": 0}))
    assert case.differences(last.state, straight.state) == []

    entries = case.ledger(run)
    assert entries[-1]["kind"] == "end"
    moves = [entry for entry in entries if entry["kind"] in ("start", "resume")]
    assert len(moves) >= lives // 2  # a life may end before its first line
    ranges = surviving(entries, steps)
    assert [step for found in ranges for step in range(found.step, found.stop)] == list(range(steps))
    assert [data_step(entries, step) for step in range(steps)] == list(range(steps))
    order = latest_order(entries)
    for step in range(0, steps, max(1, steps // 20)):
        for _, *sample in straight.samples[step]:
            found = exposures(entries, steps, order, *sample)
            assert [(e.step, e.data_step, e.applied) for e in found] == [(step, step, True)]
    check_metrics(run, tmp_path / "whole", steps, lives)


def check_metrics(run: Path, whole: Path, steps: int, lives: int) -> None:
    """Every line is one, and of every step the last attempt says what the uninterrupted run says.

    A step's line follows a step later, so a killed attempt may be the last to take a step and say nothing of it.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = Counter(line["step"] for line in lines if line["kind"] == "step")
    found, expected = case.rows(run), case.rows(whole)
    assert set(found) <= set(expected)
    assert all(found[step] == expected[step] for step in found)
    assert len(taken) >= steps - lives
