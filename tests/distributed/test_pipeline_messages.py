"""What a pipeline's ranks send each other besides a schedule's own messages: groups, their first call, validation."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.accumulation import Inputs
from quern.parallel.apply import Layout, Parallel, parallelize
from quern.parallel.mesh import Mesh, MeshPlan, _ends, build_mesh
from quern.parallel.schedules import SCHEDULES
from quern.parallel.traffic import Step, buffer_elements

SEQ_LEN = 8
SHAPE = ModelConfig(num_layers=8, dim=8, num_heads=2, vocab_multiple=8).shape(20)
TORCHS_LOG = "torch.distributed.pipelining"


def build(schedule: str, mesh: Mesh, stages_per_rank: int | None = None) -> Parallel:
    with torch.device("meta"):
        model = Transformer(SHAPE, compute_dtype=torch.float64).double()
    layout = Layout(torch.float64, schedule=schedule, stages_per_rank=stages_per_rank, seq_len=SEQ_LEN)
    parallel = parallelize(model, mesh, layout)
    initialise(parallel.model, 0)
    return parallel


def inputs(count: int) -> list[Inputs]:
    tokens_BL = torch.arange(SEQ_LEN)[None]
    return [Inputs(tokens_BL, tokens_BL, None, None)] * count


def messages(pp: int, schedules: list[tuple[str, int | None]], count: int) -> list[list[tuple[str, int]]]:
    """Of every validation: this rank's sends and receives, each with its peer, in the order in which they are asked
    for."""
    mesh = build_mesh(MeshPlan(pp=pp), "cpu")
    found: list[list[tuple[str, int]]] = []
    isend, recv = dist.isend, dist.recv

    def sent(*args: Any, group_dst: int, **kwargs: Any) -> Any:
        found[-1].append(("send", group_dst))
        return isend(*args, group_dst=group_dst, **kwargs)

    def received(*args: Any, group_src: int, **kwargs: Any) -> Any:
        found[-1].append(("receive", group_src))
        return recv(*args, group_src=group_src, **kwargs)

    for schedule, stages_per_rank in schedules:
        run = build(schedule, mesh, stages_per_rank).run
        found.append([])
        dist.isend, dist.recv = sent, received
        try:
            run.forward(inputs(count))
        finally:
            dist.isend, dist.recv = isend, recv
    return found


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_ranks_ask_for_their_messages_in_one_order(run_ranks: Any, pp: int) -> None:
    """NCCL has one queue for two ranks, for both ways: a send that stands before the receive on one side and behind it
    on the other waits for ever, once it is larger than a buffer."""
    schedules = [(name, 2 if kind.stages_per_rank is None else None) for name, kind in SCHEDULES.items()]
    schedules += [("interleaved_1f1b", 8 // pp)] if pp == 2 else []
    by_rank = run_ranks(messages, pp, pp, schedules, 3)
    other = {"send": "receive", "receive": "send"}
    for number, schedule in enumerate(schedules):
        compared = 0
        for low in range(pp):
            for high in range(low + 1, pp):
                own = [what for what, peer in by_rank[low][number] if peer == high]
                others = [other[what] for what, peer in by_rank[high][number] if peer == low]
                assert own == others, f"{schedule}: ranks {low} and {high}"
                compared += len(own)
        assert compared


def calls_before_the_first_step() -> int:
    """Calls of the pipeline's group that all its ranks take."""
    mesh = build_mesh(MeshPlan(pp=2), "cpu")
    all_reduce, found = dist.all_reduce, []

    def noted(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        found.append(group is mesh.pp)
        return all_reduce(*args, group=group, **kwargs)

    dist.all_reduce = noted
    try:
        build("1f1b", mesh)
    finally:
        dist.all_reduce = all_reduce
    return sum(found)


def test_all_ranks_join_before_two_of_them_send(run_ranks: Any) -> None:
    """The first call of a group makes NCCL's communicator, and every rank of it has to take part."""
    assert run_ranks(calls_before_the_first_step, 2) == [1, 1]


def ends_of(plans: list[MeshPlan]) -> list[tuple[list[int] | None, int, int]]:
    """Of each mesh: the ranks of ``ends``, what they add up to, and how many groups this rank made for them."""
    found = []
    for plan in plans:
        new_group, made = dist.new_group, []

        def counted(*args: Any, new_group: Any = new_group, made: list[int] = made, **kwargs: Any) -> Any:
            made.append(1)
            return new_group(*args, **kwargs)

        dist.new_group = counted
        try:
            ends = _ends(plan)
        finally:
            dist.new_group = new_group
        total = torch.tensor(float(dist.get_rank()))
        if ends is not None:
            dist.all_reduce(total, group=ends)
        found.append((None if ends is None else dist.get_process_group_ranks(ends), int(total), len(made)))
    return found


@pytest.mark.slow
def test_the_ends_of_a_pipeline_are_joined_by_themselves_alone(run_ranks: Any) -> None:
    """Each of thousands of pairs would else be waited for by all ranks. The same pair twice: two meshes."""
    plans = [MeshPlan(pp=2, tp=2), MeshPlan(pp=2, dp_shard=2), MeshPlan(pp=4), MeshPlan(pp=1, tp=4)]
    pairs: list[list[list[int]]] = [[[0, 2], [1, 3]], [[0, 2], [1, 3]], [[0, 3]], []]
    for rank, found in enumerate(run_ranks(ends_of, 4, plans)):
        for (ranks, total, made), expected in zip(found, pairs, strict=True):
            own = next((pair for pair in expected if rank in pair), None)
            assert ranks == own
            assert total == (rank if own is None else sum(own))
            assert made == (own is not None)


def log_levels() -> list[int]:
    """Of torch's log: before, with a pipeline, in a stage, after the step."""
    log = logging.getLogger(TORCHS_LOG)
    found = [log.level]
    parallel = build("1f1b", build_mesh(MeshPlan(pp=2), "cpu"))
    found.append(log.level)
    parallel.run._parts[0].module.register_forward_hook(lambda *_: found.append(log.level))
    parallel.run.forward_backward(inputs(2), lambda objective: objective)
    return [*found, log.level]


def test_torchs_log_is_silenced_for_a_step_alone(run_ranks: Any) -> None:
    for before, built, *inside, after in run_ranks(log_levels, 2):
        assert before == built == after
        assert set(inside) == {logging.CRITICAL}


def buffers(pp: int, schedules: list[tuple[str, int | None]], count: int) -> list[tuple[int, int]]:
    """Of each schedule: elements of what torch's stages keep to receive in, and of gradients left on them."""
    mesh = build_mesh(MeshPlan(pp=pp), "cpu")
    found = []
    for schedule, stages_per_rank in schedules:
        run = build(schedule, mesh, stages_per_rank).run
        run.forward_backward(inputs(count), lambda objective: objective)
        _, _, stages = run._schedule
        infos = [
            info
            for stage in stages
            for kept in (stage.args_recv_info, stage.grad_recv_info)
            for infos in kept.values()
            for info in infos
        ]
        kept = [info.buffer for info in infos if getattr(info, "buffer", None) is not None]
        found.append((sum(one.numel() for one in kept), sum(one.numel() for one in kept if one.grad is not None)))
    return found


def test_a_plan_counts_the_buffers_that_torch_keeps(run_ranks: Any) -> None:
    """And no gradients are left on them between steps."""
    schedules = [(name, 2 if kind.stages_per_rank is None else None) for name, kind in SCHEDULES.items()]
    by_rank = run_ranks(buffers, 2, 2, schedules, 4)
    for number, (schedule, stages_per_rank) in enumerate(schedules):
        step = Step(
            shape=SHAPE, plan=MeshPlan(pp=2), micro_batch=1, num_micro_batches=4, seq_len=SEQ_LEN, compute_bytes=8,
            reduce_bytes=8, schedule=schedule, stages_per_rank=stages_per_rank,
        )  # fmt: skip
        for rank in range(2):
            assert by_rank[rank][number] == (buffer_elements(step, rank), 0), (schedule, rank)
