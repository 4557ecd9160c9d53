"""Every pipeline schedule against one process of plain autograd in float64.

The oracle shares the network with the pipeline and nothing else: whole model, all logits, ``F.cross_entropy``, one
micro-batch after the other. Stages have unequal numbers of layers, micro-batches unequal numbers of targets (one of
them none), and weights move between steps, so that whatever is kept from a step before shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from quern.model.attention import Documents
from quern.model.config import ModelConfig, ModelShape
from quern.model.init import local_slice
from quern.model.loss import IGNORE
from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.bubble import Action, order
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.parallel.planning.schedules import SCHEDULES, why_no_split_backward
from support.distributed.watch import Floats

ROWS, SEQ_LEN, VOCAB, RATE = 2, 12, 50, 0.3
CUTS = {2: (3, 1), 4: (2, 1, 1, 3), 6: (2, 1, 3, 1, 2, 1), 8: (2, 1, 1, 1, 2, 1, 1, 1)}
"""Layers of each stage, by the number of stages."""
VALIDATED = (1, 3)
"""Micro-batches of the forwards without gradients: fewer than stages, and no multiple of anything."""
TIED_LATER = [pytest.param(False, marks=pytest.mark.exhaustive), pytest.param(True, marks=pytest.mark.long)]


@dataclass(frozen=True)
class Case:
    schedule: str
    pp: int = 2
    shard: int = 1
    replicate: int = 1
    tp: int = 1
    micro_batches: tuple[int, ...] = (8, 8, 8)
    """Of each step."""
    stages_per_rank: int = 2
    tied: bool = False
    documents: bool = True
    activation: str = "none"
    z_loss: float = 0.0
    reshard: bool | int = False
    compile: str | None = None
    kv_heads: int = 2

    @property
    def plan(self) -> MeshPlan:
        return MeshPlan(pp=self.pp, dp_replicate=self.replicate, dp_shard=self.shard, tp=self.tp)

    @property
    def per_rank(self) -> int:
        return SCHEDULES[self.schedule].stages_per_rank or self.stages_per_rank


def whole_model(case: Case) -> Transformer:
    model = Transformer(shape_of(case), attention="sdpa", loss_chunk=7, z_loss=case.z_loss).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.2 + ("norm" in name))
    return model


def shape_of(case: Case) -> ModelShape:
    config = ModelConfig(
        num_layers=sum(CUTS[case.pp * case.per_rank]), dim=16, num_heads=4, num_kv_heads=case.kv_heads, ffn_dim=24,
        qk_norm=True, tied_embeddings=case.tied, vocab_multiple=8,
    )  # fmt: skip
    return config.shape(VOCAB)


def micro_batches(case: Case, step: int, dp_rank: int, count: int) -> list[Inputs]:
    """Those of one data-parallel rank."""
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * step + 100 * dp_rank + number)
        tokens_BL = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
        targets_BL = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
        wanted = 0.0 if number == 1 else 0.2 + 0.8 * number / count
        targets_BL[torch.rand(ROWS, SEQ_LEN, generator=generator) >= wanted] = IGNORE
        positions_BL, documents = None, None
        if case.documents:
            starts_BL = torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.3
            starts_BL[:, 0] = True
            ids_BL = starts_BL.cumsum(1) - 1
            starts_N = starts_BL.flatten().nonzero()[:, 0]
            # any will do but those that begin anew with each document: they turn as those that do not
            positions_BL = torch.randint(SEQ_LEN, (ROWS, SEQ_LEN), generator=generator)
            ends_N = torch.cat((starts_N, torch.tensor([ROWS * SEQ_LEN]))).int()
            documents = Documents(ids_BL, ends_N, int(ends_N.diff().max()))
        found.append(Inputs(tokens_BL, targets_BL, positions_BL, documents))
    return found


@dataclass
class Outcome:
    """Of each step, and of the validations after the last: sums of objective and cross-entropy; gradients by name."""

    sums: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    validated: list[torch.Tensor]


def plain(case: Case) -> Outcome:
    model = whole_model(case)
    outcome = Outcome([], [], [])

    def sums_of(inputs: Inputs) -> torch.Tensor:
        logits_NV = model(inputs.tokens_BL, None, inputs.positions_BL, inputs.documents).flatten(0, 1)
        targets_N = inputs.targets_BL.flatten()
        nll = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")
        z = logits_NV[targets_N != IGNORE].logsumexp(1).square().sum()
        return torch.stack((nll + case.z_loss * z, nll))

    def batches(step: int, count: int) -> list[Inputs]:
        return [inputs for rank in range(case.plan.dp_size) for inputs in micro_batches(case, step, rank, count)]

    for step, count in enumerate(case.micro_batches):
        model.zero_grad()
        total = torch.zeros(2, dtype=torch.float64)
        for inputs in batches(step, count):
            sums = sums_of(inputs)
            (sums[0] / valid_of(step)).backward()
            total += sums.detach()
        outcome.sums.append(total)
        outcome.gradients.append({name: value.grad.clone() for name, value in model.named_parameters()})
        with torch.no_grad():
            for value in model.parameters():
                value -= RATE * value.grad
    with torch.no_grad():
        for count in VALIDATED:
            outcome.validated.append(torch.stack([sums_of(inputs) for inputs in batches(99, count)]).sum(0))
    return outcome


def valid_of(step: int) -> float:
    """What a step's loss is divided by; any number does."""
    return 37.0 + step


def build(case: Case, meshes: dict[MeshPlan, Any]) -> Parallel:
    if case.plan not in meshes:
        meshes[case.plan] = build_mesh(case.plan, "cpu")
    with torch.device("meta"):
        model = Transformer(shape_of(case), compute_dtype=torch.float64, loss_chunk=7, z_loss=case.z_loss).double()
    layout = Layout(
        compute_dtype=torch.float64, plan=case.plan, reshard_after_forward=case.reshard,
        activation_checkpointing=case.activation, compile_backend=case.compile, schedule=case.schedule,
        stages_per_rank=case.stages_per_rank, stage_layers=CUTS[case.pp * case.per_rank],
        micro_batch=ROWS, seq_len=SEQ_LEN,
    )  # fmt: skip
    parallel = parallelize(model, meshes[case.plan], layout)
    whole = dict(whole_model(case).named_parameters())
    with torch.no_grad():
        for name, value in parallel.model.named_parameters():
            source = whole["embed.weight" if name == "tied.weight" else name]
            local = value.to_local() if isinstance(value, DTensor) else value
            local.copy_(source[local_slice(value)])
    return parallel


def train(case: Case, meshes: dict[MeshPlan, Any]) -> dict[str, Any]:
    parallel = build(case, meshes)
    mesh = meshes[case.plan]
    parts = [part.module for part in parallel.run._parts]
    calls = []
    for part in parts:
        part.register_forward_hook(lambda *_: calls.append(1))
    outcome, orders = Outcome([], [], []), []

    def counted(sums: torch.Tensor) -> torch.Tensor:
        assert sums.dtype == torch.float64
        assert parallel.run.counts or not sums.any()
        dist.all_reduce(sums)
        return sums

    for step, count in enumerate(case.micro_batches):
        for value in parallel.model.parameters():
            value.grad = None
        inputs = micro_batches(case, step, mesh.dp_rank, count)
        with recorded() as actions:
            sums = parallel.run.forward_backward(inputs, lambda objective, step=step: objective / valid_of(step))
        orders.append(actions)
        assert len(calls) == count * len(parts), "a forward that no micro-batch asked for"
        calls.clear()
        parallel.gradients.finish()
        outcome.sums.append(counted(sums))
        outcome.gradients.append({name: whole_tensor(value.grad) for name, value in parallel.model.named_parameters()})
        with torch.no_grad():
            for value in parallel.model.parameters():
                value -= RATE * value.grad
    for count in VALIDATED:
        outcome.validated.append(counted(parallel.run.forward(micro_batches(case, 99, mesh.dp_rank, count))))
        calls.clear()
    return {"outcome": outcome, "orders": orders, "counts": parallel.run.counts, "pp": mesh.rank("pp")}


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextlib.contextmanager
def recorded() -> Iterator[list[Action]]:
    """What torch's schedules have this rank's stages do."""
    actions: list[Action] = []
    methods = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
    before = {name: getattr(PipelineStage, name) for name in methods}

    def wrapped(name: str, kind: str) -> Any:
        def method(self: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            whole = kwargs.get("full_backward", True)
            actions.append(Action(self.stage_index, kind if whole else "I", number))
            return before[name](self, number, *args, **kwargs)

        return method

    for name, kind in methods.items():
        setattr(PipelineStage, name, wrapped(name, kind))
    try:
        yield actions
    finally:
        for name, method in before.items():
            setattr(PipelineStage, name, method)


def train_all(cases: list[Case]) -> list[dict[str, Any]]:
    meshes: dict[MeshPlan, Any] = {}
    return [train(case, meshes) for case in cases]


def check(kept_ranks: Any, cases: list[Case]) -> None:
    (world,) = {case.plan.world_size for case in cases}
    if why_no_split_backward():
        cases = [case for case in cases if not SCHEDULES[case.schedule].splits_backward]
    by_rank = kept_ranks(train_all, world, cases)
    for number, case in enumerate(cases):
        expected = plain(case)
        results = [results[number] for results in by_rank]
        last = 0 if SCHEDULES[case.schedule].v_shaped else case.pp - 1
        assert sum(result["counts"] for result in results) == case.plan.dp_size
        assert all(result["pp"] == last for result in results if result["counts"])
        for result in results:
            compare(case, result["outcome"], expected)
            for count, actions in zip(case.micro_batches, result["orders"], strict=True):
                assert actions == order(case.schedule, case.pp, case.per_rank, count)[result["pp"]], case
        names = {name for result in results for name in result["outcome"].gradients[0]} - {"tied.weight"}
        assert names == set(expected.gradients[0]), case


def compare(case: Case, found: Outcome, expected: Outcome) -> None:
    for what in ("sums", "validated"):
        for own, other in zip(getattr(found, what), getattr(expected, what), strict=True):
            assert ((own - other).abs() <= 1e-12 * other.abs()).all(), f"{case}: {what}: {own} for {other}"
    for step, (gradients, others) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        for name, own in gradients.items():
            other = others["embed.weight" if name == "tied.weight" else name]
            error, scale = (own - other).abs().max(), other.abs().max()
            limit = 1e-12 if step == 0 else 1e-10
            assert own.shape == other.shape
            assert scale > 0, f"{case}: step {step}: {name}: nothing is compared"
            assert error <= limit * scale, f"{case}: step {step}: {name}: {error / scale:.1e}"


def takes(schedule: str, pp: int) -> Case:
    """Whatever number of micro-batches the schedule takes, another one in the second step."""
    least = 2 * pp if schedule == "dualpipe_v" else pp
    return Case(schedule, pp, micro_batches=(least, 2 * pp + 2, least))


@pytest.mark.slow
def test_two_ranks_are_one_process(kept_ranks: Any) -> None:
    cases = [Case("1f1b", micro_batches=(3, 2), tied=True), Case("zbv_zero_bubble", micro_batches=(4,))]
    check(kept_ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.long), True], ids=["untied", "tied"])
def test_every_schedule_over_two_ranks(kept_ranks: Any, tied: bool) -> None:
    cases = [replace(takes(schedule, 2), tied=tied, documents=tied) for schedule in SCHEDULES]
    cases.append(Case("interleaved_1f1b", stages_per_rank=3, micro_batches=(1, 6, 3), tied=tied))
    check(kept_ranks, cases)


@pytest.mark.parametrize("tied", TIED_LATER, ids=["untied", "tied"])
def test_every_schedule_over_four_ranks(kept_ranks: Any, tied: bool) -> None:
    check(kept_ranks, [replace(takes(schedule, 4), tied=tied, documents=not tied) for schedule in SCHEDULES])


@pytest.mark.parametrize("tied", TIED_LATER, ids=["untied", "tied"])
def test_every_schedule_with_sharded_stages(kept_ranks: Any, tied: bool) -> None:
    cases = [replace(takes(schedule, 2), shard=2, tied=tied, z_loss=0.01) for schedule in SCHEDULES]
    # torch keeps three stages of a rank gathered at a time
    interleaved = ("interleaved_1f1b", "interleaved_zero_bubble")
    cases += [replace(takes(schedule, 2), shard=2, tied=tied, stages_per_rank=4) for schedule in interleaved]
    check(kept_ranks, cases)


@pytest.mark.long
def test_recomputed_and_compiled_blocks(kept_ranks: Any) -> None:
    cases = [
        replace(takes(schedule, 2), activation=activation, documents=activation == "full")
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
        for activation in ("full", "selective")
    ]
    cases.append(replace(takes("1f1b", 2), compile="aot_eager", activation="selective", micro_batches=(4,)))
    check(kept_ranks, cases)


@pytest.mark.long
def test_weights_gathered_again_for_backward(kept_ranks: Any) -> None:
    check(kept_ranks, [replace(takes(schedule, 2), shard=2, reshard=True) for schedule in ("1f1b", "interleaved_1f1b")])


@pytest.mark.long
def test_replicated_stages(kept_ranks: Any) -> None:
    check(kept_ranks, [replace(takes(schedule, 2), replicate=2) for schedule in ("gpipe", "dualpipe_v")])


def fail_in_a_stage(schedule: str) -> None:
    """Rank 1's blocks refuse the second micro-batch."""
    parallel = build(Case(schedule), {})
    if dist.get_rank() == 1:
        block = next(iter(parallel.model.blocks.values()))
        calls = iter(range(100))

        def refuse(module: Any, args: Any) -> None:
            if next(calls) == 1:
                raise ValueError("attention: expected another device")

        block.register_forward_pre_hook(refuse)
    parallel.run.forward_backward(micro_batches(Case(schedule), 0, 0, 4), lambda objective: objective)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stage"), [("1f1b", "stage 1 (layers 3 to 3)"), ("zbv_zero_bubble", "stage 1 (layers 2 to 2)")]
)
def test_an_error_in_a_stage_says_what_and_where(kept_ranks: Any, ranks: Any, schedule: str, stage: str) -> None:
    """The layers' own error, not torch's list of all actions; the other rank's collectives fail."""
    with pytest.raises(ranks.RankError) as caught:
        kept_ranks(fail_in_a_stage, 2, schedule)
    said = caught.value.failed[1]
    assert f"ValueError: attention: expected another device\nin pipeline {stage}, micro-batch 1" in said
    assert "ERROR HERE" not in said
    assert "failed to run forward" not in said


def float64_only(schedule: str) -> tuple[int, set[str]]:
    parallel = build(Case(schedule, z_loss=0.01), {})
    inputs = micro_batches(Case(schedule), 0, 0, 4)
    with Floats() as watch:
        parallel.run.forward_backward(inputs, lambda objective: objective / 3)
        parallel.run.forward(inputs[:2])
    return watch.seen, watch.other


@pytest.mark.slow
def test_a_float64_step_holds_no_float32_tensor(kept_ranks: Any) -> None:
    for seen, other in kept_ranks(float64_only, 2, "1f1b"):
        assert seen > 1000
        assert not other


@pytest.mark.long
def test_stages_of_split_tensors(kept_ranks: Any) -> None:
    cases = [
        replace(takes(schedule, 2), tp=2, tied=tied, z_loss=0.01, kv_heads=1 if tied else 2)
        for tied, schedule in ((False, "1f1b"), (True, "1f1b"), (False, "zbv_zero_bubble"), (True, "zbv_zero_bubble"))
    ]
    check(kept_ranks, cases)
