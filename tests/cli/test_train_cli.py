"""``quern train``: plans, refusals, several processes, and the codes it ends with."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.train.ledger import read_ledger

ROOT = Path(__file__).resolve().parents[2]


def _corpora() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cli_corpora", ROOT / "tests" / "train" / "corpora.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tmp_path: Path) -> Path:
    corpora, rng = _corpora(), random.Random(5)
    (path,) = corpora.write_run(tmp_path / "data", {"web": corpora.make_shards(rng, [[40, 90, 7] * 12, [200] * 4])})
    plain = {
        "run_dir": str(tmp_path / "run"),
        "data": [{"path": str(path), "max_epochs": 100}],
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "tied_embeddings": True},
        "seq_len": 32,
        "global_batch": 4,
        "micro_batch": 1,
        "steps": 6,
        "precision": "fp32",
        "device": "cpu",
        "schedule": {"warmup": 2},
        "checkpoint": {"interval": 3},
        "metrics": {"tensorboard": False},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(plain))
    return tmp_path / "c.yaml"


def quern(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "quern.cli.main", *map(str, arguments)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line


def test_a_dry_run_says_what_it_would_be_and_writes_nothing(config: Path) -> None:
    done = quern("train", config, "--dry-run", "--json", "--nproc", 2)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    # embedding 300 × 16; attention 4 · 16²; SwiGLU 3 · 16 · 64; three norms
    assert summary["parameters"]["total"] == 300 * 16 + 4 * 16 * 16 + 3 * 16 * 64 + 3 * 16
    memory = summary["state_memory_gib"]
    assert memory["sixteen_bytes"] == pytest.approx(16 * summary["parameters"]["total"] / 2**30)
    assert memory["sixteen_bytes_per_rank"] == pytest.approx(memory["sixteen_bytes"] / 2)
    assert memory["rank"] == pytest.approx(16 * (summary["parameters"]["total"] + 84 * 16) / 2 / 2**30)  # 384 rows held
    assert summary["layout"] == {"ranks": 2, "dp_replicate": 1, "dp_shard": 2}
    assert summary["order"]["samples"] == 24
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("modle.dim=3",), "modle: unknown key; did you mean 'model'?"),
        (("parallel.tp=2",), "tp: not available yet"),
        (("parallel.zero=2",), "zero: not available"),
        (("model.num_heads=3",), "num_heads: expected a divisor of dim (16)"),
        (("seq_len=3000",), "has 2444 tokens; seq_len 3000 needs 3001 or more"),
        (
            ("global_batch=5", "micro_batch=2"),
            "global_batch: expected a multiple of 2 (1 data-parallel ranks × micro_batch 2), got 5",
        ),
        (("schedule.warmup=9",), "schedule.warmup: expected at most steps (6), got 9"),
        (("data.0.max_epochs=0.1",), "beyond max_epochs 0.1"),
        (("parallel.dp_shard=3", "--nproc", "2"), "makes 3 ranks, but 2 were started"),
        (("data_skip=2",), "data_skip: expected only together with resume.step"),
        (("--json",), "--json: expected together with --dry-run"),
    ],
)
def test_a_config_that_cannot_train_is_refused_in_one_line(
    config: Path, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("train", config, *arguments)
    assert not (config.parent / "run").exists()


@pytest.mark.slow
def test_two_processes_train_what_one_does(config: Path) -> None:
    one = quern("train", config, f"run_dir={config.parent / 'one'}")
    two = quern("train", config, f"run_dir={config.parent / 'two'}", "--nproc", 2)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr

    def losses(name: str) -> list[float]:
        rows = map(json.loads, (config.parent / name / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if row["kind"] == "step"]

    assert losses("one") == pytest.approx(losses("two"), rel=1e-5)
    assert len(losses("two")) == 6


@pytest.mark.slow
def test_a_signal_to_the_command_saves_on_every_rank_and_ends_with_3(config: Path) -> None:
    run = config.parent / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "quern.cli.main", "train", str(config), "steps=100000", "--nproc", "2",
         "data.0.max_epochs=100000", "checkpoint.interval=0"], env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 3, errors
    last = read_ledger(run / "ledger.jsonl")[-2:]
    assert [entry["kind"] for entry in last] == ["checkpoint", "stopped"]
    assert last[0]["step"] == last[1]["step"]
    assert (run / "checkpoints" / last[0]["name"] / "manifest.json").exists()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(config: Path) -> None:
    """One of two ranks is killed; the command ends with a code that says so, and leaves no process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quern.cli.main", "train", str(config), "steps=100000", "--nproc", "2",
         "data.0.max_epochs=100000"], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = config.parent / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    assert process.wait(timeout=120) not in (0, 2, 3)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
