"""Sums over split tensors and tied copies, the norm over stages, and clipping, against whole tensors in NumPy.

Parameters and their gradients are laid out by hand; no wrapper and no split of a model takes part.
"""

from __future__ import annotations

import types
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quern.parallel.gradients import Gradients
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.train.config import OptimizerConfig
from quern.train.step.optimizer import build_optimizer, step
from support.distributed.by_hand import Model, cut, laid_out, local
from support.distributed.watch import Collectives

EPS = 1e-14


@dataclass(frozen=True)
class Case:
    plan: MeshPlan
    tied: str = ""
    """Where the two copies are: on the pipeline's ends, on its first rank, or nowhere (untied)."""
    bad: tuple[int, int, float] | None = None
    """(stage, rank within it, value) of one element."""
    idle: bool = False
    """The last stage has no gradient at all."""
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{self.plan} {self.tied} {self.bad} {self.idle} {self.dtype}"


#: Name within a stage → whole size, and the dimension that tensor parallelism splits. Three rows a rank of two: the
#: share of a second data rank is smaller, and that of a third one empty for the norm of two.
SIZES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "embed.weight": ((14, 5), 0),
    "tied.weight": ((14, 5), 0),
    "norm.weight": ((2,), None),
    "wq.weight": ((6, 5), 0),
    "wk.weight": ((3, 5), None),
    "wo.weight": ((7, 4), 1),
    "frozen.weight": ((4, 4), None),
}


def names(case: Case, stage: int) -> list[str]:
    first, last = stage == 0, stage == case.plan.pp - 1
    block = [f"blocks.{stage}.{name}" for name in ("wq.weight", "wk.weight", "wo.weight", "frozen.weight")]
    ends = ["embed.weight"] if first or (last and case.tied == "ends") else []
    ends += ["tied.weight"] if first and case.tied == "one rank" else []
    return [*block, *ends, "norm.weight"] if last else [*block, *ends]


def kind(name: str) -> tuple[tuple[int, ...], int | None]:
    return SIZES[".".join(name.split(".")[-2:])]


def drawn(case: Case, *key: Any, size: tuple[int, ...]) -> torch.Tensor:
    stream = np.random.default_rng(zlib.crc32(repr(key).encode()))
    return torch.from_numpy(stream.standard_normal(size)).to(case.dtype)


def partial(case: Case, name: str, stage: int, tp: int) -> torch.Tensor:
    """What one rank of ``tp`` has found of the whole gradient: all of it where the tensor is split."""
    size, dim = kind(name)
    return drawn(case, name, stage, tp if dim is None else 0, size=size)


def whole(case: Case, name: str, stage: int) -> torch.Tensor:
    """The gradient in the end; of tied embeddings the sum of both uses."""
    if name in ("embed.weight", "tied.weight") and case.tied:
        at = [("embed.weight", 0), ("embed.weight", case.plan.pp - 1) if case.tied == "ends" else ("tied.weight", 0)]
        return partial(case, *at[0], 0) + partial(case, *at[1], 0)
    parts = [partial(case, name, stage, tp) for tp in range(case.plan.tp)]
    return parts[0] if kind(name)[1] is not None else torch.stack(parts).sum(0)


@dataclass
class Found:
    norm: torch.Tensor
    stage: int
    reduced: int
    """Sums over ranks that :meth:`Gradients.finish` asked for."""
    sent: int
    """Tensors that it sent to another rank."""
    summed: dict[str, bytes] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    steps: set[float] = field(default_factory=set)


def run(case: Case) -> Found:
    mesh = build_mesh(case.plan, "cpu")
    at, plan = case.plan.coordinates(torch.distributed.get_rank()), case.plan
    stage = at["pp"]
    parameters = {}
    for name in names(case, stage):
        gradient = laid_out(partial(case, name, stage, at["tp"]), kind(name)[1], mesh)
        parameters[name] = nn.Parameter(torch.zeros_like(gradient), requires_grad="frozen" not in name)
        if "frozen" not in name and not (case.idle and stage == plan.pp - 1):
            parameters[name].grad = gradient
    model = Model(parameters, types.SimpleNamespace(tied_embeddings=bool(case.tied)))
    if case.bad is not None and case.bad[0] == stage:
        inside = at["tp"] + plan.tp * (at["dp_shard"] + plan.dp_shard * at["dp_replicate"])
        if case.bad[1] == inside:
            local(model.get_parameter(f"blocks.{stage}.wq.weight").grad)[0, 0] = case.bad[2]
    gradients = Gradients(model, mesh)  # type: ignore[arg-type]
    with Collectives() as watch:
        gradients.finish()
    found = Found(torch.empty(0), stage, watch.calls["allreduce"], watch.calls["send"])
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found.summed[name] = local(parameter.grad).contiguous().numpy().tobytes()
            if case.bad is None:
                expect(found, f"sum {name}", local(parameter.grad), part(case, name, stage, at))
    found.norm = gradients.norm()
    before = {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients.clip(1e6, found.norm)
    after = {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    if case.bad is None and any(not torch.equal(before[name], after[name]) for name in before):
        found.wrong.append("clipped although the norm is small")
    gradients.clip(0.25, found.norm)
    for name, parameter in model.named_parameters():
        if case.bad is None and parameter.grad is not None:
            factor = 0.25 / (expected_norm(case) + 1e-6)
            expect(found, f"clipped {name}", local(parameter.grad), part(case, name, stage, at) * factor)
    if not case.idle:
        optimizer = build_optimizer(model, OptimizerConfig())
        step(optimizer, 1e-2, skip=~torch.isfinite(found.norm))
        found.steps = {float(slots["step"]) for slots in optimizer.state.values()}
        moved = any(local(parameter).any() for parameter in model.parameters())
        if moved == (case.bad is not None):
            found.wrong.append("a step with a gradient that is not finite moved weights, or one without did not")
    return found


def part(case: Case, name: str, stage: int, at: dict[str, int]) -> torch.Tensor:
    return cut(whole(case, name, stage), kind(name)[1], case.plan, at)


def expect(found: Found, what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, rtol=0, atol=10 * EPS):
        found.wrong.append(what)


def expected_norm(case: Case) -> float:
    total = 0.0
    for stage in range(case.plan.pp - case.idle):
        for name in names(case, stage):
            copy = name == "tied.weight" or (name == "embed.weight" and stage > 0)
            if not copy and "frozen" not in name:
                total += float((whole(case, name, stage).numpy().astype(np.float64) ** 2).sum())
    return float(np.sqrt(total))


def run_all(cases: list[Case]) -> list[Found]:
    return [run(case) for case in cases]


CASES = {
    2: [
        Case(MeshPlan(tp=2)),
        Case(MeshPlan(tp=2), dtype=torch.float32),
        Case(MeshPlan(dp_shard=2)),
        Case(MeshPlan(dp_replicate=2)),
        Case(MeshPlan(pp=2)),
        Case(MeshPlan(pp=2), "ends"),
        Case(MeshPlan(pp=2), "one rank"),
        Case(MeshPlan(pp=2), idle=True),
        Case(MeshPlan(pp=2), bad=(0, 0, np.nan)),
        Case(MeshPlan(pp=2), "ends", bad=(1, 0, np.inf)),
        Case(MeshPlan(tp=2), bad=(0, 1, -np.inf)),
    ],
    4: [
        Case(MeshPlan(dp_shard=2, tp=2)),
        Case(MeshPlan(dp_replicate=2, tp=2)),
        Case(MeshPlan(dp_replicate=2, dp_shard=2)),
        Case(MeshPlan(pp=2, tp=2), "ends"),
        Case(MeshPlan(pp=2, tp=2), "one rank"),
        Case(MeshPlan(pp=2, dp_shard=2), "ends"),
        Case(MeshPlan(pp=2, dp_replicate=2), "one rank"),
        Case(MeshPlan(pp=4), "ends"),
        Case(MeshPlan(pp=4), "one rank", idle=True),
        Case(MeshPlan(dp_shard=2, tp=2), bad=(0, 3, np.nan)),
        Case(MeshPlan(pp=2, tp=2), bad=(1, 1, np.nan)),
        Case(MeshPlan(pp=2, dp_shard=2), bad=(1, 0, np.inf)),
    ],
    8: [
        Case(MeshPlan(dp_replicate=2, dp_shard=2, tp=2)),
        Case(MeshPlan(pp=2, dp_shard=2, tp=2), "ends"),
        Case(MeshPlan(pp=2, dp_shard=2, tp=2), "one rank"),
        Case(MeshPlan(pp=2, dp_shard=2, tp=2), bad=(0, 2, np.nan)),
        Case(MeshPlan(dp_shard=4, tp=2)),
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.long) for world in (4, 8))])
def test_gradients_are_those_of_whole_tensors(kept_ranks: Any, world: int) -> None:
    for case, by_rank in zip(CASES[world], zip(*kept_ranks(run_all, world, CASES[world]), strict=True), strict=True):
        for rank, found in enumerate(by_rank):
            assert found.wrong == [], (str(case), rank)
            assert found.norm.dtype == case.dtype
            assert found.norm.shape == ()
            assert found.norm.numpy().tobytes() == by_rank[0].norm.numpy().tobytes() or case.bad, (str(case), rank)
            if case.bad is not None:
                assert not torch.isfinite(found.norm), (str(case), rank)
                assert found.steps == {0.0}
            else:
                close = 1e-14 if case.dtype == torch.float64 else 1e-6
                np.testing.assert_allclose(found.norm.item(), expected_norm(case), rtol=close, err_msg=str(case))
            ends = case.tied == "ends" and found.stage in (0, case.plan.pp - 1)
            assert (found.reduced, found.sent) == (case.plan.tp > 1, ends), (str(case), rank)
        copies_agree(case, list(by_rank))


def copies_agree(case: Case, by_rank: list[Found]) -> None:
    """Every rank that holds the same part of a tensor holds the same bits of its gradient."""
    bits: dict[Any, bytes] = {}
    for rank, found in enumerate(by_rank):
        at = case.plan.coordinates(rank)
        for name, value in found.summed.items():
            shard = at["dp_shard"] if case.plan.by_fsdp else 0
            key = (name.replace("tied.", "embed."), shard, at["tp"] if kind(name)[1] is not None else 0)
            assert bits.setdefault(key, value) == value, (str(case), rank, name)


def count_sums(plans: list[MeshPlan]) -> list[Counter[str]]:
    """What a model of split tensors alone asks for: nothing."""
    found = []
    for plan in plans:
        mesh = build_mesh(plan, "cpu")
        parameter = nn.Parameter(laid_out(partial(Case(plan), "wq.weight", 0, 0), 0, mesh))
        parameter.grad = torch.ones_like(parameter.detach())
        with Collectives() as watch:
            Gradients(Model({"blocks.0.wq.weight": parameter}), mesh).finish()  # type: ignore[arg-type]
        found.append(watch.calls)
    return found


def test_nothing_is_sent_where_nothing_is_left_to_sum(kept_ranks: Any) -> None:
    for found in kept_ranks(count_sums, 2, [MeshPlan(tp=2), MeshPlan(dp_shard=2), MeshPlan(pp=2)]):
        assert found == [Counter()] * 3
