"""A run of a model with experts: what it notes of their loads, and what a resumed run needs to know of them."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from quern.errors import InputError
from quern.model.moe.layer import MoE
from quern.train.config import ParallelConfig, TrainConfig
from quern.train.config.experts import ExpertsConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import check, open_trainer
from quern.train.step import figures
from support.train import run_case as case

MOE = {"num_experts": 6, "top_k": 2, "ffn_dim": 16, "score": "sigmoid", "normalize": True, "bias": True}
EVEN = {"balance_loss": 0.0, "balance_over": "sequence", "bias_rate": 0.0}
BALANCED = {"balance_loss": 0.1, "balance_over": "global", "bias_rate": 0.05}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return case.write_corpus(tmp_path_factory.mktemp("data"), {"web": 60, "code": 25, "web.val": 8})[:2]


def sparse(run_dir: Path, paths: list[str], **changes: Any) -> TrainConfig:
    return case.settings(
        run_dir,
        paths,
        **{
            "model": {"num_layers": 2, "moe": MOE},
            "experts": BALANCED,
            "steps": 4,
            "schedule": {"warmup": 1},
            **changes,
        },
    )


def loads(run_dir: Path) -> list[dict[str, Any]]:
    return [row["experts"] for step, row in sorted(case.rows(run_dir).items()) if step >= 0 and "experts" in row]


@pytest.mark.parametrize("state", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_killed_in_a_step_and_resumed_to_the_same_bits(tmp_path: Path, paths: list[str], state: str) -> None:
    """Shares of the step before and biases come from the checkpoint; a step that is skipped changes neither. With
    masters on the host too, which are updated beside the next forward."""
    every: dict[str, Any] = {"checkpoint": {"interval": 1}, "steps": 6, "precision": "bf16"}

    def spoilt(data_step: int) -> float:
        return float("nan") if data_step == 2 else 1.0

    straight = case.live(sparse(tmp_path / "whole", paths, **every), factor=spoilt)
    config = sparse(tmp_path / "broken", paths, **every, optimizer={"state": state})
    lives = [case.live(config, kill_at=at, factor=spoilt) for at in (1, 3, 4)]
    last = case.live(config, factor=spoilt)
    assert [life.complete for life in lives] == [False] * 3
    assert case.differences(last.state, straight.state) == []
    assert case.rows(tmp_path / "broken") == case.rows(tmp_path / "whole")
    biases = [value for name, value in straight.state.items() if name.endswith("ffn.bias")]
    assert len(biases) == 2
    for bias in biases:  # five updates of 0.05, up or down
        assert torch.allclose((bias / 0.05).round() * 0.05, bias, atol=1e-6)
        assert 0 < bias.abs().max() <= 0.25 + 1e-6


def test_only_a_steps_own_tokens_are_counted(tmp_path: Path, paths: list[str]) -> None:
    """Not those of held-out windows, nor of micro-batches and blocks that are computed again."""
    plain = case.live(sparse(tmp_path / "plain", paths))
    more = {"validation": {"interval": 1, "windows": 3}, "replicas": {"recompute_interval": 1}}
    seen = case.live(sparse(tmp_path / "more", paths, activation_checkpointing="full", **more))
    assert loads(tmp_path / "more") == loads(tmp_path / "plain")
    weights = {name: value for name, value in plain.state.items() if name in seen.state}
    assert case.differences({name: seen.state[name] for name in weights}, weights) == []


def test_figures_are_those_of_the_choices(tmp_path: Path, paths: list[str]) -> None:
    """With biases that no score can outweigh, the two experts of every token are known."""
    config = sparse(tmp_path / "run", paths, steps=1, experts={"bias_rate": 10.0})
    case.live(config)
    (first,) = loads(tmp_path / "run")
    assert 1.0 < first["max_over_mean"] <= 3.0
    assert first["dropped"] == 0
    assert first["unused"] < 4
    assert 1.7 < first["entropy"] < 1.792  # ln 6, nearly, of a router that knows nothing
    case.live(sparse(tmp_path / "run", paths, steps=2, experts={"bias_rate": 10.0}))
    second = loads(tmp_path / "run")[1]
    assert second["max_over_mean"] > first["max_over_mean"]  # all go to those that had less than the mean


def test_counts_of_some_steps_are_those_that_hooks_find(
    tmp_path: Path, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every n-th step and the last have them; every step has the greatest of each layer."""
    monkeypatch.setattr(figures, "_COUNTED", 2)
    seen: list[list[Counter[int]]] = []
    config = sparse(tmp_path / "run", paths, steps=5, model={"num_layers": 2, "moe": {**MOE, "first_dense": 1}})
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        (layer,) = (block.ffn for block in trainer.model.blocks.values() if isinstance(block.ffn, MoE))
        layer.on_routing = lambda found: seen[-1][0].update(found.chosen_TK.flatten().tolist())
        trainer.on_gradients = lambda *_: seen.append([Counter()])  # a step ends, the next one begins
        seen.append([Counter()])
        trainer.fit()
    rows = loads(tmp_path / "run")
    assert ["counts" in row for row in rows] == [True, False, False, True, True]
    for row, (counted,) in zip(rows, seen[:5], strict=True):
        counts = [counted[expert] for expert in range(MOE["num_experts"])]
        assert row["max_over_mean_of_layer"] == {"1": pytest.approx(max(counts) / statistics.fmean(counts), rel=1e-3)}
        assert row.get("counts", [counts]) == [counts]


def test_capacity_drops_what_it_says(tmp_path: Path, paths: list[str]) -> None:
    moe = {"num_experts": 4, "top_k": 1, "ffn_dim": 16, "capacity": 0.5}
    case.live(sparse(tmp_path / "run", paths, model={"num_layers": 1, "moe": moe}, experts={}, steps=2))
    for row in loads(tmp_path / "run"):
        assert 0.5 <= row["dropped"] < 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"moe": None}}, "experts.balance_loss: expected model.moe with it"),
        ({"experts": {"bias_rate": 0.0}}, "experts.bias_rate: expected more than 0 with model.moe.bias True"),
        ({"model": {"moe": {**MOE, "bias": False}}}, "experts.bias_rate: expected 0 with model.moe.bias False"),
        ({"model": {"moe": None}, "experts": EVEN, "optimizer": {"router": {"weight_decay": 0.0}}},
         "optimizer.router.weight_decay: expected model.moe with it: the model has no experts"),
        ({"model": {"moe": None}, "experts": EVEN, "optimizer": {"experts": {"lr_factor": 0.5}}},
         "optimizer.experts.lr_factor: expected model.moe with it: the model has no experts"),
    ],
)  # fmt: skip
def test_settings_that_do_nothing_are_refused(
    tmp_path: Path, paths: list[str], changes: dict[str, Any], said: str
) -> None:
    base = {"model": {"num_layers": 2, "moe": MOE}, "experts": BALANCED}
    config = case.settings(tmp_path / "run", paths, **case._merge(base, changes))
    with pytest.raises(InputError, match=said):
        check(config, 1)


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({"balance_over": "global"}, "balance_over: expected balance_loss above 0 with it"),
        ({"center_bias": True}, "center_bias: expected bias_rate above 0 with it"),
    ],
)
def test_keys_that_need_another(tmp_path: Path, paths: list[str], experts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        case.settings(tmp_path / "run", paths, experts=experts)


@pytest.mark.long
def test_compiled_blocks_train_as_eager_ones_do(tmp_path: Path, paths: list[str]) -> None:
    """With each way to compute a block again: the same choices and biases, and weights but for rounding."""
    same: dict[str, Any] = {"precision": "fp64", "steps": 3, "model": {"num_layers": 1, "moe": MOE}}
    eager = case.live(sparse(tmp_path / "eager", paths, **same))
    (bias,) = (name for name in eager.state if name.endswith("ffn.bias"))
    assert eager.state[bias].abs().max() > 0
    for mode in ("none", "full", "selective"):
        torch._dynamo.reset()
        how = {"compile": {"enabled": True, "backend": "aot_eager"}, "activation_checkpointing": mode}
        found = case.live(sparse(tmp_path / mode, paths, **same, **how))
        assert torch.equal(found.state[bias], eager.state[bias]), mode
        assert case.worst_ratio(found.state, eager.state) < 1e-11, mode
        for one, other in zip(loads(tmp_path / mode), loads(tmp_path / "eager"), strict=True):
            choices = [[own.pop(name, None) for name in ("counts", "max_over_mean_of_layer")] for own in (one, other)]
            assert choices[0] == choices[1], mode
            assert one == pytest.approx(other, rel=1e-11), mode


def test_a_config_that_leaves_later_keys_out_is_what_it_was() -> None:
    """Its digest is of these keys, and a run of before goes on."""
    assert set(ExpertsConfig(bias_rate=0.1).model_dump()) == {
        "balance_loss", "balance_over", "z_loss", "bias_rate", "center_bias",
    }  # fmt: skip
    assert set(ParallelConfig(dp_shard=2).model_dump()) == {
        "dp_replicate", "dp_shard", "reshard_after_forward", "tp", "async_tp", "nvlink_domain", "tp_across_domains",
        "pp", "schedule", "stages_per_rank", "stage_layers", "cp", "ep", "zero",
    }  # fmt: skip
