"""``quern train`` of a small config, as a program or in this process."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from support.programs import python
from support.train import corpora


def write_config(folder: Path) -> Path:
    """The config of a run of six steps, beside its data."""
    rng = random.Random(5)
    (path,) = corpora.write_run(folder / "data", {"web": corpora.make_shards(rng, [[40, 90, 7] * 12, [200] * 4])})
    plain = {
        "run_dir": str(folder / "run"),
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
    (folder / "c.yaml").write_text(yaml.safe_dump(plain))
    return folder / "c.yaml"


def quern(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python(), "-m", "quern.cli.main", *map(str, arguments)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip


def said(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that succeeds writes to stdout; JSON goes past Python's own streams."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return capfd.readouterr().out


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line
