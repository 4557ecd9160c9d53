"""What a pipeline's ranks send each other besides a schedule's own messages: groups, their first call, validation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import Mesh, MeshPlan, build_mesh
from quern.parallel.planning.schedules import SCHEDULES

SEQ_LEN = 8
SHAPE = ModelConfig(num_layers=8, dim=8, num_heads=2, vocab_multiple=8).shape(20)


def build(schedule: str, mesh: Mesh, stages_per_rank: int | None = None) -> Parallel:
    with torch.device("meta"):
        model = Transformer(SHAPE, compute_dtype=torch.float64).double()
    layout = Layout(torch.float64, mesh.plan, schedule=schedule, stages_per_rank=stages_per_rank, seq_len=SEQ_LEN)
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


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_ranks_ask_for_their_messages_in_one_order(kept_ranks: Any, pp: int) -> None:
    """NCCL has one queue for two ranks, for both ways: a send that stands before the receive on one side and behind it
    on the other waits for ever, once it is larger than a buffer."""
    schedules = [(name, 2 if kind.stages_per_rank is None else None) for name, kind in SCHEDULES.items()]
    schedules += [("interleaved_1f1b", 8 // pp)] if pp == 2 else []
    by_rank = kept_ranks(messages, pp, pp, schedules, 3)
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


def test_all_ranks_join_before_two_of_them_send(kept_ranks: Any) -> None:
    """The first call of a group makes NCCL's communicator, and every rank of it has to take part."""
    assert kept_ranks(calls_before_the_first_step, 2) == [1, 1]
