"""Who failed first, in one line; the tracebacks in files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quern.config import dump_yaml
from quern.train import run_record, tracebacks
from support.train import run_case as case

RANKS = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def failed(run: Path, rank: int, error: Exception) -> None:
    try:
        raise error
    except Exception as caught:
        kept = tracebacks.keep(str(run), rank, caught)
    assert kept == str(run / "tracebacks" / f"rank_{rank}.txt")


def test_a_death_by_signal_comes_first(tmp_path):
    failed(tmp_path, 0, RuntimeError("Connection closed by peer [127.0.0.1]:4411\nThis may indicate"))
    said = tracebacks.verdict(str(tmp_path), [1, -9, -6, None])
    assert said == "rank 1 was killed by signal 9 (SIGKILL); there is no checkpoint yet"
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    assert tracebacks.verdict(str(tmp_path), [1, 1, -signal.SIGRTMIN - 1]) == (
        f"rank 2 was killed by signal {signal.SIGRTMIN + 1}; newest checkpoint step 10; the same command goes on"
    )


def test_the_traceback_that_was_written_first_is_told(tmp_path):
    failed(tmp_path, 1, ValueError("two\nlines"))
    failed(tmp_path, 0, RuntimeError("Connection closed by peer"))
    file = tmp_path / "tracebacks" / "rank_1.txt"
    said = f"rank 1: ValueError: two; its traceback: {file}; there is no checkpoint yet"
    for codes in ([1, 1], [1, 1, 3], [1, 1, None, 0]):
        assert tracebacks.verdict(str(tmp_path), codes) == said
    assert "Traceback (most recent call last)" in file.read_text()
    assert tracebacks.verdict(str(tmp_path), [1, 1, 2]) is None  # that of rank 2 was an error with a line of its own
    tracebacks.clear(str(tmp_path))
    assert tracebacks.verdict(str(tmp_path), [1, 1]) is None


def test_a_folder_that_cannot_be_written_loses_no_traceback(tmp_path):
    (tmp_path / "tracebacks").touch()
    assert tracebacks.keep(str(tmp_path), 0, ValueError("x")) is None


def test_a_traceback_is_written_through_no_link(tmp_path):
    (tmp_path / "outside").write_text("stays")
    file = Path(tracebacks.file_of(str(tmp_path), 0))
    file.parent.mkdir()
    file.symlink_to(tmp_path / "outside")
    assert tracebacks.keep(str(tmp_path), 0, ValueError("x")) is None
    assert (tmp_path / "outside").read_text() == "stays"


def test_what_changed_in_a_config_is_told_key_by_key(tmp_path):
    before = case.settings(tmp_path / "run", ["a", "b"])
    assert run_record.changes(before, 3) == []
    for name in ("run", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(before))
    assert run_record.changes(before, 3) == []
    after = case.settings(tmp_path / "elsewhere/../run", ["a", "c"], optimizer={"lr": 0.02}, resume={"step": "good"})
    assert run_record.changes(after, 0) == [
        "config: data.1.path: b → c",
        "config: optimizer.lr: 0.01 → 0.02",
        "config: resume.step: null → good",
    ]
    (fewer,) = run_record.changes(case.settings(tmp_path / "run", ["a"]), 3)
    assert fewer.startswith("config: data: [{")
    assert fewer.endswith(" … → [{accept_version: null, max_epochs: 100.0, path: a, weight: 3.0}]")


def test_a_longer_run_says_what_becomes_of_its_learning_rate(tmp_path):
    schedule = {"kind": "wsd", "warmup": 5, "decay": 0.25, "final": 0.1}
    before, after = (
        case.settings(tmp_path, ["a"], steps=steps, schedule=schedule, optimizer={"lr": 0.003}) for steps in (60, 80)
    )
    (tmp_path / "config.yaml").write_text(dump_yaml(before))
    told = "learning rate: step 59 had 0.00048, step 60 gets 0.003"  # 0.003 (1 - 0.9 · 14/15)
    assert run_record.changes(after, 60) == ["config: steps: 60 → 80", told]
    assert run_record.changes(after, 40) == ["config: steps: 60 → 80"]


@pytest.mark.slow
def test_a_killed_rank_is_named_in_one_line(tmp_path):
    paths = case.write_corpus(tmp_path / "data")
    config = case.settings(tmp_path / "run", paths, steps=1000, checkpoint={"interval": 2, "keep_last": 2})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    command = [sys.executable, "-m", "quern.cli.main", "train", str(tmp_path / "config.yaml"), "--nproc", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as launcher:
        try:
            while not list((tmp_path / "run" / "checkpoints").glob("step_*")) and launcher.poll() is None:
                time.sleep(0.05)
            (rank,) = (pid for pid in children(launcher.pid) if b"\0RANK=1\0" in environ(pid))
            os.kill(rank, signal.SIGKILL)
            _, said = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL, said
    lines = said.splitlines()
    assert "Traceback" not in said
    (line,) = (line for line in lines if line.startswith("error: "))
    start, step, end = line.partition("newest checkpoint step ")
    assert (start, end.partition(";")[2]) == (
        "error: rank 1 was killed by signal 9 (SIGKILL); ",
        " the same command goes on",
    )
    assert step
    other = (tmp_path / "run" / "tracebacks" / "rank_0.txt").read_text()
    assert "Traceback (most recent call last)" in other


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(stat[1]) == pid:
            found.append(int(folder.name))
    return found


def environ(pid: int) -> bytes:
    return b"\0" + Path("/proc", str(pid), "environ").read_bytes()
