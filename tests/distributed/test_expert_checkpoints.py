"""Checkpoints of experts that are dealt out over ranks load into any other layout, bit for bit: weights, moments, the
counter and biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.train.checkpoint.format.manifest import checkpoint_name
from quern.train.checkpoint.format.state import TrainState
from quern.train.checkpoint.tools.reader import iter_weights, verify
from quern.train.config import CheckpointConfig
from support.train import checkpoint_case as CASE
from support.train.saves import CheckpointManager

SHAPE: dict[str, Any] = {"num_heads": 2, "experts": True}
FEW = [MeshPlan(dp_shard=4, ep=2), MeshPlan(dp_shard=2, tp=2, ep=2), MeshPlan()]
#: Shards of an expert's rows of 6, whole experts on 8 ranks, two replicas, and stages of which one has none.
MORE = [
    MeshPlan(dp_shard=6, ep=2), MeshPlan(dp_shard=8, ep=4), MeshPlan(), MeshPlan(2, 4, ep=2), FEW[1],
    MeshPlan(pp=2, dp_shard=2, tp=2, ep=2), MeshPlan(dp_shard=2, cp=2, ep=4),
]  # fmt: skip


def make(folder: str, plan: MeshPlan) -> TrainState:
    """The model on a layout, weights unset."""
    of = CASE.shape(**SHAPE)
    model = CASE.laid_out(of, build_mesh(plan, "cpu"))
    facts = CASE.facts(Path(folder), of, layout=plan.sizes())
    return TrainState(model, CASE.groups(model), facts, {})


def manager(folder: str) -> CheckpointManager:
    return CheckpointManager(f"{folder}/run", CheckpointConfig(), dist.get_rank(), dist.get_world_size())


def save(folder: str, plans: dict[int, MeshPlan]) -> None:
    """A checkpoint of each plan; the content is keyed by the step."""
    with manager(folder) as checkpoints:
        for step, plan in plans.items():
            state = make(folder, plan)
            CASE.fill(state, step)
            checkpoints.save(step, state, CASE.position(step))


def load(folder: str, plans: dict[int, MeshPlan], steps: dict[int, list[int]]) -> dict[int, list[str]]:
    """Of each plan what differs on this rank when it loads its steps."""
    found = {}
    with manager(folder) as checkpoints:
        for own, plan in plans.items():
            state, wrong = make(folder, plan), []
            for step in steps[own]:
                CASE.fill(state, 10_000)
                checkpoints.load(f"{folder}/run/checkpoints/{checkpoint_name(step)}", state)
                wrong += [f"{step}: {name}" for name in CASE.differences(state, step, stage=plan.pp > 1)]
            found[own] = wrong
    return found


@pytest.mark.parametrize(
    ("plans", "ring"),
    [pytest.param(FEW, False, marks=pytest.mark.slow), pytest.param(MORE, True, marks=pytest.mark.long)],
    ids=["few", "more"],
)
def test_experts_dealt_out_load_into_each_other(
    kept_ranks: Any, tmp_path: Path, plans: list[MeshPlan], ring: bool
) -> None:
    """Each layout into each; or what one has saved into the next."""
    folder, numbered = str(tmp_path), dict(enumerate(plans, start=1))
    steps = {own: [(own - 2) % len(plans) + 1] if ring else list(numbered) for own in numbered}
    by_world = {
        world: {own: plan for own, plan in numbered.items() if plan.world_size == world}
        for world in sorted({plan.world_size for plan in plans})
    }
    for world, own in by_world.items():
        kept_ranks(save, world, folder, own)
    for world, own in by_world.items():
        for rank, found in enumerate(kept_ranks(load, world, folder, own, steps)):
            assert found == {number: [] for number in own}, (world, rank)
    sizes = CASE.sizes(CASE.shape(**SHAPE))
    for step in numbered:
        path = str(tmp_path / "run" / "checkpoints" / checkpoint_name(step))
        assert verify(path) == []
        weights = dict(iter_weights(path))
        assert weights.keys() == sizes.keys() | {"blocks.1.ffn.bias"}
        for name, size in sizes.items():
            assert torch.equal(weights[name], CASE.numbers("weight", name, size, step)), (step, name)
        bias = CASE.numbers("bias", "blocks.1.ffn.bias", (8,), step)
        assert torch.equal(weights["blocks.1.ffn.bias"], bias)
