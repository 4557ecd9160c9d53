"""DDP, FSDP2 and HSDP against one process of plain torch in float64.

The oracle shares nothing with the layouts but the network and its first weights: whole batch at once, all logits,
``F.cross_entropy``, ``clip_grad_norm_`` and AdamW's single-tensor loop. Targets are spread unevenly on purpose: a mean
over ranks or micro-batches would be another gradient.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quern.model.config import ModelConfig, ModelShape
from quern.model.init import initialise
from quern.model.loss import IGNORE
from quern.model.transformer import Transformer
from quern.parallel.accumulation import Accumulation
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import Mesh, MeshPlan, build_mesh
from quern.train.config import OptimizerConfig
from quern.train.step.optimizer import build_optimizer, step
from support.distributed.tensor_case import local, ratio
from support.distributed.watch import Collectives

STEPS, GLOBAL_BATCH, SEQ_LEN, MAX_NORM = 3, 12, 10, 0.05
OPTIMIZER = OptimizerConfig(weight_decay=0.1)
LEARNING_RATES = (1e-2, 2e-2, 5e-3)
TOLERANCE = dict.fromkeys(("losses", "norms", "first gradients", "later gradients", "moments", "weights"), 1e-10)
TOLERANCE["first gradients"] = 1e-12  # later ones follow weights that AdamW's g/√v has moved apart where g is tiny


@dataclass(frozen=True)
class Case:
    replicate: int = 1
    shard: int = 1
    reshard: bool | int = True
    activation: str = "none"
    accumulate: int = 1
    tied: bool = False
    compile: str | None = None
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        layout = f"replicate {self.replicate} shard {self.shard} reshard {self.reshard}"
        tied = "tied" if self.tied else "untied"
        return f"{layout} AC {self.activation} accumulate {self.accumulate} {tied} compile {self.compile}"


@dataclass
class Outcome:
    """Everything that has to be equal. Tensors by parameter name; gradients of all steps."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def shape_of(tied: bool) -> ModelShape:
    """Nothing divides by 2, 3 or 4 ranks that does not have to."""
    return ModelConfig(
        num_layers=2, dim=30, num_heads=6, num_kv_heads=3, head_dim=10, ffn_dim=61, tied_embeddings=tied,
        vocab_multiple=1 if tied else 10, qk_norm=tied,
    ).shape(vocab_size=127)  # fmt: skip


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one step; the first sequences have few targets, the second of all none."""
    generator = torch.Generator().manual_seed(number)
    tokens_BL = torch.randint(127, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    targets_BL = torch.randint(127, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    share_B1 = torch.linspace(0.1, 1.0, GLOBAL_BATCH, dtype=torch.float64)[:, None]
    targets_BL[torch.rand(GLOBAL_BATCH, SEQ_LEN, dtype=torch.float64, generator=generator) > share_B1] = IGNORE
    targets_BL[1] = IGNORE
    return tokens_BL, targets_BL


def oracle(tied: bool) -> Outcome:
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(shape_of(tied))
    finally:
        torch.set_default_dtype(torch.float32)
    initialise(model, seed=7)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False,
    )  # fmt: skip
    outcome = Outcome()
    for number in range(STEPS):
        tokens_BL, targets_BL = batch_of(number)
        logits_BLV = model(tokens_BL)
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORE, reduction="mean")
        loss.backward()
        outcome.losses.append(loss.detach())
        outcome.gradients.append(gradients_of(model))
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATES[number]
        optimizer.step()
        optimizer.zero_grad()
    return finish(outcome, model, optimizer)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(value.grad) for name, value in model.named_parameters()}


def finish(outcome: Outcome, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    for name, parameter in model.named_parameters():
        outcome.weights[name] = local(parameter)
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            outcome.moments[f"{name}/{moment}"] = local(optimizer.state[parameter][moment])
    return outcome


def assembled(case: Case, by_rank: list[Outcome]) -> Outcome:
    """Whole tensors from every rank's rows; replicas must hold the same bits, as must losses and norms."""
    for outcome in by_rank[1:]:
        for kind in ("losses", "norms"):
            assert torch.equal(*(torch.stack(getattr(one, kind)) for one in (by_rank[0], outcome))), f"{case}: {kind}"

    def join(tables: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        joined = {}
        for name in tables[0]:
            parts = [table[name] for table in tables]
            for rank, part in enumerate(parts):
                assert torch.equal(part, parts[rank % case.shard]), f"{case}: {name} differs between replicas"
            joined[name] = torch.cat(parts[: case.shard]) if parts[0].ndim else parts[0]
        return joined

    first = by_rank[0]
    steps = [join([outcome.gradients[number] for outcome in by_rank]) for number in range(STEPS)]
    moments, weights = (join([getattr(outcome, kind) for outcome in by_rank]) for kind in ("moments", "weights"))
    return Outcome(first.losses, first.norms, steps, moments, weights)


def build(case: Case) -> tuple[Parallel, Mesh]:
    """From ``meta``, as a trainer does."""
    torch.set_default_dtype(torch.promote_types(case.dtype, torch.float32))
    with torch.device("meta"):
        model = Transformer(shape_of(case.tied), compute_dtype=case.dtype, loss_chunk=7)
    torch.set_default_dtype(torch.float32)
    mesh = build_mesh(MeshPlan(dp_replicate=case.replicate, dp_shard=case.shard), "cpu")
    layout = Layout(
        compute_dtype=case.dtype, reshard_after_forward=case.reshard, activation_checkpointing=case.activation,
        compile_backend=case.compile,
    )  # fmt: skip
    parallel = parallelize(model, mesh, layout)
    initialise(parallel.model, seed=7)
    return parallel, mesh


def backward(parallel: Parallel, mesh: Mesh, case: Case, number: int) -> torch.Tensor:
    """Forward and backward of this rank's part of a global batch; the loss of the whole."""
    tokens_BL, targets_BL = batch_of(number)
    total = (targets_BL != IGNORE).sum()
    mine = slice(mesh.dp_rank, None, mesh.dp_size)
    parts = [tensor[mine].tensor_split(case.accumulate) for tensor in (tokens_BL, targets_BL)]  # of unequal sizes
    inputs = [Inputs(tokens, targets, None, None) for tokens, targets in zip(*parts, strict=True)]
    objective, loss = (parallel.run.forward_backward(inputs, lambda loss_sum: loss_sum / total) / total).unbind()
    assert torch.allclose(objective, loss, rtol=1e-14 if case.dtype == torch.float64 else 1e-6)  # no z-loss here
    parallel.gradients.finish()
    if dist.is_initialized():
        dist.all_reduce(loss)
    return loss


def train(case: Case) -> Outcome:
    parallel, mesh = build(case)
    optimizer = build_optimizer(parallel.model, OPTIMIZER)
    outcome = Outcome()
    for number in range(STEPS):
        outcome.losses.append(backward(parallel, mesh, case, number))
        outcome.gradients.append(gradients_of(parallel.model))
        norm = parallel.gradients.norm()
        parallel.gradients.clip(MAX_NORM, norm)
        step(optimizer, LEARNING_RATES[number], skip=norm > 1e9)
        optimizer.zero_grad()
        outcome.norms.append(norm)
    return finish(outcome, parallel.model, optimizer)


def train_all(cases: list[Case]) -> list[Outcome]:
    return [train(case) for case in cases]


def ratios(expected: Outcome, found: Outcome) -> dict[str, tuple[float, str]]:
    """max|a − b| / max|b| of each kind's worst tensor, and its name."""
    tables: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for kind in ("losses", "norms"):
        pairs = enumerate(zip(getattr(expected, kind), getattr(found, kind), strict=True))
        tables[kind] = [(f"step {number}", a, b) for number, (a, b) in pairs]
    tables |= {"first gradients": [], "later gradients": []}
    for number, (a, b) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        assert a.keys() == b.keys()
        kind = "later gradients" if number else "first gradients"
        tables[kind] += [(f"step {number} {name}", a[name], b[name]) for name in a]
    for kind in ("moments", "weights"):
        a, b = getattr(expected, kind), getattr(found, kind)
        assert a.keys() == b.keys()
        tables[kind] = [(name, a[name], b[name]) for name in a]
    return {kind: max((ratio(a, b, name), name) for name, a, b in table) for kind, table in tables.items()}


def layouts(world: int) -> list[tuple[int, int, bool | int]]:
    if world == 1:
        return [(1, 1, True)]
    found: list[tuple[int, int, bool | int]] = [(world, 1, True), (1, world, True), (1, world, False)]
    return [*found, (1, 4, 2), (2, 2, True), (2, 2, False)] if world == 4 else found


def cases_of(world: int) -> list[Case]:
    """With 4 ranks all layouts times all kinds of recomputation; with fewer, what the number of ranks can change."""
    activations = ("none", "full", "selective") if world == 4 else ("none",)
    cases = []
    for (replicate, shard, reshard), activation in itertools.product(layouts(world), activations):
        cases += [
            Case(replicate, shard, reshard, activation, accumulate, tied=(len(cases) + number) % 4 in (0, 3))
            for number, accumulate in enumerate((1, 3))
        ]
    return cases


@pytest.fixture(scope="module")
def expected() -> dict[bool, Outcome]:
    return {tied: oracle(tied) for tied in (False, True)}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.long) for world in (1, 3, 4))])
def test_layouts_train_as_one_process_does(kept_ranks: Any, expected: dict[bool, Outcome], world: int) -> None:
    assert torch.stack(expected[False].norms).min() > MAX_NORM  # clipping is at work in every step
    cases = cases_of(world)
    check(cases, kept_ranks(train_all, world, cases), expected)


def check(cases: list[Case], by_rank: list[list[Outcome]], expected: dict[bool, Outcome]) -> None:
    failed = []
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        worst = ratios(expected[case.tied], assembled(case, list(outcomes)))
        line = f"{case}: " + ", ".join(f"{kind} {value:.1e} ({name})" for kind, (value, name) in worst.items())
        print(line)
        if any(value > TOLERANCE[kind] for kind, (value, _) in worst.items()):
            failed.append(line)
    assert not failed, "\n".join(failed)


@pytest.mark.slow
def test_one_process_without_a_group_trains_as_plain_torch(expected: dict[bool, Outcome]) -> None:
    cases = [
        Case(activation=activation, accumulate=accumulate, tied=tied)
        for activation, accumulate, tied in itertools.product(("none", "selective"), (1, 3), (False, True))
    ]
    check(cases, [train_all(cases)], expected)


@pytest.mark.slow
def test_a_runner_counts_unless_it_is_told_not_to() -> None:
    model = Transformer(shape_of(tied=False))
    initialise(model, seed=7)
    inputs = [Inputs(*batch_of(number), None, None) for number in range(2)]
    expected = sum(model(batch.tokens_BL, batch.targets_BL)[1].sum().item() for batch in inputs)
    assert Accumulation(model).counts
    torch.testing.assert_close(Accumulation(model).forward(inputs), torch.tensor([expected, expected]))
    assert not Accumulation(model, counts=False).forward(inputs).any()


@pytest.mark.long
def test_compiled_blocks_train_the_same(kept_ranks: Any, expected: dict[bool, Outcome]) -> None:
    cases = [
        Case(shard=2, reshard=True, activation="selective", accumulate=3, compile="aot_eager"),
        Case(replicate=2, activation="full", tied=True, compile="aot_eager"),
    ]
    check(cases, kept_ranks(train_all, 2, cases), expected)


class Float64Only(TorchDispatchMode):
    """Every operator's tensors; AdamW's count of steps and its skip flag are float32 scalars by contract."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.other, self.in_optimizer = 0, set[str](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if not isinstance(value, torch.Tensor) or not value.numel():  # FSDP2 of torch 2.11 makes one of nothing
                continue
            if value.is_floating_point() or value.is_complex():
                self.seen += 1
                if value.dtype != torch.float64 and not (self.in_optimizer and value.ndim == 0):
                    self.other.add(f"{func}: {value.dtype} {tuple(value.shape)}")
        return out


def dtypes_of_a_step(case: Case) -> tuple[int, set[str]]:
    parallel, mesh = build(case)
    optimizer = build_optimizer(parallel.model, OPTIMIZER)
    with Float64Only() as watch:
        backward(parallel, mesh, case, 0)
        norm = parallel.gradients.norm()
        parallel.gradients.clip(MAX_NORM, norm)
        watch.in_optimizer = True
        step(optimizer, 1e-2, skip=norm > 1e9)
    return watch.seen, watch.other


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(shard=2, activation="selective", accumulate=3),
        Case(shard=2, tied=True),
        Case(replicate=2, activation="full"),
    ],
    ids=str,
)
def test_a_float64_step_holds_no_float32_tensor(kept_ranks: Any, case: Case) -> None:
    for seen, other in kept_ranks(dtypes_of_a_step, 2, case):
        assert seen > 1000
        assert not other


def collectives(case: Case) -> dict[str, int]:
    parallel, mesh = build(case)
    with Collectives() as watch:
        backward(parallel, mesh, case, 0)
    watch.calls["allreduce"] -= 1  # the loss's own
    return dict(watch.calls)


@pytest.mark.slow
def test_what_is_sent_in_a_step_of_three_micro_batches(kept_ranks: Any) -> None:
    """Two blocks, norm with head, and the embedding are gathered and reduced apart; blocks that are resharded are
    gathered twice."""
    cases = (Case(shard=4), Case(shard=4, reshard=False), Case(2, 2), Case(4, 1))
    zero3, zero2, hsdp, ddp = (kept_ranks(collectives, 4, replace(case, accumulate=3))[0] for case in cases)
    assert zero3 == {"allgather": 3 * (4 + 2), "reduce_scatter": 3 * 4, "allreduce": 0}
    assert zero2 == {"allgather": 4, "reduce_scatter": 3 * 4, "allreduce": 0}
    assert hsdp == {"allgather": 3 * (4 + 2), "reduce_scatter": 3 * 4, "allreduce": 4}
    assert ddp == {"allreduce": 1}


def first_gradients(case: Case) -> dict[str, torch.Tensor]:
    parallel, mesh = build(case)
    backward(parallel, mesh, case, 0)
    return gradients_of(parallel.model)


@pytest.mark.slow
def test_bfloat16_gradients_are_summed_in_float32(kept_ranks: Any) -> None:
    """Over ranks and micro-batches: equal to one process's float32 sum to float32's precision, 2⁻⁸ times finer.

    Compared are the matrices in blocks, whose gradient is a bfloat16 product in every layout. FSDP2 hands out all
    weights in bfloat16, so embedding, head and norms see their gradient rounded once before the sum; DDP does not.
    """
    cases = [replace(case, accumulate=3, dtype=torch.bfloat16) for case in (Case(shard=4), Case(2, 2), Case(4))]
    model = build(replace(cases[0], shard=1))[0].model
    expected = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    tokens_BL, targets_BL = batch_of(0)
    for rank, number in itertools.product(range(4), range(3)):
        tokens, targets = (part[rank::4].tensor_split(3)[number] for part in (tokens_BL, targets_BL))
        model.zero_grad()
        (model(tokens, targets)[0] / (targets_BL != IGNORE).sum()).backward()
        for name, value in model.named_parameters():
            expected[name] += value.grad
    for case in cases:
        parts = kept_ranks(first_gradients, 4, case)
        for name, value in expected.items():
            found = torch.cat([part[name] for part in parts[: case.shard]])
            assert found.dtype == torch.float32
            fine = case.shard == 1 or (name.startswith("blocks") and "norm" not in name)
            error = ratio(value, found, name)
            assert error < (1e-6 if fine else 2e-2), f"{case}: {name}: {error:.1e}"


def placements(case: Case) -> dict[str, Any]:
    parallel, mesh = build(case)
    names = {name: getattr(value, "placements", None) for name, value in parallel.model.named_parameters()}
    fsdp = None if mesh.fsdp is None else (mesh.fsdp.mesh_dim_names, mesh.fsdp.mesh.tolist())
    return {"names": names, "fsdp": fsdp, "dp_rank": mesh.dp_rank, "ddp": mesh.ddp is not None}


def refusal(plan: MeshPlan) -> str:
    with pytest.raises(ValueError, match="the process group has") as caught:
        build_mesh(plan, "cpu")
    return str(caught.value)


@pytest.mark.parametrize("plan", [MeshPlan(), MeshPlan(dp_shard=4), MeshPlan(tp=3)], ids=str)
def test_a_mesh_is_of_all_ranks_and_of_no_others(kept_ranks: Any, plan: MeshPlan) -> None:
    said = f"{plan}: expected {plan.world_size} ranks, the process group has 2"
    assert kept_ranks(refusal, 2, plan) == [said] * 2


@pytest.mark.slow
def test_meshes_and_placements(kept_ranks: Any) -> None:
    names = list(dict(Transformer(shape_of(tied=False)).named_parameters()))
    for case, fsdp, placed in [
        (Case(replicate=4), None, None),
        (Case(shard=4), (("dp_shard",), [0, 1, 2, 3]), (Shard(0),)),
        (Case(replicate=2, shard=2), (("dp_replicate", "dp_shard"), [[0, 1], [2, 3]]), (Replicate(), Shard(0))),
    ]:
        case = replace(case, activation="selective")
        results = kept_ranks(placements, 4, case)
        assert [result["dp_rank"] for result in results] == [0, 1, 2, 3]
        for rank, result in enumerate(results):
            assert list(result["names"]) == names, "the layout changed a parameter's name"
            assert set(result["names"].values()) == {placed}
            assert result["ddp"] == (case.shard == 1)
            assert result["fsdp"] == fsdp, rank
