"""``quern bench``: refusals in one line, the document alone on stdout, the same under torchrun, and no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from support.programs import python
from support.waits import until

SMALL = (
    "device=cpu", "model.dim=64", "model.ffn_dim=128", "model.num_heads=2", "model.num_kv_heads=1", "--model", "debug",
    "--layers", "1", "--vocab-size", "512", "--seq-len", "32", "--steps", "2", "--warm-up", "1",
)  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def quern(*arguments: str) -> list[str]:
    return [python(), "-m", "quern.cli.main", "bench", *arguments]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "error: expected a CONFIG or --model: one of debug, "),
        (("--model", "debug", "--steps", "none"), "error: --steps: expected an integer ≥ 1, got 'none'"),
        (("steps=4", "--model", "debug"), "error: override steps: is the benchmark's own"),
        (
            ("--model", "debug", "z_loss=1"),
            "error: --model: expected debug, 125M, 1B, llama3-8b, llama3-70b, llama3-405b, mixtral-8x7b, "
            "qwen3-30b-a3b, olmoe-1b-7b, got 'z_loss=1'; CONFIG and key=value stand before the options",
        ),
        (("none.yaml",), "error: none.yaml: no such config file"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: tuple[str, ...], expected: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(expected)


def test_ranks_of_a_launcher_and_own_ones_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(app, ["bench", "--model", "debug", "--nproc", "2"])
    assert result.exit_code == 2
    assert "--nproc: the launcher has started the ranks already" in result.stderr


def test_help_is_that_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    for option in ("--model", "--layout", "--precision", "--nproc", "--out", "--peak-tflops", "torchrun"):
        assert option in result.stdout


@pytest.mark.slow
def test_the_document_stands_alone_on_stdout() -> None:
    done = subprocess.run(quern(*SMALL, "--json"), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["rows"]
    assert row["ok"]
    assert row["mfu_full"] is None
    assert document["command"] == ["quern", "bench", *SMALL, "--json"]
    assert document["format"] == 1


#: Kills one rank of the third row as it starts: the other one waits for it, until it hears of it.
KILLS = """\
import os, signal, sys
if os.environ.get("RANK") == "1" and sys.orig_argv[-1].endswith("row-002"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_the_same_command_under_torchrun(tmp_path: Path) -> None:
    """Rows one after the other under the same launcher; what fails, refused or killed, is its own error alone."""
    out = tmp_path / "o.json"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text(KILLS)
    layouts = ("--layout", "tp=2", "tp=2 async_tp=true", "dp_replicate=2", "")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "quern.train.bench", *SMALL,
        "--out", str(out), *layouts,
    ]  # fmt: skip
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    document = json.loads(out.read_text())
    assert [row["ok"] for row in document["rows"]] == [True, False, False, True], document["rows"]
    assert document["rows"][1]["error"].startswith("parallel.async_tp: is a pass of torch.compile")
    assert document["rows"][2]["error"] == "rank 1: was ended by SIGKILL"
    assert [row["layout_text"] for row in document["rows"] if row["ok"]] == ["tp 2", "dp_shard 2"]
    assert document["world"] == document["machine"]["world"] == 2
    assert done.stdout.count("tokens/s") == 1  # one rank prints the table
    assert "dp_shard 2" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_command(number: signal.Signals, tmp_path: Path) -> None:
    many = [word if word != "2" or SMALL[place - 1] != "--steps" else "100000" for place, word in enumerate(SMALL)]
    command = [sys.executable, *quern(*many, "--nproc", "2", "--scratch", str(tmp_path))[1:]]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: list(tmp_path.glob("*/row-000/run/metrics.jsonl")), 200)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.send_signal(number)
    assert process.wait(60) in (128 + number, -number)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 60)
