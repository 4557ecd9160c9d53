"""``quern train profile``: refusals in one line, traces from elsewhere, several ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from support.programs import python
from support.train import run_case
from support.train import trace_case as case


@pytest.fixture
def config(tmp_path: Path) -> Path:
    settings = run_case.settings(tmp_path / "run", run_case.write_corpus(tmp_path / "data"), steps=8)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    return tmp_path / "c.yaml"


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["train", "profile", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.mark.slow
def test_what_cannot_be_profiled_is_refused_in_one_line(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "CONFIG: expected the YAML file of a training run, or --trace FILE" in refused()
    assert "--trace: expected no CONFIG beside it" in refused(config, "--trace", "t.json")
    assert "steps: expected at least 9" in refused(config, "--steps", 5, "--out", out)
    assert "makes 3 ranks, but 2 were started" in refused(config, "parallel.dp_shard=3", "--nproc", 2, "--out", out)
    assert "modle: unknown key" in refused(config, "modle.dim=3", "--out", out)
    assert not out.exists()
    assert not (tmp_path / "run").exists()


def test_an_odd_trace_is_refused_in_one_line(tmp_path: Path) -> None:
    path = case.write(tmp_path / "t.json", [case.op("aten::mul", 0, 1) | {"dur": "long"}])
    assert refused("--trace", path) == f"error: {path}: traceEvents[0].dur: expected microseconds, got 'long'"
    good = case.write(tmp_path / "u.json", case.on_a_gpu(), rank=1)
    assert "--trace: expected one trace a rank, got 2 of rank 1" in refused("--trace", good, "--trace", good)


def test_a_trace_from_elsewhere(tmp_path: Path) -> None:
    path = case.write(tmp_path / "t.json", case.on_a_gpu())
    done = CliRunner().invoke(app, ["train", "profile", "--trace", path])
    assert done.exit_code == 0, done.output
    rows = {line[:28].strip(): line[28:].split() for line in done.stdout.splitlines()}
    assert rows["GEMM"] == ["0.0", "ms", "18.2%"]  # 30 of 165 µs
    assert rows["communication, exposed"][-1] == "9.1%"
    assert rows["sum"] == ["0.1", "ms", "100.0%"]
    assert "1. " in done.stdout


def test_the_slowest_rank_is_the_one_at_work_the_longest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 multiplies for 8 µs of 10, on which ranks 0 and 2 wait."""
    paths = []
    for rank, busy in enumerate((3, 8, 2)):
        rows = [case.mark("ProfilerStep#0", 0, 10), case.op("aten::mul", 0, busy), case.mark("gloo:all_reduce", 0, 10)]
        paths += ["--trace", case.write(tmp_path / f"{rank}.json", rows, rank=rank)]
    done = CliRunner().invoke(app, ["train", "profile", *paths, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(capfd.readouterr().out)
    assert result["slowest"] == 1
    assert result["own_s"] == pytest.approx({"0": 3e-6, "1": 8e-6, "2": 2e-6})
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    first = result["ranks"][0]
    assert first["losses"][0]["what"] == "exposed all-reduce (30% of it is hidden)"
    assert first["losses"][0]["s"] == pytest.approx(7e-6)


@pytest.mark.long
def test_two_ranks(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [python(), "-m", "quern.cli.main", "train", "profile", str(config), "parallel.dp_shard=2", "--nproc", "2",
         "--steps", "1", "--warm-up", "1", "--out", str(out), "--json"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["world"] == 2
    assert set(result["own_s"]) == {"0", "1"}
    kinds = {each["kind"] for each in result["ranks"][0]["communication"]["collectives"]}
    assert {"all-gather", "all-reduce"} <= kinds
    for rank in result["ranks"]:
        assert rank["classes"]["communication"]["s"] > 0
        assert sum(part["share"] for part in rank["classes"].values()) == pytest.approx(1)
    assert sorted(path.name for path in out.iterdir()) == ["profile.json", "trace_rank0.json", "trace_rank1.json"]
    assert not (tmp_path / "run").exists()
