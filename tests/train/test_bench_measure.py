"""A row as its ranks run it: real steps, real failures, in processes of their own."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quern.train.bench.crew import open_crew
from quern.train.bench.options import Options
from quern.train.bench.rows import configure, rows
from quern.train.bench.run import bench
from quern.train.config import TrainConfig
from quern.train.processes import launch

SIZES = ("model.dim=64", "model.ffn_dim=128", "model.num_heads=2", "model.num_kv_heads=1", "device=cpu")


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def small(**more: Any) -> Options:
    given: dict[str, Any] = {
        "model": ("debug",), "overrides": SIZES, "layers": 1, "vocab_size": 512, "seq_len": 32, "micro_batch": (2,),
        "accumulate": 2, "steps": 3, "warm_up": 2, "peak_tflops": 0.5,
    }  # fmt: skip
    return Options(**(given | more))


def found(options: Options) -> list[dict[str, Any]]:
    document, _ = bench(options, ["quern", "bench"], lambda text: None)
    json.dumps(document, allow_nan=False)
    entries: list[dict[str, Any]] = document["rows"]
    for entry in entries:
        assert entry["ok"] or entry["error"]
    return entries


@pytest.mark.slow
def test_a_row_is_real_steps_of_the_trainer(tmp_path: Path) -> None:
    (row,) = found(small(out=str(tmp_path / "o.json")))
    assert row["ok"], row["error"]
    assert row["first_loss"] == pytest.approx(math.log(512), abs=0.15)  # the model it says, from noise
    assert row["last_loss"] is not None
    assert row["not_finite"] == 0
    assert len(row["step_times_s"]) == 3
    assert row["global_batch"] == 4
    assert row["step_time_low_s"] <= row["step_time_s"] <= row["step_time_high_s"]
    assert row["tokens_per_s"] == pytest.approx(4 * 32 / sorted(row["step_times_s"])[1])
    # by hand: q, o 64 × 64, k, v 64 × 32, three of 64 × 128, two norms, one layer; the tied head 64 × 512
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    bare = 6 * block + 12 * 2 * 32 * 32
    assert row["mfu_full_without_head"] == pytest.approx(row["tokens_per_s"] * bare / 0.5e12)
    assert row["mfu_full"] == pytest.approx(row["tokens_per_s"] * (bare + 6 * 64 * 512) / 0.5e12)
    assert row["parameters"] == block + 64 + 512 * 64
    assert 0 <= row["data_wait_share"] < 1
    assert 0.05 < row["memory_gib"] < 8
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["machine"]["world"] == 1
    assert document["software"]["torch"]


@pytest.mark.long
def test_fp8_rows_compute_what_they_say() -> None:
    """In FP8 the same data and weights give nearly the same loss, and not the same bits."""
    sizes = dict(overrides=(*SIZES, "model.dim=128"), vocab_size=512, seq_len=128, accumulate=1, steps=1, warm_up=0)
    entries = found(small(precision=("bf16", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise"), **sizes))
    assert [entry["precision"] for entry in entries] == ["bf16", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise"]
    losses = [entry["first_loss"] for entry in entries]
    assert len(set(losses)) == 4
    assert losses == pytest.approx([losses[0]] * 4, rel=5e-3)


@pytest.mark.long
def test_two_ranks_and_a_row_that_no_layout_allows(tmp_path: Path) -> None:
    layouts = ("tp=2", "dp_shard=4", "tp=2 async_tp=true")
    entries = found(small(nproc=2, layout=layouts, scratch=str(tmp_path)))
    assert [entry["ok"] for entry in entries] == [True, False, False]
    assert entries[0]["layout_text"] == "tp 2"
    assert entries[0]["tokens_per_s_per_device"] == pytest.approx(entries[0]["tokens_per_s"] / 2)
    assert entries[1]["error"].startswith("parallel: dp_replicate 1 × dp_shard 4 makes 4 ranks, but 2 were started")
    assert entries[2]["error"].startswith("parallel.async_tp: is a pass of torch.compile")  # said by the ranks
    assert entries[2]["error_kind"] == "refused"


@pytest.mark.slow
def test_a_rank_that_dies_is_a_failed_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits in a collective for ever, and is ended."""
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if os.environ.get('RANK') == '1': print('the last word', flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = small(nproc=2, layout=("",))
    folder = str(tmp_path / "row")
    with open_crew(2) as crew:
        spec = {"config": _config(options, tmp_path).model_dump(mode="json"), "warm_up": 0}
        os.makedirs(folder)
        Path(folder, "spec.json").write_text(json.dumps(spec))
        results = crew.run(folder, 29_999)
    assert results[1]["error"] == f"was ended by {signal.SIGKILL.name}: the last word"
    assert "error" in results[0]
    assert results[1]["time"] < results[0]["time"]


def _config(options: Options, folder: Path) -> TrainConfig:
    (row,) = rows(options)
    return configure(
        row, options, world=2, micro_batch=None, cuda=lambda: False, data=str(folder), run_dir=str(folder / "run")
    )
