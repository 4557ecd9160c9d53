"""Gradients and moments in BF16 on layouts of several ranks, and checkpoints of such moments from layout to layout.

The oracle of gradients is one process that holds the weights in BF16, as FSDP2 gathers them, and adds up the gradients
of ranks and micro-batches itself, each sum rounded: of two ranks the same bits must come out.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from quern.model.config import ModelConfig, ModelShape
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.accumulation import Accumulation
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.clip import clip_divisor
from quern.parallel.context.inputs import Inputs
from quern.parallel.data import gradients_in
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import Mesh, MeshPlan, build_mesh
from quern.train.checkpoint.format.manifest import checkpoint_name
from quern.train.checkpoint.format.state import TrainState
from quern.train.config import CheckpointConfig, OptimizerConfig
from quern.train.step.optimizer import build_optimizer, step
from support.distributed.tensor_case import local
from support.oracles.bf16_adamw import Bf16AdamW, bf16
from support.train import checkpoint_case as CASE
from support.train.saves import CheckpointManager

MICRO_BATCHES, SEQ_LEN, TARGETS, MAX_NORM = 3, 8, 100, 0.01
OPTIMIZER = OptimizerConfig(lr=1e-2, beta1=0.873, beta2=0.957, moments="bf16", gradients="bf16")
SKIP, KEEP = 1.0, 0.0


def shape() -> ModelShape:
    """Two ranks share neither rows nor heads alone, and two of ``tp`` do."""
    return ModelConfig(
        num_layers=2, dim=30, num_heads=4, num_kv_heads=2, head_dim=10, ffn_dim=62, vocab_multiple=4, qk_norm=True,
        tied_embeddings=False,
    ).shape(vocab_size=127)  # fmt: skip


def meta() -> Transformer:
    with torch.device("meta"):
        return Transformer(shape(), compute_dtype=torch.bfloat16, loss_chunk=5)


def build(plan: MeshPlan, **settings: Any) -> tuple[Parallel, Mesh]:
    mesh = build_mesh(plan, "cpu")
    layout = Layout(torch.bfloat16, plan, micro_batch=2, seq_len=SEQ_LEN, bf16_gradients=True, **settings)
    parallel = parallelize(meta(), mesh, layout)
    initialise(parallel.model, seed=7)
    return parallel, mesh


def inputs_of(rank: int, number: int) -> Inputs:
    generator = torch.Generator().manual_seed(100 * rank + number)
    tokens_BL, targets_BL = torch.randint(127, (2, 2, SEQ_LEN), generator=generator).unbind()
    return Inputs(tokens_BL, targets_BL, None, None)


def trained(plan: MeshPlan, reshard: bool) -> dict[str, Any]:
    """One step of a layout: this rank's gradients, their norm, and weights and moments after a clipped update and a
    skipped one."""
    parallel, mesh = build(plan, reshard_after_forward=reshard)
    model = parallel.model
    optimizer = build_optimizer(model, OPTIMIZER)
    inputs = [inputs_of(mesh.dp_rank, number) for number in range(MICRO_BATCHES)]
    parallel.run.forward_backward(inputs, lambda loss_sum: loss_sum / TARGETS)
    parallel.gradients.finish()
    gradients = {name: local(p.grad).clone() for name, p in model.named_parameters()}
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    norm = parallel.gradients.norm()
    step(optimizer, 1e-2, torch.tensor(KEEP), clip_divisor(MAX_NORM, norm))
    after = state_of(model, optimizer)
    for parameter in model.parameters():
        local(parameter.grad).fill_(float("nan"))
    step(optimizer, 1.0, torch.tensor(SKIP))
    same = state_of(model, optimizer)
    assert all(torch.equal(after[name], same[name]) for name in after)
    names = dict(model.named_parameters())
    cut = {n: getattr(p, "placements", ()) and [str(place) for place in p.placements] for n, p in names.items()}
    return {"gradients": gradients, "norm": norm, "after": after, "cut": cut}


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        slots = optimizer.state[parameter]
        assert slots["exp_avg"].dtype == slots["exp_avg_sq"].dtype == torch.bfloat16
        found |= {name: local(parameter).clone(), f"{name}/step": slots["step"].clone()}
        found |= {f"{name}/{key}": local(slots[key]).clone() for key in ("exp_avg", "exp_avg_sq")}
    return found


def by_hand(ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """First weights, and gradients of all ranks and micro-batches."""
    model = meta().to_empty(device="cpu")
    initialise(model, seed=7)
    weights = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    total = {name: np.zeros_like(value) for name, value in weights.items()}
    for number in range(MICRO_BATCHES):
        found = []
        for rank in range(ranks):
            model.zero_grad(set_to_none=True)
            Accumulation(model).forward_backward([inputs_of(rank, number)], lambda loss_sum: loss_sum / TARGETS)
            found.append({name: p.grad.double().numpy() for name, p in model.named_parameters()})
        for name, value in total.items():
            summed = found[0][name] if ranks == 1 else bf16(found[0][name] + found[1][name])
            total[name] = bf16(value + summed)
    return weights, total


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.long)])
def test_fsdp_reduces_and_keeps_gradients_in_bf16(run_ranks: Any, reshard: bool) -> None:
    """The bits of gradients and moments, and the weights of the paper's update."""
    found = run_ranks(trained, 2, MeshPlan(dp_shard=2), reshard, timeout_s=120)
    weights, gradients = by_hand(2)
    norm = np.sqrt(sum((value**2).sum() for value in gradients.values()))
    expected = Bf16AdamW(
        weights, {name: 0.1 * (value.ndim > 1) for name, value in weights.items()}, OPTIMIZER.beta1, OPTIMIZER.beta2,
        OPTIMIZER.eps,
    )  # fmt: skip
    divisor = max(1.0, (norm + 1e-6) / MAX_NORM)
    assert divisor > 2
    expected.step({name: value / divisor for name, value in gradients.items()}, 1e-2)

    def whole(kind: str, name: str) -> Any:
        return torch.cat([rank[kind][name] for rank in found]).double().numpy()

    apart: list[bool] = []
    for name, gradient in gradients.items():
        assert np.array_equal(whole("gradients", name), gradient), name
        for moment, value in (("exp_avg", expected.first[name]), ("exp_avg_sq", expected.second[name])):
            moved = whole("after", f"{name}/{moment}")
            apart += [*(moved != value).ravel()]
            np.testing.assert_allclose(moved, value, rtol=2**-7)
        np.testing.assert_allclose(whole("after", name), expected.weights[name], rtol=1e-4, atol=1e-6)
    assert np.mean(apart) < 0.01  # of 128 significands, one or two that float32 rounds otherwise
    for rank in found:
        assert rank["norm"].dtype == torch.float32
        np.testing.assert_allclose(rank["norm"].item(), norm, rtol=1e-5)
        assert all(rank["after"][f"{name}/step"] == 1 for name in weights)


@pytest.mark.long
def test_split_tensors_keep_gradients_in_bf16(run_ranks: Any) -> None:
    """``tp`` without FSDP2: autograd rounds, and norms' partial sums are added in BF16."""
    found = run_ranks(trained, 2, MeshPlan(tp=2), True, timeout_s=120)
    _, gradients = by_hand(1)
    for name, gradient in gradients.items():
        cut = found[0]["cut"][name]
        parts = [rank["gradients"][name] for rank in found]
        dim = None if not cut or cut[0] == "R" else 1 if "1" in cut[0] else 0
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        apart = np.linalg.norm(whole.double().numpy() - gradient) / np.linalg.norm(gradient)
        assert apart < 0.03, (name, apart)
    norm = np.sqrt(sum((value**2).sum() for value in gradients.values()))
    np.testing.assert_allclose([rank["norm"].item() for rank in found], norm, rtol=0.01)


@pytest.mark.long
@pytest.mark.parametrize("plan", [MeshPlan(2, 2), MeshPlan(dp_shard=2, tp=2)], ids=["HSDP", "FSDP2 and tp"])
def test_larger_layouts_keep_gradients_in_bf16(run_ranks: Any, plan: MeshPlan) -> None:
    found = run_ranks(trained, 4, plan, True, timeout_s=240)
    assert len({rank["norm"].item() for rank in found}) == 1
    assert found[0]["norm"].isfinite()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def state(folder: str, plan: MeshPlan, moments: str) -> TrainState:
    of = CASE.shape(128, num_heads=2)
    model = CASE.laid_out(of, build_mesh(plan, "cpu"))
    optimizer = build_optimizer(model, OptimizerConfig(moments=moments))
    return TrainState(model, optimizer, CASE.facts(Path(folder), of, layout=plan.sizes()), {})


def manager(folder: str) -> CheckpointManager:
    return CheckpointManager(f"{folder}/run", CheckpointConfig(), dist.get_rank(), dist.get_world_size())


def save(folder: str, plan: MeshPlan, moments: str, key: int) -> None:
    """The case's numbers, rounded where moments are in BF16."""
    own = state(folder, plan, moments)
    CASE.fill(own, key, pad=0.0)
    if moments == "bf16":
        for slots in own.optimizer.state.values():
            slots |= {name: slots[name].to(torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
    with manager(folder) as checkpoints:
        checkpoints.save(key, own, CASE.position(key))


def load(folder: str, plan: MeshPlan, moments: str, key: int, rounded: bool) -> tuple[list[str], list[str]]:
    """What is not as it was saved, and what was told."""
    own = state(folder, plan, moments)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("quern.train.checkpoint.save.manager")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with manager(folder) as checkpoints:
        checkpoints.load(f"{folder}/run/checkpoints/{checkpoint_name(key)}", own)
    logger.removeHandler(handler)
    dtype = torch.bfloat16 if moments == "bf16" else torch.float32
    wrong = []
    of = own.facts.shape
    for name, parameter in own.model.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            tensor = own.optimizer.state[parameter][kind]
            full = CASE.padded(CASE.numbers(kind, name, CASE.sizes(of)[name], key), name, of.vocab_multiple, 0.0)
            expected = torch.from_numpy(bf16(full.double().numpy())) if rounded else full.double()
            part = CASE.local(tensor)
            if part.dtype != dtype or not torch.equal(part.double(), CASE.share(expected, tensor)):
                wrong.append(f"{kind}/{name}")
        if own.optimizer.state[parameter]["step"] != key:
            wrong.append(f"step/{name}")
    return wrong, told


@pytest.mark.long
def test_moments_load_into_any_layout_and_into_the_other_type(kept_ranks: Any, tmp_path: Path) -> None:
    """BF16 from FSDP2 into ``tp`` and one rank, and into FP32 exactly; FP32 into BF16 rounded to nearest."""
    shards, split, alone = MeshPlan(dp_shard=2), MeshPlan(tp=2), MeshPlan()
    folder = str(tmp_path)
    kept_ranks(save, 2, folder, shards, "bf16", 3)
    kept_ranks(save, 2, folder, split, "fp32", 5)
    for plan, moments, key, rounded, change in (
        (split, "bf16", 3, True, None), (alone, "bf16", 3, True, None), (alone, "fp32", 3, True, "bfloat16 → float32"),
        (shards, "bf16", 5, True, "float32 → bfloat16"), (shards, "fp32", 5, False, None),
    ):  # fmt: skip
        for rank, (wrong, told) in enumerate(kept_ranks(load, plan.world_size, folder, plan, moments, key, rounded)):
            assert wrong == [], (plan, moments, key)
            said = [line for line in told if "converted" in line]
            assert [change in line for line in said] == ([True] if change and rank == 0 else []), said


def test_weights_that_are_not_trained_get_no_gradient() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    gradients_in(layer, torch.bfloat16)
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.bfloat16
    assert layer.bias.grad is None
