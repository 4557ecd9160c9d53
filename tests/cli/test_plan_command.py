"""``quern plan``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.config import load_config
from quern.planner.hardware import load_hardware
from quern.train.config import TrainConfig
from support.train.command_case import said

SMALL = ("--model", "llama3-8b", "--gpus", "8", "--fix", "pp=1", "--fix", "cp=1", "--fix", "tp=1")


def planned(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_plan_says_layout_memory_time_and_cost(capfd: pytest.CaptureFixture[str]) -> None:
    shown = planned(*SMALL, "--tokens", "1T", "--price", "2")
    assert shown.exit_code == 0, shown.output
    told = json.loads(said(capfd, "plan", *SMALL, "--tokens", "1T", "--price", "2", "--json"))
    best, run = told["best"], told["run"]
    assert sum(best["memory"]["components"].values()) == best["memory"]["needs"] <= best["memory"]["has"]
    assert sum(best["time"]["parts"].values()) == pytest.approx(best["time"]["seconds"])
    assert run["gpu_hours"] == pytest.approx(run["days"] * 24 * 8)
    assert run["dollars"] == pytest.approx(2 * run["gpu_hours"])
    assert run["steps"] * 512 * 8192 >= 1e12 > (run["steps"] - 1) * 512 * 8192
    assert f"{run['gpu_hours']:,.0f} GPU-hours" in shown.output
    # 419 failures in 54 days on 16,384 GPUs; Young's first-order waste of 10 s saves and 300 s restarts
    assert run["mtbf_hours"] == pytest.approx(54 * 24 * 16_384 / 419 / 8)
    mtbf = 3600 * run["mtbf_hours"]
    assert run["save_interval_s"] == pytest.approx((2 * 10 * mtbf) ** 0.5, rel=0.01)
    assert run["waste"] == pytest.approx((2 * 10 / mtbf) ** 0.5 + 300 / mtbf, rel=0.02)
    assert run["days_with_failures"] * (1 - run["waste"]) == pytest.approx(run["days"], rel=1e-12)
    assert "Take dp_shard 8" in shown.output
    for reason in told["reasons"]:
        assert reason["why"] in shown.output

    for other in told["same"]:
        assert other["why"] in shown.output
    # AdamW's two moments of 8.03 B parameters on 8 ranks, two bytes less each
    assert f"optimizer.moments bf16: is as fast, with {2 * 2 * 8_030_261_248 / 8 / 2**30:.1f} GiB less" in shown.output


def test_what_does_not_fit_is_said_with_what_would_and_ends_in_1(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "llama3-70b", "--gpus", "8", "--fix", "tp=8", "--fix", "micro_batch=1")
    shown = planned(*arguments)
    assert shown.exit_code == 1
    assert "does not fit: tp 8, micro_batch 1, checkpointing full comes closest, and is short by" in shown.output
    capfd.readouterr()
    assert planned(*arguments, "--json").exit_code == 1
    found = json.loads(capfd.readouterr().out)["try"]
    assert found[0]["what"] == "optimizer.state: host"
    assert "16 GPUs" in [one["what"] for one in found]
    for one in found:
        assert f"fits: {one['why']}" in shown.output
    settled = planned(*arguments, "--fix", "host_state=true")
    assert settled.exit_code == 0
    assert planned(*arguments[:3], "16", *arguments[4:]).exit_code == 0


def test_what_a_plan_has_already_is_not_told_as_a_change(capfd: pytest.CaptureFixture[str]) -> None:
    def changes(*more: str) -> list[str]:
        told = json.loads(said(capfd, "plan", *SMALL, *more, "--json"))["same"]
        return [one["why"].partition(":")[0] for one in told]

    everything = ["float8.recipe rowwise", "optimizer.moments bf16", "optimizer.state host", "compile.enabled false"]
    assert changes() == everything
    assert changes("--float8", "blockwise", "--moments", "bf16") == everything[2:]
    assert changes("--gpu", "a100", "--eager", "--fix", "host_state=true") == ["optimizer.moments bf16"]


def test_undominated_layouts_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    told = json.loads(said(capfd, "plan", *SMALL, "--pareto", "--json"))["layouts"]
    assert len(told) > 2
    times, sizes = ([one[part][key] for one in told] for part, key in (("time", "seconds"), ("memory", "needs")))
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    two = json.loads(said(capfd, "plan", *SMALL, "--pareto", "--top", "2", "--json"))["layouts"]
    assert two == told[:2]


def test_the_config_that_is_written_is_the_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    assert planned(*SMALL, "--emit", str(path)).exit_code == 0
    told = json.loads(said(capfd, "plan", *SMALL, "--json"))
    written = yaml.safe_load(path.read_text())
    assert written == {"model": {"preset": "llama3-8b"}} | told["best"]["config"]
    more = ["run_dir=x", "steps=9000", f"data={json.dumps([{'path': 'y', 'weight': 1}])}"]
    config = load_config(str(path), TrainConfig, more)
    assert config.parallel.dp_shard == 8
    assert "exists; expected a new file" in planned(*SMALL, "--emit", str(path)).stderr
    same = json.loads(said(capfd, "plan", "check", str(path), *more, "--nproc", "8", "--json"))
    assert same["memory"]["components"] == told["best"]["memory"]["components"]
    assert same["time"] == told["best"]["time"]


QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 25_600, "num_attention_heads": 64, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "vocab_size": 151_936,
}  # fmt: skip


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_of_transformers_is_planned(tmp_path: Path, capfd: pytest.CaptureFixture[str], whole: bool) -> None:
    """Of its file, and of the folder that has it. 32.8 B parameters by the model's card."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    path = tmp_path / "config.json" if whole else tmp_path
    out = tmp_path / "plan.yaml"
    fixed = ("--gpus", 64, "--fix", "pp=1", "--fix", "cp=1", "--fix", "tp=2", "--fix", "dp_shard=32")
    told = json.loads(said(capfd, "plan", "--model", path, *fixed, "--emit", out, "--json"))
    assert told["model"]["parameters"] == pytest.approx(32.8e9, rel=2e-3)
    assert told["model"]["vocab_size"] == 151_936
    config = load_config(str(out), TrainConfig, ["run_dir=x", "steps=9", "data=[{path: y}]"])
    again = json.loads(said(capfd, "plan", "--model", out, *fixed, "--vocab-size", 151_936, "--json"))
    assert again["model"] == told["model"]
    assert again["best"] == told["best"]
    assert config.model.shape(151_936).num_parameters == told["model"]["parameters"]
    smaller = json.loads(said(capfd, "plan", "--model", path, *fixed, "--vocab-size", 1936, "--json"))
    assert told["model"]["parameters"] - smaller["model"]["parameters"] == 2 * 150_000 * 5120


def test_a_preset_is_one_whatever_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "debug").mkdir()
    monkeypatch.chdir(tmp_path)
    assert json.loads(said(capfd, "plan", "--model", "debug", "--gpus", 1, "--json"))["model"]["dim"] == 256


def test_clusters_are_compared(capfd: pytest.CaptureFixture[str]) -> None:
    """Each as it is planned alone; where nothing fits that is said of it, and of all it ends in 1."""
    few, fixed = ("--model", "llama3-8b", "--tokens", "1T"), ("--fix", "pp=1", "--fix", "cp=1", "--fix", "tp=1")
    several = ("--gpus", 1, "--gpus", 8, "--gpu", "h100", "--gpu", "b200")
    found = json.loads(said(capfd, "plan", *few, *fixed, *several, "--json"))["clusters"]
    assert [(one["gpus"], one["gpu"], one["fits"]) for one in found] == [
        (1, "h100", False), (8, "h100", True), (1, "b200", True), (8, "b200", True),
    ]  # fmt: skip
    shown = planned(*few, *fixed, *map(str, several)).output
    assert "short by" in shown
    for one in found[1:]:
        alone = json.loads(said(capfd, "plan", *few, *fixed, "--gpus", one["gpus"], "--gpu", one["gpu"], "--json"))
        assert one["run"] == alone["run"]
        assert one["best"] == {name: alone["best"][name] for name in one["best"]}
        assert f"{one['run']['dollars']:,.0f}" in shown
    short = planned(*few, *fixed, "--gpus", "1", "--gpu", "h100", "--gpu", "a100")
    assert short.exit_code == 1
    assert short.output.count("short by") == 2


def test_a_check_of_what_does_not_fit_ends_in_1(tmp_path: Path) -> None:
    profile = tmp_path / "small.yaml"
    profile.write_text(yaml.safe_dump(load_hardware("h100").model_dump(mode="json") | {"memory_gib": 20}))
    arguments = ["plan", "check", "configs/llama3-8b.yaml", "--gpu", str(profile)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 1
    assert "does not fit: short by" in shown.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "gpt5"), "--model: preset: expected one of 'debug'"),
        (("--model", "pyproject.yaml"), "pyproject.yaml: no such config file"),
        (("--model", "configs/none.json"), "configs/none.json: no such file"),
        (("--model", "configs/books.yaml"), "configs/books.yaml: model: (top level): expected a mapping"),
        (("--model", "debug", "--gpus", "1", "--gpus", "2", "--pareto"), "--emit: expected one cluster, got 2"),
        (("--model", "debug", "--gpu", "h101"), "--gpu: expected one of h100, "),
        (("--model", "debug", "--fix", "tp"), "--fix: expected key=value with one of checkpointing"),
        (("--model", "debug", "--fix", "tp=two"), "--fix: tp: expected a whole number above 0, got 'two'"),
        (
            ("--model", "debug", "--fix", "micro_batch=0"),
            "--fix: micro_batch: expected a whole number above 0, got '0'",
        ),
        (("--model", "debug", "--fix", "cp=null"), "--fix: cp: expected a whole number above 0, got 'null'"),
        (("--model", "debug", "--fix", "zero=true"), "--fix: zero: expected null, 1, 2, got 'true'"),
        (("--model", "debug", "--fix", "checkpointing=some"), "expected none, selective, full, got 'some'"),
        (("--model", "debug", "--gpu", "a100", "--float8", "rowwise"), "has no FP8 products"),
        (("--model", "debug", "--batch", "1000"), "--batch: expected a multiple of --seq-len (8,192 tokens), got 1000"),
        (("--model", "debug", "--tokens", "many"), "--tokens: expected a number above 0, as 15T or 3e9, got 'many'"),
        (("--model", "debug", "--fix", "tp=3"), "no layout of 8 GPUs takes 512 sequences of 8,192 tokens a step"),
        (("--model", "debug", "--float8", "e8"), "--float8: expected one of tensorwise, rowwise, blockwise, got 'e8'"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], complaint: str) -> None:
    shown = planned(*arguments)
    assert shown.exit_code == 2
    assert complaint in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_a_check_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["plan", "check", "configs/llama3-8b.yaml", "parallel.tp=3", "--nproc", "12"])
    assert shown.exit_code == 2
    assert "parallel.tp: expected a divisor" in shown.stderr
