"""A profile of the real trainer on this machine: all of its time, all of its products, nothing of the run's own."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from quern.errors import InputError
from quern.train.processes.ranks import open_ranks
from quern.train.profiling import ceilings, limits
from quern.train.profiling.account import account
from quern.train.profiling.classes import CLASSES
from quern.train.profiling.run import alone, profile
from quern.train.setup import open_trainer
from quern.train.step.profile import recording
from quern.train.step.trace import read_trace
from support.train import run_case as CASE

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Ceilings by a few calls: their values are tested elsewhere."""
    for whole in (ceilings.gemm_ceiling, ceilings.copy_ceiling):
        monkeypatch.setattr(limits, whole.__name__, _briefly(whole))
    monkeypatch.setattr(limits, "_BEST", {"cpu": 64})


def _briefly(whole: Any) -> Any:
    return lambda *args: whole(*args, seconds=0.0)


@pytest.fixture
def config(tmp_path):
    paths = CASE.write_corpus(tmp_path / "data")
    return CASE.settings(tmp_path / "run", paths, checkpoint={"interval": 1, "mode": "process"}, steps=8)


def test_every_instant_of_the_steps_is_told_and_nothing_else_is_left(config, tmp_path):
    out = tmp_path / "out"
    result = profile(config, str(out), steps=2, warm_up=2)
    assert sorted(path.name for path in out.iterdir()) == ["profile.json", "trace_rank0.json"]
    assert json.loads((out / "profile.json").read_text()) == result
    assert not (tmp_path / "run").exists()
    (rank,) = result["ranks"]
    assert len(rank["steps_s"]) == 2
    assert set(rank["classes"]) == set(CLASSES)
    for kind in ("gemm", "attention", "loss", "optimizer", "elementwise", "host", "data"):
        assert rank["classes"][kind]["s"] > 0, kind
    assert rank["classes"]["communication"]["s"] == rank["classes"]["idle"]["s"] == 0
    assert sum(part["share"] for part in rank["classes"].values()) == pytest.approx(1)
    assert sum(part["s"] for part in rank["classes"].values()) == pytest.approx(rank["step_s"])
    assert result["tokens_per_s"] == pytest.approx(8 * 32 / result["untraced_step_s"])
    assert any(product["of_ceiling"] for product in rank["products"])
    assert len(rank["losses"]) == 3
    assert [loss["s"] for loss in rank["losses"]] == sorted((loss["s"] for loss in rank["losses"]), reverse=True)


def test_a_second_profile_replaces_the_first(config, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "trace_rank7.json").write_text("of a larger world")
    with pytest.raises(InputError, match="holds traces of something else"):  # of a run, say
        profile(config, str(out), steps=1, warm_up=1)
    assert (out / "trace_rank7.json").exists()
    (out / "profile.json").write_text("{}")
    profile(config, str(out), steps=1, warm_up=1)
    assert sorted(path.name for path in out.iterdir()) == ["profile.json", "trace_rank0.json"]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_products_are_those_that_torchs_counter_counts(config, tmp_path, mode):
    config = config.model_copy(update={"activation_checkpointing": mode})
    result = profile(config, str(tmp_path / "out"), steps=1, warm_up=1)
    with open_ranks("cpu") as ranks, open_trainer(alone(config, str(tmp_path / "run")), ranks) as trainer:
        trainer.start_loop()
        trainer.train_step(0)
        with FlopCounterMode(display=False) as counter:
            trainer.train_step(1)
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(counted.get(f"aten.{name}", 0) for name in ("mm", "addmm", "bmm", "baddbmm"))
    assert result["product_flops"]["executed"] == products
    again = [loss for loss in result["ranks"][0]["losses"] if "computed again" in loss["what"]]
    if mode == "none":
        # matrices of the blocks, the head with its rows of padding, norms of the blocks: 6 FLOPs a weight and token
        norms = 6 * 8 * 32 * (CASE.MODEL["num_layers"] * 2 * 32)
        assert result["product_flops"]["model"] == products + norms
        assert not again


def test_the_account_is_as_long_as_the_clock_says(config, tmp_path):
    within = around = 0.0  # the clock read on both sides of each end: a pause between them is in one of them
    with open_ranks("cpu") as ranks, open_trainer(alone(config, str(tmp_path / "run")), ranks) as trainer:
        trainer.start_loop()
        trainer.train_step(0)
        with recording() as profiler:
            for step in range(1, 5):
                began = time.perf_counter()
                with record_function(f"ProfilerStep#{step}"):
                    inside = time.perf_counter()
                    trainer.train_step(step)
                    within += time.perf_counter() - inside
                around += time.perf_counter() - began
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = account(read_trace(str(tmp_path / "trace.json")))
    assert len(found.steps) == 4
    assert 0.99 * within <= found.total_ns / 1e9 <= 1.01 * around
    assert sum(found.classes.values()) == found.total_ns


def test_the_traces_of_a_run_itself_are_read_alike(config, tmp_path):
    config = config.model_copy(
        update={
            "profile": config.profile.model_copy(update={"first_step": 2, "steps": 3}),
            "checkpoint": config.checkpoint.model_copy(update={"interval": 0, "mode": "sync"}),
        }
    )
    CASE.live(config)
    found = account(read_trace(str(tmp_path / "run" / "profile" / "trace_rank0.json")))
    assert len(found.steps) == 3
    assert found.classes["gemm"] > 0


def test_a_run_shorter_than_its_profile_is_refused(config, tmp_path):
    with pytest.raises(InputError, match=r"steps: expected at least 9, for --warm-up 4, --steps 4 .* got 8"):
        profile(config, str(tmp_path / "out"), steps=4, warm_up=4)
    assert not (tmp_path / "out").exists()
