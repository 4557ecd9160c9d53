"""What a run's page says was planned and measured, against ``quern plan check`` and readings of its files by json."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.errors import InputError
from quern.model.config import ModelConfig
from quern.planner.hardware import names, profile_of
from quern.train.report.history import open_run
from quern.train.summary import plan_of
from support.train.command_case import said
from support.train.report_case import EVIL, ORDER, SEQ_LEN, STEPS, Made, Page

pytestmark = pytest.mark.slow

VOCAB, H100 = 320, "NVIDIA H100 80GB HBM3"
MODEL = {"num_layers": 2, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 128}
#: As torch.cuda.get_device_name gives them.
DEVICES = {
    H100: "h100", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA B200": "b200", "NVIDIA GB200": "gb200-nvl72", "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
}  # fmt: skip
OTHERS = (
    "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe",
    "NVIDIA A100-PCIE-40GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20", "NVIDIA H800", "NVIDIA L40S",
    "NVIDIA B300 SXM6 AC", "AMD Instinct MI325X", "AMD Radeon Graphics", "NVIDIA", "", EVIL, None, 5, ["NVIDIA H200"],
)  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Its last attempt, of two ranks, has steps of 8 sequences from step 50 on."""
    made = Made(tmp_path / "run")
    for place, row in enumerate(row for row in made.rows if row["kind"] == "step"):
        row |= {"mfu_full": 0.4 + place / 1000, "mfu_causal": 0.3 + place / 1000}
        row["ranks"]["memory_gib"] = {"max": 2 + place / 1000}
        if row["attempt"] == 2 and row["step"] >= 50:
            row["tokens_per_s"] *= 2
    made.write()
    config = {
        "run_dir": str(made.path), "steps": STEPS, "data": [{"path": "y", "weight": 1}], "seq_len": SEQ_LEN,
        "global_batch": 4, "model": MODEL, "precision": "bf16", "parallel": {"dp_shard": 2},
        "schedule": {"warmup": 5}, "phases": [{"first_step": 50, "global_batch": 8}],
    }  # fmt: skip
    (made.path / "config.yaml").write_text(yaml.safe_dump(config))
    record(made)
    return made


def record(made: Made, **more: Any) -> None:
    model = ModelConfig(**MODEL).shape(VOCAB).model_dump(mode="json")
    told = {"kind": "train", "layout": {"pp": 1, "dp_shard": 2, "tp": 1}, "model": model}
    (made.path / "run.json").write_text(json.dumps(told | more))


def page(made: Made, *arguments: str) -> Page:
    out = made.path / "page.html"
    shown = CliRunner().invoke(app, ["train", "report", str(made.path), "--out", str(out), *arguments])
    assert shown.exit_code == 0, shown.output
    return Page(out.read_text())


def rows(page: Page) -> dict[str, list[str]]:
    return {name: cells for name, *cells in page.rows["planned"][1:]}


def test_planned_and_measured_stand_beside_each_other(made: Made, capfd: pytest.CaptureFixture[str]) -> None:
    record(made, device=H100)
    lines = [json.loads(line) for line in (made.path / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "step" and line["attempt"] == 2]
    assert [line["step"] for line in last] == list(range(40, 60))
    own = last[10:]  # steps of 8 sequences; the first 5 of the attempt are before them
    check = "plan", "check", made.path / "config.yaml", "global_batch=8", "--nproc", 2, "--vocab-size", VOCAB, "--json"
    plan = json.loads(said(capfd, *check, "--gpu", "h100"))
    time, parts, memory = plan["time"], plan["time"]["parts"], plan["memory"]["components"]
    assert parts["dp messages"] > 0
    tensors = sum(size for name, size in memory.items() if name not in ("allocator", "context and libraries"))
    median = {name: statistics.median(line[name] for line in own) for name in ("step_time_s", "mfu_full", "mfu_causal")}
    speed = statistics.median(2 * 64 / line["step_time_s"] for line in own) / 2
    shown = page(made)
    told = rows(shown)
    assert told["seconds a step"][:2] == [f"{time['seconds']:.3g}", f"{median['step_time_s']:.3g}"]
    assert told["seconds a step"][2] == f"{median['step_time_s'] / time['seconds']:,.2f}"
    assert told["of it waits for data"] == ["–", "0.125", "–"]
    assert told["of it waits for other ranks; dp messages"][:2] == [f"{parts['dp messages']:.3g}", "0.0625"]
    assert told["tokens a second and GPU"][:2] == [f"{time['tokens_per_gpu_s']:,.0f}", f"{speed:,.0f}"]
    for name, kind in (("all of the attention matrix", "mfu_full"), ("its causal half", "mfu_causal")):
        assert told[f"MFU, %, {name}"][:2] == [f"{100 * time[kind]:.2f}", f"{100 * median[kind]:.2f}"]
    most = max(line["ranks"]["memory_gib"]["max"] for line in own)
    assert told["memory of tensors, GiB"][:2] == [f"{tensors / 2**30:.2f}", f"{most:.2f}"]
    assert told["with what the device takes besides, GiB"] == [f"{plan['memory']['needs'] / 2**30:.2f}", "–", "–"]
    for name in ("products", "attention", "element-wise", "copies", "update"):
        assert told[f"of it {name}"] == [f"{parts[name]:.3g}", "–", "–"]
    assert f"the config of the last start on 2 ranks, {plan['hardware']}; " in shown.text
    assert "Config and layout of other attempts, which are not in it, may differ." in shown.text
    assert f"record names {H100}. Measured: medians of 10 steps of attempt 2, the last with steps," in shown.text
    assert rows(page(made, "--gpu", "a100")) != told
    made.fact("resume", step=STEPS, data_step=67, order=ORDER.hash)  # of a run that is complete
    made.write()
    again = page(made, "--gpu", "h100")
    assert rows(again) == told
    assert "no step" not in shown.text
    assert "The last start has completed no step, and may differ too." in again.text


@pytest.mark.parametrize("more", [{"device": "NVIDIA L40S"}, {"mfu": {"peak_flops_per_device": 362e12}}])
def test_without_a_profile_memory_alone_is_shown(
    made: Made, capfd: pytest.CaptureFixture[str], more: dict[str, Any]
) -> None:
    record(made, **more)
    dry = "--dry-run", "--json", "--assume-tokens", "1e6", "--vocab-size", VOCAB, "--nproc", 2
    given = "run_dir=elsewhere", "device=cuda", "global_batch=8"
    told = json.loads(said(capfd, "train", made.path / "config.yaml", *given, *dry))["peak_memory"]["components"]
    shown = page(made)
    assert [*rows(shown)] == ["memory of tensors, GiB"]
    assert rows(shown)["memory of tensors, GiB"][0] == f"{sum(told.values()) / 2**30:.2f}"
    assert "on 2 ranks, of a GPU without a profile; " in shown.text


def test_what_was_not_measured_or_cannot_be_planned_is_left_out(made: Made) -> None:
    """Memory of a process on a CPU is no tensors'; nor does a peak that was given tell of a GPU."""
    assert "planned" not in page(made).rows
    assert rows(page(made, "--gpu", "h200"))["memory of tensors, GiB"][1:] == ["–", "–"]
    record(made, mfu={"peak_flops_per_device": 1e12})
    assert "planned" in page(made).rows
    config = yaml.safe_load((made.path / "config.yaml").read_text())
    (made.path / "config.yaml").write_text(yaml.safe_dump(config | {"metrics": {"peak_tflops": 1.0}}))
    assert "planned" not in page(made).rows
    for broken in ({"layout": {"tp": EVIL}}, {"layout": None}, {"layout": {"dp_shard": 3}}, {"model": {"dim": 5}}):
        record(made, **({"device": H100} | broken))
        assert plan_of(open_run(str(made.path)), 128) is None
        with pytest.raises(InputError):
            plan_of(open_run(str(made.path)), 128, "h100")
    config["metrics"] = {"peak_tflops": None}
    (made.path / "config.yaml").write_text(yaml.safe_dump(config))
    record(made, device=H100)
    assert plan_of(open_run(str(made.path)), 8 * SEQ_LEN) is not None
    for tokens in (0, -8 * SEQ_LEN, 16 * SEQ_LEN, 10**12 * SEQ_LEN, 10**300):  # of a damaged line of metrics
        assert plan_of(open_run(str(made.path)), tokens) is None
    (made.path / "config.yaml").write_text(yaml.safe_dump(config | {"parallel": {"dp_shard": 2, "ep": 2}}))
    assert plan_of(open_run(str(made.path)), 8 * SEQ_LEN) is None
    refused = CliRunner().invoke(app, ["train", "report", str(made.path), "--gpu", "h101"])
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("error: --gpu: expected one of h100, ")


def test_a_device_whose_name_is_markup_is_shown_as_text(made: Made) -> None:
    record(made, device=EVIL)
    shown = page(made)
    assert shown.tags["img"] == 0
    assert shown.handlers == []
    assert "the run’s record names </script><script>alert(1)</script><img src=x" in shown.text


def test_devices_have_the_profile_of_their_name_and_no_other() -> None:
    assert {device: profile_of(device) for device in DEVICES} == DEVICES
    assert {*DEVICES.values()} == {*names()}
    assert [device for device in OTHERS if profile_of(device) is not None] == []
