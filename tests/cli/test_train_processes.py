"""``quern train`` in several processes, and the codes it ends with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quern.errors import QuernError
from quern.train.checkpoint.format.folder import FolderLock
from quern.train.checkpoint.format.manifest import list_checkpoints, read_manifest
from quern.train.checkpoint.format.metadata import read_metadata
from quern.train.history.ledger import read_ledger
from support.programs import kill, python
from support.train.command_case import quern, said, write_config
from support.waits import until


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.mark.slow
def test_two_processes_train_what_one_does(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said(capfd, "train", config, f"run_dir={config.parent / 'one'}")
    two = quern("train", config, f"run_dir={config.parent / 'two'}", "--nproc", 2)
    assert two.returncode == 0, two.stderr

    def losses(name: str) -> list[float]:
        rows = map(json.loads, (config.parent / name / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if row["kind"] == "step"]

    assert losses("one") == pytest.approx(losses("two"), rel=1e-5)
    assert len(losses("two")) == 6
    planned = json.loads(said(capfd, "train", config, "--dry-run", "--json", "--nproc", 2))["checkpoint"]
    *_, checkpoint = list_checkpoints(str(config.parent / "two"))
    held = read_metadata(checkpoint.path, read_manifest(checkpoint.path).files).state_dict_metadata
    sizes = [tensor.size.numel() * tensor.properties.dtype.itemsize for name, tensor in held.items()
             if name.startswith(("model.", "optimizer.state."))]  # fmt: skip
    assert planned == {"bytes": sum(sizes), "copy_gib_per_rank": sum(sizes) / 2 / 2**30}


def started(config: Path, *keys: str, by: str | None = None, **how: object) -> subprocess.Popen[bytes]:
    """Two ranks that have made some steps of many."""
    process = subprocess.Popen(
        [by or python(), "-m", "quern.cli.main", "train", str(config), "steps=100000", "--nproc", "2",
         "data.0.max_epochs=100000", *keys], env={**os.environ, "OMP_NUM_THREADS": "1"}, **how,
    )  # fmt: skip
    metrics = config.parent / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_command_saves_on_every_rank_and_ends_with_3(config: Path, number: signal.Signals) -> None:
    """The second as a terminal is closed: nothing can be written to it any more."""
    run = config.parent / "run"
    ours, terminal = os.openpty()
    process = started(config, "checkpoint.interval=0", stderr=terminal)
    os.close(terminal)
    if number == signal.SIGHUP:
        os.close(ours)
    process.send_signal(number)
    code = process.wait(timeout=120)
    if number != signal.SIGHUP:
        os.close(ours)
    assert code == 3
    last = read_ledger(run / "ledger.jsonl")[-2:]
    assert [entry["kind"] for entry in last] == ["checkpoint", "stopped"]
    assert last[0]["step"] == last[1]["step"]
    assert (run / "checkpoints" / last[0]["name"] / "manifest.json").exists()


@pytest.mark.slow
def test_ranks_end_with_a_command_that_is_killed(config: Path) -> None:
    process = started(config, "checkpoint.interval=0")
    folder = config.parent / "run" / "checkpoints"
    rank = json.loads((folder / ".lock").read_text())["pid"]
    assert kill(process) == -signal.SIGKILL
    deadline, free = time.monotonic() + 120, False
    while time.monotonic() < deadline and not free:
        with contextlib.suppress(QuernError):
            FolderLock(str(folder)).close()
            free = True
        time.sleep(0.02)
    if not free:
        os.kill(rank, signal.SIGKILL)
    assert free, "rank 0 goes on"


@pytest.mark.long
def test_a_rank_that_dies_ends_the_others(config: Path) -> None:
    """One of two ranks is killed; the command ends with a code that says so, and leaves no process."""
    process = started(config, by=sys.executable, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    assert process.wait(timeout=120) == 128 + signal.SIGKILL
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
