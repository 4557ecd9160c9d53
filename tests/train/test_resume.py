"""A run that is stopped and taken up again is the uninterrupted run, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from quern.config import dump_yaml
from quern.parallel.local import LocalRanks
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.config import TrainConfig
from quern.train.history.ledger import data_step, latest_order, surviving
from support.programs import python
from support.train import run_case as case
from support.train.exposures import exposures
from support.waits import until

pytestmark = pytest.mark.slow

CRASHES = {  # interval of checkpoints, and in which step each life of the run ends
    "in the first step": (2, [0, 2]),
    "on and beside checkpoints": (3, [4, 6, 8]),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return case.write_corpus(tmp_path_factory.mktemp("data"), {"web": 60, "code": 25, "web.val": 8, "code.val": 5})


def sources(paths):
    return [path for path in paths if not path.endswith(".val")]


def check_same(broken: Path, lives: list[case.Left], whole: Path, straight: case.Left) -> None:
    """Losses, norms, rates, skips, held-out losses, sample ids, weights, moments, guard: everything but times."""
    assert lives[-1].complete
    assert straight.complete
    assert case.rows(broken) == case.rows(whole)
    assert case.differences(lives[-1].state, straight.state) == []
    assert case.taken_by(lives) == straight.samples
    assert len(straight.samples) == case.STEPS
    for step in range(case.STEPS):
        assert data_step(case.ledger(broken), step) == step


PRECISIONS = {
    "bf16": {"precision": "bf16"},
    "no document masks": {"document_mask": False, "micro_batch": 8},
    "fp16": {"precision": "fp16"},
}


def nan_at_3_and_6(data_step: int) -> float:
    return float("nan") if data_step in (3, 6) else 1.0


@pytest.mark.parametrize(
    "kind", ["bf16", *(pytest.param(name, marks=pytest.mark.long) for name in ("no document masks", "fp16"))]
)
def test_killed_at_every_step(tmp_path, paths, kind):
    """A life a step; steps 3 and 6 are skipped, so there is a skipped step before and after every stop."""
    changes = {**PRECISIONS[kind], "validation": {"interval": 4, "windows": 5}}
    straight = case.live(case.settings(tmp_path / "whole", sources(paths), **changes), factor=nan_at_3_and_6)
    broken = case.settings(tmp_path / "broken", sources(paths), **changes, checkpoint={"interval": 1, "keep_last": 2})
    lives = [case.live(broken, kill_at=step, factor=nan_at_3_and_6) for step in range(1, case.STEPS)]
    lives.append(case.live(broken, factor=nan_at_3_and_6))
    assert [life.start.step for life in lives] == [0, *range(1, case.STEPS)]
    check_same(tmp_path / "broken", lives, tmp_path / "whole", straight)
    skipped = [step for step, row in case.rows(tmp_path / "broken").items() if row.get("skipped")]
    assert {3, 6} <= set(skipped)
    assert {entry["step"] for entry in case.ledger(tmp_path / "broken") if entry["kind"] == "skipped"} == set(skipped)
    counters = {float(value) for name, value in straight.state.items() if name.startswith("step.")}
    assert counters == {case.STEPS - len(skipped)}  # AdamW's count is of updates
    assert straight.state["guard.entered"] == case.STEPS - len(skipped)
    if kind == "fp16":
        assert straight.state["loss_scale.scale"] == 2.0 ** (16 - len(skipped))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, paths):
    """The uninterrupted run, with a held-out loss after every second step."""
    run = tmp_path_factory.mktemp("whole")
    return run, case.live(case.settings(run, sources(paths), validation={"interval": 2}))


@pytest.mark.parametrize("kind", CRASHES)
def test_killed_between_checkpoints(tmp_path, paths, whole, kind):
    interval, steps = CRASHES[kind]
    broken = case.settings(
        tmp_path / "broken", sources(paths), checkpoint={"interval": interval}, validation={"interval": 2}
    )
    lives = [case.live(broken, kill_at=step) for step in steps]
    lives.append(case.live(broken))
    assert [life.start.step for life in lives] == [0, *[step // interval * interval for step in steps]]
    check_same(tmp_path / "broken", lives, *whole)


@pytest.mark.parametrize("stop_at", [0, 5, 8])
def test_a_signal_in_any_step(tmp_path, paths, whole, stop_at):
    """Heard in step s, it travels with the sums of s + 1 and is read in s + 2, after which the run is saved.

    A held-out loss after s + 1 waits for that step's figures, and so hears it one step earlier. Those that are due at
    the last step of either life are there too.
    """
    broken = case.settings(tmp_path / "broken", sources(paths), validation={"interval": 2})
    first = case.live(broken, stop_at=stop_at)
    saved = stop_at + 2 + stop_at % 2
    entries = case.ledger(tmp_path / "broken")
    if saved < case.STEPS:
        assert (first.complete, first.stopped_by) == (False, "SIGTERM")
        assert [checkpoint.step for checkpoint in list_checkpoints(str(tmp_path / "broken"))] == [saved]
        assert {name: entries[-1][name] for name in ("kind", "step", "signal")} == {
            "kind": "stopped", "step": saved, "signal": "SIGTERM",
        }  # fmt: skip
    else:
        assert first.complete
        assert entries[-1]["kind"] == "end"
    second = case.live(broken)
    assert second.start.step == min(saved, case.STEPS)
    check_same(tmp_path / "broken", [first, second], *whole)


def test_the_ledger_knows_what_the_loader_gave(tmp_path, paths):
    """Through deaths, a rollback, skipped data and a skipped step: exposures() is what the surviving steps read."""
    run = tmp_path / "run"

    def config(**changes):
        return case.settings(run, sources(paths), checkpoint={"interval": 2}, **changes)

    def nan(data_step):
        return float("nan") if data_step in (1, 9) else 1.0

    lives = [case.live(config(), kill_at=7, factor=nan)]  # stands at 6
    back = config(resume={"step": 4}, data_skip=3)
    lives.append(case.live(back, kill_at=4, factor=nan))  # before any step of the new branch
    lives.append(case.live(back, kill_at=7, factor=nan))
    lives.append(case.live(back, factor=nan))
    assert [life.start.kind for life in lives] == ["start", "rollback", "resume", "resume"]
    assert [(life.start.step, life.start.data_step) for life in lives] == [(0, 0), (4, 7), (4, 7), (6, 9)]

    entries = case.ledger(run)
    read: dict[int, list] = {}
    for life in lives:
        for read_step, samples in life.samples.items():
            read.setdefault(read_step, samples)
            assert read[read_step] == samples
    at = {step: data_step(entries, step) for step in range(case.STEPS)}
    assert [at[step] for step in range(case.STEPS)] == [0, 1, 2, 3, 7, 8, 9, 10, 11]
    assert {row["data_step"] for row in case.rows(run).values() if "data_step" in row} == set(at.values())
    ranges = surviving(entries, case.STEPS)
    assert [step for r in ranges for step in range(r.step, r.stop)] == list(range(case.STEPS))

    truth = Counter()
    for step, own in at.items():
        for _, *sample in read[own]:
            truth[tuple(sample)] += 1
            found = exposures(entries, case.STEPS, latest_order(entries), *sample)
            assert [(e.step, e.data_step, e.applied) for e in found] == [(step, own, own not in (1, 9))]
    assert set(truth.values()) == {1}
    order = latest_order(entries)
    for lost in (4, 5, 6):
        for sample in zip(*order.batch(lost), strict=True):
            assert exposures(entries, case.STEPS, order, *map(int, sample)) == []


# ---- whole processes


def start(config, folder: Path, *, ranks: int = 1) -> subprocess.Popen:
    file = folder / f"{Path(config.run_dir).name}.yaml"
    file.write_text(dump_yaml(config))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable if ranks > 1 else python(), *launcher, "-m", "quern.train", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lived(config: str) -> bool:
    """On a rank: to the end, which torchrun is not needed for."""
    return case.live(TrainConfig.model_validate_json(config)).complete


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until metrics say that the step is done."""

    def is_done() -> bool:
        assert process.poll() is None, process.communicate()[0]
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        return any(json.loads(line)["step"] >= step for line in lines[::-1])

    until(is_done)


def check_stopped(run: Path, by: str) -> int:
    """The step after which a process saved once and stopped."""
    (checkpoint,) = list_checkpoints(str(run))
    entries = case.ledger(run)
    assert [entry["kind"] for entry in entries] == ["order", "start", "checkpoint", "stopped"]
    assert entries[-1]["step"] == entries[-2]["step"] == checkpoint.step
    assert entries[-1]["signal"] == by
    return checkpoint.step


def weights_on_disk(run: Path) -> dict:
    """Every tensor of the newest checkpoint, read by torch's own reader."""
    import pickle

    import torch
    import torch.distributed.checkpoint as dcp

    newest = list_checkpoints(str(run))[-1]
    stored = pickle.loads(Path(newest.path, ".metadata").read_bytes()).state_dict_metadata
    tensors = {name: torch.empty(value.size, dtype=value.properties.dtype) for name, value in stored.items()}
    dcp.load(tensors, checkpoint_id=newest.path, no_dist=True)
    return tensors


LONG = 4000


def long_run(run: Path, paths, **changes):
    """Longer than anybody waits: a signal arrives in the midst of it, however slow the machine."""
    return case.settings(run, sources(paths), **changes, steps=LONG, data=[
        {"path": path, "max_epochs": 1e6} for path in sources(paths)
    ], checkpoint={"interval": 0, "keep_last": 3}, schedule={"warmup": 3, "kind": "constant"})  # fmt: skip


def test_sigterm_ends_a_process_with_a_checkpoint(tmp_path, paths):
    run = tmp_path / "run"
    process = start(long_run(run, paths), tmp_path)
    wait_for_step(run, 5, process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 3, said
    assert [line for line in said.splitlines() if not line.startswith("INFO ")] == []
    saved = check_stopped(run, "SIGTERM")

    steps = saved + 4
    again = case.live(long_run(run, paths).model_copy(update={"steps": steps}))
    assert (again.start.step, again.complete) == (saved, True)
    assert list_checkpoints(str(run))[-1].step == steps
    # all steps up to the end were taken once: that their values are those of a run in one piece is told above
    assert sorted(step for step in case.rows(run) if step >= 0) == list(range(steps))


@pytest.mark.long
def test_sigterm_to_one_of_two_workers_ends_both_at_one_step(tmp_path, paths):
    run = tmp_path / "run"
    process = start(long_run(run, paths), tmp_path, ranks=2)
    try:
        wait_for_step(run, 5, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        of_rank = {}
        for child in children:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            of_rank |= {entry[5:].decode(): int(child) for entry in environment if entry.startswith(b"RANK=")}
        os.kill(of_rank["1"], signal.SIGTERM)
        said, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 1, said  # torchrun's word for workers that did not end with 0
    assert said.count("exitcode  : 3 ") == 2, said

    steps = check_stopped(run, "signal to another rank") + 4
    configs = [long_run(folder, paths).model_copy(update={"steps": steps}) for folder in (run, tmp_path / "whole")]
    with LocalRanks(2, timeout_s=240, files={lived.__module__: lived.__code__.co_filename}) as ranks:
        for config in configs:
            assert ranks.call(lived, config.model_dump_json()) == [True, True]
    assert case.rows(run) == case.rows(tmp_path / "whole")
    assert case.differences(weights_on_disk(run), weights_on_disk(tmp_path / "whole")) == []
