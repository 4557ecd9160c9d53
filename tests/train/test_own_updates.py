"""Learning rates and weight decay of experts and routers, against the plain loop in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quern.config import digest
from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.host_masters import HostMasters
from quern.train.config import OptimizerConfig, TrainConfig
from quern.train.step.optimizer import build_optimizer, step
from support.distributed.ranks import run_ranks
from support.oracles import plain_loop, plain_moe
from support.train import run_case as case

MOE = {"num_experts": 6, "top_k": 2, "ffn_dim": 16, "normalize": True, "first_dense": 1, "shared_ffn_dim": 8}
OWN: dict[str, Any] = {
    "experts": {"lr_factor": 0.5, "weight_decay": 0.02},
    "router": {"lr_factor": 3.0, "weight_decay": 0.0},
}
VOCAB = 50
SIZES = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48}


def network(dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(ModelConfig(**SIZES, moe=MOE, vocab_multiple=1).shape(VOCAB), compute_dtype=dtype).to(dtype)
    initialise(model, 1)
    return model


def batches(count: int) -> list[list[plain_loop.Batch]]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(count):
        tokens = torch.randint(VOCAB, (2, 13), generator=generator)
        places = torch.arange(12).expand(2, 12)
        found.append([plain_loop.Batch(tokens[:, :-1], tokens[:, 1:], places, torch.zeros_like(places))])
    return found


@pytest.mark.parametrize(
    "own", [OWN, {"router": OWN["router"]}, {"experts": {"lr_factor": 0.0}}], ids=["both", "router", "frozen"]
)
def test_updates_are_those_of_the_plain_loop(own: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=0.01, weight_decay=0.3, clip=None, **own)
    model, steps = network(), batches(4)
    shape = plain_loop.Shape(**SIZES, head_dim=8, vocab_size=VOCAB, experts=plain_moe.Experts(MOE, {}))
    parts = {"ffn.experts.": "experts", "ffn.router.": "router"}
    given = {
        part: (own[name].get("lr_factor", 1.0), own[name].get("weight_decay"))
        for part, name in parts.items()
        if name in own
    }
    settings = plain_loop.Settings(4, lr=0.01, weight_decay=0.3, clip=None, warmup=2, own=given)
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = build_optimizer(model, config)
    for record, (batch,) in zip(plain_loop.train(first, shape, steps, settings), steps, strict=True):
        loss, _ = model(batch.tokens, batch.targets)
        optimizer.zero_grad()
        (loss / batch.targets.numel()).backward()
        step(optimizer, record.lr)
        for name, weight in model.named_parameters():
            expected = record.weights[name]
            assert (weight - expected).abs().max() <= 1e-12 * expected.abs().max(), (record.step, name)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, first[name])}
    assert ("blocks.1.ffn.experts.w2" in moved) == (own.get("experts", {}).get("lr_factor") != 0.0)
    assert {"blocks.1.ffn.router.weight", "blocks.1.ffn.shared.w2.weight", "blocks.0.ffn.w1.weight"} <= moved


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_without_gradients_only_what_decays_moves(moments: str) -> None:
    """By 1 - lr · factor · decay, whichever optimizer it is."""
    config = OptimizerConfig(weight_decay=0.25, moments=moments, **OWN)
    model = network(torch.float32)
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    step(build_optimizer(model, config), 0.5)
    for name, weight in model.named_parameters():
        shrink = 0.0 if "norm" in name or "router" in name else 0.25 * 0.02 if "ffn.experts" in name else 0.5 * 0.25
        torch.testing.assert_close(weight, first[name] * (1 - shrink), rtol=1e-6, atol=0)


def test_masters_on_the_host_are_updated_as_weights_on_the_device() -> None:
    model, config = network(torch.float32), OptimizerConfig(**OWN)
    masters = HostMasters(model, [model], torch.float32, []).model
    groups = []
    for own in (model, masters):
        names = {weight: name for name, weight in own.named_parameters()}
        groups.append([
            ({names[weight] for weight in group["params"]}, group["weight_decay"], group["lr_factor"])
            for group in build_optimizer(own, config).param_groups
        ])  # fmt: skip
    assert groups[0] == groups[1]
    assert {factor for _, _, factor in groups[0]} == {1.0, 0.5, 3.0}


def test_groups_are_what_they_were_without_the_keys() -> None:
    model = network()
    plain = build_optimizer(model, OptimizerConfig()).param_groups
    assert [group["weight_decay"] for group in plain] == [0.1, 0.0]
    assert [p for group in plain for p in group["params"] if p.ndim >= 2] == [
        p for p in model.parameters() if p.ndim >= 2
    ]
    same = OptimizerConfig(router={"weight_decay": 0.1}, experts={"lr_factor": 1.0})
    assert [len(group["params"]) for group in build_optimizer(model, same).param_groups] == [
        len(group["params"]) for group in plain
    ]
    config = case.settings("run", ["a"])
    given = case.settings("run", ["a"], optimizer={"experts": {"lr_factor": 1.0}, "router": {"weight_decay": None}})
    assert digest(given) == digest(config)
    assert "router" not in config.model_dump()["optimizer"]
    assert digest(case.settings("run", ["a"], optimizer=OWN)) != digest(config)


# ---- runs


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return case.write_corpus(tmp_path_factory.mktemp("data"))


def sparse(run_dir: Path | str, paths: list[str], **changes: Any) -> TrainConfig:
    base = {"model": {"num_layers": 2, "moe": MOE}, "steps": 3, "schedule": {"warmup": 1}, "optimizer": OWN}
    return case.settings(run_dir, paths, **case._merge({**base, "checkpoint": {"interval": 1}}, changes))


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_killed_and_resumed_to_the_same_bits(tmp_path: Path, paths: list[str], moments: str) -> None:
    straight = case.live(sparse(tmp_path / "whole", paths, optimizer={"moments": moments}))
    config = sparse(tmp_path / "broken", paths, optimizer={"moments": moments})
    assert not case.live(config, kill_at=2).complete
    assert case.differences(case.live(config).state, straight.state) == []
    assert case.rows(tmp_path / "broken") == case.rows(tmp_path / "whole")
    settings = plain_loop.Settings(3, lr=0.01, warmup=1)  # the metrics' rate is the schedule's, without a factor
    rates = [case.rows(tmp_path / "whole")[number]["lr"] for number in range(3)]
    assert rates == pytest.approx([plain_loop.learning_rate(settings, number) for number in range(3)], rel=1e-12)


@pytest.mark.slow
def test_a_run_without_the_keys_goes_on_with_them(tmp_path: Path, paths: list[str]) -> None:
    """State is found by name, however weights are grouped: what stays is bitwise what the run without had."""
    keys = {"model": {"num_layers": 2, "moe": MOE}, "schedule": {"warmup": 1, "kind": "constant"}}
    before = case.live(case.settings(tmp_path / "run", paths, steps=2, **keys)).state
    frozen = {"experts": {"lr_factor": 0.0}, "router": {"lr_factor": 0.0}}
    left = case.live(case.settings(tmp_path / "run", paths, steps=3, optimizer=frozen, **keys))
    assert left.start.step == 2
    weights = {name: tensor for name, tensor in before.items() if name.startswith("model.")}
    same = {name for name, tensor in weights.items() if torch.equal(tensor, left.state[name])}
    assert same == {name for name in weights if "ffn.experts" in name or "ffn.router" in name}
    moment = "exp_avg.blocks.1.ffn.router.weight"
    assert not torch.equal(before[moment], left.state[moment])


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"dp_shard": 2},
    "pp2": {"pp": 2, "dp_shard": 1, "schedule": "1f1b"},
    "tp2": {"tp": 2, "dp_shard": 1},
}


@pytest.mark.long
def test_on_other_layouts(tmp_path: Path, paths: list[str]) -> None:
    """The first stage of the pipeline has no layer with experts."""
    base = {"precision": "fp64", "model": {"tied_embeddings": False}, "micro_batch": 2}
    expected = case.live(sparse(tmp_path / "alone", paths, **base)).state
    found = run_ranks(_on_layouts, 2, str(tmp_path), paths, base, timeout_s=240.0)
    for name in LAYOUTS:
        state = found[0][name] | found[1][name]
        assert case.worst_ratio(state, {key: expected[key] for key in state}) <= 1e-10, name
        assert {key for key in expected if key.startswith(("model", "exp_avg"))} <= state.keys()
    assert not any("experts" in key for key in found[0]["pp2"])


def _on_layouts(folder: str, paths: list[str], base: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: case.live(sparse(f"{folder}/{name}", paths, **base, parallel=parallel)).state
        for name, parallel in LAYOUTS.items()
    }
