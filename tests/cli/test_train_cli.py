"""``quern train``: plans of runs and layouts, and what is refused."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.model.config import ModelConfig
from quern.model.hf import expected_tensors
from quern.parallel.planning import schedules
from quern.planner.hardware import load_hardware
from quern.train.checkpoint.tools.reader import write_weights
from support.train import corpora
from support.train.command_case import quern, refused, said, write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.mark.slow
def test_a_dry_run_shows_the_shape_of_the_checkpoint_it_would_begin_with(
    config: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shape = ModelConfig(num_layers=2, dim=24, num_heads=2, ffn_dim=40).shape(300)
    weights = {name: torch.zeros(size) for name, size in expected_tensors(shape).items()}
    write_weights(str(tmp_path / "w"), shape, weights)
    keys = f"init_from={tmp_path / 'w'}", "model={}"
    summary = json.loads(said(capfd, "train", config, *keys, "--dry-run", "--json"))
    assert {name: summary["model"][name] for name in shape.model_dump()} == shape.model_dump()
    assert summary["init_from"] == str(tmp_path / "w")
    printed = CliRunner().invoke(app, ["train", str(config), *keys, "--dry-run", "--config"])
    assert yaml.safe_load(printed.stdout)["model"]["ffn_dim"] == 40
    assert f"a fresh run begins with those of {tmp_path / 'w'}" in printed.stderr
    assert not (tmp_path / "run").exists()


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
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert summary["layout"]["axes"] == axes
    assert summary["layout"]["coordinates"] == [dict.fromkeys(axes, 0), dict.fromkeys(axes, 0) | {"dp_shard": 1}]
    assert summary["pipeline"] is None
    assert summary["order"]["samples"] == 24
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("modle.dim=3",), "modle: unknown key; did you mean 'model'?"),
        (("parallel.ep=2",), "parallel.ep: expected a divisor of the ranks of dp_shard × cp (1)"),
        (("parallel.ep_node=2",), "parallel: ep_node: expected a size between 1 and ep (1) that divides it: null"),
        (("parallel.ep_float8=true",), "parallel: ep_float8: changes nothing where no token travels to experts"),
        (("parallel.cp_method=ring",), "parallel: cp_method: changes nothing without context parallelism"),
        (("parallel.ulysses=2",), "parallel: ulysses: changes nothing without context parallelism"),
        (
            ("parallel.cp=4", "parallel.cp_method=usp"),
            "ulysses: expected a size between 1 and cp (4) that divides it with cp_method usp: 2; got null",
        ),
        (
            ("parallel.cp=3", "parallel.cp_method=usp", "parallel.ulysses=3"),
            "that divides it with cp_method usp: another cp_method, as there is none; got 3",
        ),
        (
            ("parallel.cp=2", "parallel.cp_method=ring", "parallel.ulysses=2"),
            "ulysses: is of cp_method usp; expected null with ring, got 2",
        ),
        (
            ("parallel.zero=2", "parallel.reshard_after_forward=true"),
            "zero: give it or reshard_after_forward, which it implies (3: true, 2 and 1: false); expected "
            "reshard_after_forward=null with zero 2",
        ),
        (
            ("parallel.zero=3", "parallel.pp=2"),
            "zero: a pipeline keeps gradients whole until its last micro-batch, which is 1; expected 1 with pp 2, or "
            "null, where reshard_after_forward says whether it keeps weights too, got 3",
        ),
        (("parallel.zero=1",), "parallel.zero: changes nothing where FSDP2 shards no weights"),
        (("model.num_heads=3",), "num_heads: expected a divisor of dim (16)"),
        (("seq_len=3000",), "has 2444 tokens; seq_len 3000 needs 3001 or more"),
        (
            ("global_batch=5", "micro_batch=2"),
            "global_batch: expected a multiple of 2 (1 data-parallel rank × micro_batch 2), got 5",
        ),
        (("schedule.warmup=9",), "schedule.warmup: expected at most steps (6), got 9"),
        (("data.0.max_epochs=0.1",), "beyond max_epochs 0.1"),
        (("parallel.dp_shard=3", "--nproc", "2"), "makes 3 ranks, but 2 were started"),
        (("data_skip=2",), "data_skip: expected only together with resume.step"),
        (("attention=varlen",), "attention: varlen runs on CUDA only; expected auto or sdpa on cpu"),
        (("attention=varlen", "device=auto"), "attention: varlen computes in bf16 or fp16"),
        (("init_from=nothere",), "init_from: nothere: expected a checkpoint"),
        (("resume.step=3",), "checkpoints: has no checkpoint of step 3 (there are: none)"),
        (("nope=1",), "nope: unknown key; known keys: activation_checkpointing, activation_checkpointing_layers, "),
        (("--nproc", "0"), "--nproc: expected 1 rank or more, got 0"),
        (("--spares", "1"), "--spares: expected 0 or more, with --max-restarts, and"),
        (("--max-restarts", "1", "--spares", "-1"), "--spares: expected 0 or more, with --max-restarts, and"),
        (("--json",), "--json: expected together with --dry-run"),
        (("--config",), "--config, --assume-tokens and --gpu: expected together with --dry-run"),
        (("--assume-tokens", "1e3"), "--config, --assume-tokens and --gpu: expected together with --dry-run"),
        (("--gpu", "h100"), "--config, --assume-tokens and --gpu: expected together with --dry-run"),
        (("--gpu", "h101", "--dry-run"), "--gpu: expected one of h100, "),
        (("--assume-tokens", "10", "--dry-run"), "source web has 10 tokens; expected at least"),
    ],
)
def test_a_config_that_cannot_train_is_refused_in_one_line(
    config: Path, arguments: tuple[str, ...], expected: str
) -> None:
    dry = () if {"--json", "--config", "--assume-tokens", "--gpu"} & {*arguments} else ("--dry-run",)
    assert expected in refused("train", config, *arguments, *dry)
    assert not (config.parent / "run").exists()


def test_spares_that_no_one_could_use_are_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "train", config, "device=auto", "--nproc", 3, "--max-restarts", 1, "parallel.dp_shard=3", "global_batch=6"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    most = "--spares: expected at most 1, as --nproc is 3 and there are 4 GPUs, got 2"
    assert most in refused(*command, "--spares", 2)
    monkeypatch.setenv("RANK", "0")
    assert "and 0 where another launcher has started the ranks, got 1" in refused(*command, "--spares", 1)
    assert not (config.parent / "run").exists()


@pytest.mark.slow
def test_the_config_of_a_run_that_was_moved_begins_no_other_run(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run_dir is relative here, as it often is."""
    monkeypatch.chdir(config.parent)
    done = quern("train", config, "run_dir=run")
    assert done.returncode == 0, done.stderr
    goes_on = "it is complete at step 6, nothing to do"
    for path in ("run/config.yaml", f"{config.parent}/run/config.yaml"):
        assert goes_on in CliRunner().invoke(app, ["train", path, "--dry-run"]).stdout
    os.rename("run", "moved")
    told = refused("train", "moved/config.yaml", "--dry-run")
    assert told == refused("train", "moved/config.yaml")
    assert (
        f"moved/config.yaml: lies in the training run {config.parent}/moved, and its run_dir, run, is another" in told
    )
    assert not Path("run").exists()
    (command,) = re.findall("run_dir=[^ ]*/moved", told)
    assert goes_on in CliRunner().invoke(app, ["train", "moved/config.yaml", command, "--dry-run"]).stdout
    shutil.copy("moved/config.yaml", "moved/mine.yaml")
    for path in ("moved/mine.yaml", "moved/checkpoints/step_00000003/config.yaml"):
        assert CliRunner().invoke(app, ["train", path, "--dry-run"]).exit_code == 0


@pytest.mark.slow
def test_a_dry_run_says_from_where_a_run_would_go_on(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = quern("train", config, "checkpoint.interval=2", "checkpoint.keep_last=9", "checkpoint.mode=sync")
    assert done.returncode == 0, done.stderr
    folder = config.parent / "run" / "checkpoints"
    before = sorted(path.name for path in config.parent.rglob("*"))
    for keys, told in (
        ((), "goes on        it is complete at step 6, nothing to do"),
        (("steps=8",), f"goes on        from step 6, data step 6: {folder}/step_00000006"),
        (("steps=8", "init_from=nothere"), f"goes on        from step 6, data step 6: {folder}/step_00000006"),
        (("resume.step=2", "data_skip=1"), f"goes on        back to step 2, data step 3: {folder}/step_00000002"),
        (("resume.step=good", "guard.health_window=4"), f"goes on        back to step 2, data step 2: {folder}/"),
    ):
        result = CliRunner().invoke(app, ["train", str(config), "--dry-run", *keys])
        assert result.exit_code == 0, result.output
        assert told in result.stdout
        assert "weights  " not in result.stdout
    for keys, told in (
        ("resume.step=3", "checkpoints: has no checkpoint of step 3 (there are: 2, 4, 6)"),
        ("resume.step=good", "resume.step: no checkpoint is good yet"),
        ("steps=5", "steps: expected at least 6"),
        ("seed=5", "seed: the run in "),
    ):
        assert told in refused("train", config, "--dry-run", keys)
    (folder / "step_00000006" / "manifest.json").write_text("{}")
    summary = json.loads(said(capfd, "train", config, "--dry-run", "--json"))
    assert summary["goes_on"] == {
        "kind": "resume", "step": 4, "data_step": 4, "checkpoint": str(folder / "step_00000004")
    }  # fmt: skip
    assert summary["init_from"] is None
    assert sorted(path.name for path in config.parent.rglob("*")) == before


def test_a_dry_run_without_the_data_plans_as_one_with_data_of_that_size(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = "seq_len=47"  # of which the tokens are a multiple: the last of them is a target alone
    real = json.loads(said(capfd, "train", config, whole, "--dry-run", "--json", "--nproc", 2))
    tokens = real["order"]["sources"][0]["tokens"]
    assert tokens % 47 == 0
    shutil.rmtree(config.parent / "data")
    assumed = ("--assume-tokens", tokens, "--vocab-size", 300)
    plan = json.loads(said(capfd, "train", config, whole, "--dry-run", "--json", "--nproc", 2, *assumed))
    assert plan["corpus"]["fingerprint"] is None
    for found in (real, plan):
        del found["corpus"], found["order"]["order"]
        for row in found["order"]["sources"]:
            del row["ident"]
    assert plan == real
    printed = CliRunner().invoke(app, ["train", str(config), "--dry-run", *map(str, assumed)]).stdout
    assert "order          that of the data, which is assumed" in printed
    assert re.search(r"peak memory +\S+ \S+ of tensors a rank: ", printed)
    assert not (config.parent / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [True, False])
def test_a_dry_run_on_a_profile_plans_what_plan_check_does(
    config: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, pipeline: bool
) -> None:
    """On a GPU, although the config names the CPU. The second has too little memory."""
    profile = tmp_path / "small.yaml"
    profile.write_text(yaml.safe_dump(load_hardware("a100").model_dump(mode="json") | {"memory_gib": 0.5}))
    layout = ("model.num_layers=2", "parallel.pp=2", "parallel.dp_shard=1") if pipeline else ()
    both = config, *layout, "--nproc", "2"
    planned = *both, "--gpu", "h100" if pipeline else profile
    told = json.loads(said(capfd, "train", *planned, "--dry-run", "--json"))
    check = ["plan", "check", *map(str, planned), "--vocab-size", str(told["model"]["vocab_size"])]
    assert CliRunner().invoke(app, [*check, "--json"]).exit_code == (not pipeline)
    assert told["planned"] == json.loads(capfd.readouterr().out)
    assert told["planned"]["fits"] is pipeline
    printed = CliRunner().invoke(app, ["train", *map(str, planned), "--dry-run"])
    assert printed.exit_code == 0
    assert "plan check" not in printed.stdout
    assert f"planned on 2 × {told['planned']['hardware']}\n" in printed.stdout
    assert printed.stdout.endswith(CliRunner().invoke(app, check).stdout)
    assert ("does not fit: short by" in printed.stdout) is not pipeline
    without = json.loads(said(capfd, "train", *both, "--dry-run", "--json"))
    assert without == {key: value for key, value in told.items() if key != "planned"}


def test_a_dry_run_of_a_small_model_tells_its_sizes(config: Path) -> None:
    path = yaml.safe_load(config.read_text())["data"][0]["path"]
    shards = corpora.make_shards(random.Random(6), [[400]])
    (twin,) = corpora.write_run(config.parent / "other", {"web": shards}, run_id="r2")
    sources = f"data=[{{path: {path}, max_epochs: 9}}, {{path: {twin}, max_epochs: 9, weight: 0}}]"
    told = CliRunner().invoke(app, ["train", str(config), "--dry-run", sources])
    assert re.search(r"^model state +\d+\.\d KiB at 16 bytes", told.stdout, re.MULTILINE), told.output
    assert re.search(r"^a checkpoint +\d+\.\d KiB; to copy it, \d", told.stdout, re.MULTILINE)
    assert f"  {path} 100.00%, " in told.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("parallel.tp=4 --nproc 4",
         "parallel.tp: expected a divisor of model.num_heads (2), got 4; tp 1 or 2 would fit"),
        ("parallel.tp=2 seq_len=31 --nproc 2",
         "parallel.tp: expected a divisor of seq_len (31), got 2; tp 1 would fit, or seq_len 30 or 32"),
        ("parallel.tp=2 parallel.nvlink_domain=1 --nproc 2", "parallel.tp: a group of 2 ranks reaches beyond"),
        ("parallel.nvlink_domain=8", "parallel.nvlink_domain: changes nothing without tensor parallelism"),
        ("parallel.tp=2 parallel.async_tp=true --nproc 2", "parallel.async_tp: is a pass of torch.compile"),
        ("parallel.tp=2 parallel.async_tp=true compile.enabled=true --nproc 2", "parallel.async_tp: runs on CUDA only"),
        ("parallel.tp=2 parallel.tp_pieces=3 --nproc 2",
         "parallel.tp_pieces: expected a divisor of a rank's tokens (seq_len"),
        ("parallel.pp=2 --nproc 2",
         "parallel.pp: 2 ranks × 1 stages a rank (1f1b) need 2 layers or more, model.num_layers is 1"),
        ("parallel.schedule=gpipe", "parallel.schedule: changes nothing without a pipeline"),
        ("parallel.pp=2 model.num_layers=4 parallel.stage_layers=[1,2] --nproc 2",
         "parallel.stage_layers: expected 2 numbers ≥ 1 (one a stage) that add up to 4 layers, got 2 that add up to 3"),
        ("parallel.pp=4 model.num_layers=4 global_batch=2 --nproc 4",
         "global_batch: 2 sequences are 2 micro-batches a rank (1 data-parallel × micro_batch 1); schedule 1f1b with "
         "pp 4: expected 4 micro-batches or more, one for every stage, got 2; global_batch 4 would fit"),
        ("parallel.pp=2 model.num_layers=4 parallel.schedule=dualpipe_v activation_checkpointing=full --nproc 2",
         "activation_checkpointing: schedule dualpipe_v"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused_before_a_process_starts(
    config: Path, arguments: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(schedules, "version", {"torch": "2.13.0"}.__getitem__)  # 2.11 refuses some besides
    assert expected in refused("train", config, *arguments.split())


def planned(config: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """What a dry run says of a layout, and that it starts nothing."""
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", None)
        patched.setattr(schedules, "version", {"torch": "2.13.0"}.__getitem__)
        result = CliRunner().invoke(app, ["train", str(config), "--dry-run", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert not (config.parent / "run").exists()
    assert result.stderr == ""
    return result.stdout


def test_the_rate_of_the_last_step_is_told(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("steps=48", "optimizer.lr=3.0e-3", "schedule={kind: wsd, warmup: 2, decay: 0.5, final: 0.1}")
    rate = json.loads(said(capfd, "train", config, *keys, "--dry-run", "--json"))["learning_rate"]
    # a straight line from 3e-3 at step 24 to 3e-4 at step 48; the last step is 47
    assert rate == {"peak": 3e-3, "last_step": pytest.approx(3e-3 - 23 * (3e-3 - 3e-4) / 24)}
    assert "learning rate  0.003, wsd; 0.0004125 in the last step" in planned(config, monkeypatch, *keys)


BIG = ("model={preset: llama3-70b}", "precision=bf16", "data.0.max_epochs=1e9", "global_batch=512", "device=cuda")


@pytest.mark.slow
def test_a_layout_of_any_size_is_planned_by_one_process(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = "parallel={tp: 4, pp: 8, schedule: interleaved_1f1b, stages_per_rank: 2, dp_replicate: 2}"
    summary = json.loads(said(capfd, "train", config, *BIG, keys, "--nproc", 256, "--dry-run", "--json"))
    assert summary["layout"]["axes"] == {"pp": 8, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 4}
    assert summary["layout"]["coordinates"] is None
    stages = summary["pipeline"]["stages"]
    assert [row["pp"] for row in stages] == [*range(8), *range(8)]
    assert [row["num_layers"] for row in stages] == [5] * 16
    assert sum(row["cost_share"] for row in stages) == pytest.approx(1)
    assert summary["pipeline"]["micro_batches"] == 512 // 8
    # (pp - 1) / (stages a rank · micro-batches) of useful time
    assert summary["pipeline"]["bubble_of_equal_stages"] == pytest.approx(7 / 2 / 64 / (1 + 7 / 2 / 64), abs=2e-3)
    # the first rank has two stages, which receive hidden states once and gradients twice, each [1, 32 / 4, 8192]
    assert summary["peak_memory"]["pp"] == 0
    assert summary["peak_memory"]["components"]["pipeline buffers"] == 3 * 64 * 8 * 8192 * 2
    by_pp = summary["communication"]
    assert [place["pp"] for place in by_pp] == list(range(8))
    for place in by_pp:
        assert place["sent"] == sum(row["sent"] for row in place["rows"])
        assert all(isinstance(row[name], int) for row in place["rows"] for name in ("calls", "payload", "sent"))
    assert {row["axis"] for row in by_pp[3]["rows"]} == {"pp", "dp_replicate", "dp_shard", "tp"}
    # a rank in the middle: ten blocks, but that every rank of tp holds all norms
    norms = 10 * 2 * 8192
    block = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28_672 * 8192
    middle = (10 * block / 4 + norms) / 4
    assert summary["state_memory_gib"]["rank"] > 16 * middle / 2**30
    assert summary["state_memory_gib"]["rank"] == pytest.approx(16 * middle / 2**30, rel=1e-3)


@pytest.mark.slow
def test_what_a_dry_run_prints_of_a_layout(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = "parallel={tp: 2, pp: 2, schedule: zbv_zero_bubble, dp_shard: 2}"
    said = planned(config, monkeypatch, keys, "model.num_layers=5", "global_batch=16", "--nproc", 8)
    for line in (
        r"layout +8 ranks: pp 2 × dp_shard 2 × tp 2", r"rank +pp +dp_shard +tp", r" +6 +1 +1 +0", r"stage +pp +layers",
        r" +3 +0 +4 +\d+\.\d% +[\d,]+", r"zbv_zero_bubble, 8 micro-batches a step: ranks wait \d+\.\d%",
        r"tp +gather hidden +all-gather +2 +[\d,]+ +[\d.]+ kB", r"pp +send hidden +send +2 +8 +[\d.]+ kB",
        r"dp_shard +gather weights +all-gather +2 +\d+ ", r"all +[\d.]+ kB",
    ):  # fmt: skip
        assert re.search(f"^{line}", said, re.MULTILINE), f"{line}\n{said}"
    assert "…" not in said
    assert "communication" not in planned(config, monkeypatch)
    assert "ring" not in planned(config, monkeypatch)


def test_a_dry_run_says_what_is_on_the_host(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 bytes a parameter, 4 of gradients that go there; a checkpoint is what it was."""
    keys = "precision=bf16", "--dry-run", "--json", "parallel.dp_shard=1"
    device, host = (
        json.loads(said(capfd, "train", config, f"optimizer.state={at}", *keys)) for at in ("device", "host")
    )
    rows = host["parameters"]["total"] + 84 * 16  # 384 rows are held of 300
    assert device["host_state"] is None
    assert (host["host_state"]["host"], host["host_state"]["down"]) == (12 * rows, 4 * rows)
    assert host["state_memory_gib"]["rank"] * 2**30 == host["host_state"]["device"]
    assert host["checkpoint"] == device["checkpoint"]
    assert re.search(
        r"^on the host +a rank: \S+ \S+ of masters", planned(config, monkeypatch, "optimizer.state=host"), re.MULTILINE
    )


def test_a_dry_run_counts_moments_and_gradients_in_bf16(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In place of 4 bytes each: 4 + 2 · 2 + 2 of a parameter, 8 of them in a checkpoint, and half of what is summed. In
    one process 2 more are of weights that are kept cast, if they are."""
    keys = "precision=bf16", "--dry-run", "--json", "parallel.dp_shard=1"
    before = json.loads(said(capfd, "train", config, *keys))
    after = json.loads(said(capfd, "train", config, "optimizer={moments: bf16, gradients: bf16}", *keys))
    total, memory = before["parameters"]["total"], after["state_memory_gib"]
    assert memory["rank"] == pytest.approx(12 / 18 * before["state_memory_gib"]["rank"])
    per_use = json.loads(said(capfd, "train", config, "weights_cast=per_use", *keys))["state_memory_gib"]
    assert per_use["rank"] == pytest.approx(16 / 18 * before["state_memory_gib"]["rank"])
    assert memory["moments"] == memory["masters"] == 4 * total / 2**30
    assert memory["gradients"] == 2 * total / 2**30
    assert (before["checkpoint"]["bytes"], after["checkpoint"]["bytes"]) == (12 * total, 8 * total)


def test_a_dry_run_tells_the_stages_of_zero_apart(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of 8 micro-batches: what stays gathered and whole, and how often gradients are scattered."""
    held, calls = [], []
    keys = "global_batch=16", "micro_batch=1", "precision=bf16", "model.num_layers=3", "--nproc", 2, "--dry-run"
    for zero in (1, 2, 3):
        told = json.loads(said(capfd, "train", config, f"parallel.zero={zero}", *keys, "--json"))
        (rows,) = (place["rows"] for place in told["communication"])
        calls += [row["calls"] for row in rows if row["what"] == "sum gradients"]
        held.append(told["peak_memory"]["components"])
    assert calls == [4, 8 * 4, 8 * 4]  # three blocks, and the tied ends
    model, blocks = told["model"], told["parameters"]["blocks"]
    number = blocks + (model["padded_vocab_size"] + 1) * model["dim"]
    assert [one.get("whole gradients") for one in held] == [4 * number, None, None]
    gathered = [one["gathered weights"] for one in held]
    assert gathered[0] == gathered[1] == gathered[2] + 2 * blocks
    assert gathered[2] >= 2 * (number - blocks)  # and a block on the way
