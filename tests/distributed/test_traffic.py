"""What a step really sends over gloo, collective by collective, against :mod:`quern.parallel.planning.traffic`'s
arithmetic.

Counted twice: every collective that torch dispatches, by the ranks of its group, bytes and calls exactly; and the bytes
that the kernel has seen leave this process's sockets.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.model.float8.recipe import Recipe
from quern.parallel.planning.context import Method
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.traffic import traffic
from support.distributed.traffic_case import Case, build, compare, take


@pytest.mark.slow
def test_one_rank_sends_nothing(run_ranks: Any) -> None:
    compare(run_ranks, [Case(MeshPlan())])
    assert traffic(Case(MeshPlan()).step) == []


MULTI = tuple(name for name in SCHEDULES if name not in ("1f1b", "gpipe"))
TWO = MeshPlan(dp_shard=2)


@pytest.mark.slow
def test_experts_on_two_ranks(kept_ranks: Any) -> None:
    tp = Case(MeshPlan(tp=2), kv_heads=2, moe=True)
    compare(kept_ranks, [tp, replace(tp, activation="selective", pieces=2), Case(TWO, moe=True)])


@pytest.mark.long
def test_experts_recomputed_and_in_bf16(run_ranks: Any) -> None:
    tp = Case(MeshPlan(tp=2), kv_heads=2, moe=True)
    compare(run_ranks, [
        replace(tp, activation="full", recomputed=2), replace(tp, dtype=torch.bfloat16),
        replace(tp, activation="full", experts=(("shared_ffn_dim", 0),)),
        Case(TWO, False, 1, moe=True, activation="full"), Case(MeshPlan(dp_replicate=2), moe=True),
    ])  # fmt: skip


@pytest.mark.slow
def test_two_ranks(kept_ranks: Any) -> None:
    tp = Case(MeshPlan(tp=2), kv_heads=2)
    compare(kept_ranks, [
        Case(MeshPlan(dp_replicate=2), dtype=torch.bfloat16), Case(TWO, activation="full", tied=True),
        Case(TWO, reshard=False), replace(tp, kv_heads=1), replace(tp, activation="selective", dtype=torch.bfloat16),
        replace(tp, activation="full", recomputed=2, pieces=2), replace(tp, activation="selective", pieces=4),
        replace(tp, kv_heads=1, dtype=torch.bfloat16, bf16_gradients=True),
        Case(TWO, dtype=torch.bfloat16, bf16_gradients=True), Case(TWO, False, 1, dtype=torch.bfloat16),
        Case(MeshPlan(pp=2), tied=True), Case(MeshPlan(pp=2), layers=4, schedule="zbv_zero_bubble", micro_batches=4),
    ])  # fmt: skip


@pytest.mark.slow
def test_two_ranks_share_a_sequence(kept_ranks: Any) -> None:
    cp = Case(MeshPlan(cp=2), micro_batches=2, kv_heads=2)
    compare(kept_ranks, [
        cp, replace(cp, activation="full", kv_heads=1, dtype=torch.bfloat16),
        replace(cp, method="allgather", activation="selective"),
        replace(cp, method="allgather", activation="full", recomputed=2, dtype=torch.bfloat16),
        replace(cp, method="ring", activation="full", reshard=False),
    ])  # fmt: skip


@pytest.mark.long
def test_more_ranks_share_a_sequence(run_ranks: Any) -> None:
    cp = Case(MeshPlan(cp=4), micro_batches=2, kv_heads=2)
    four = MeshPlan(cp=2, dp_shard=2), MeshPlan(cp=2, dp_replicate=2), MeshPlan(cp=2, tp=2), MeshPlan(cp=2, pp=2)
    ways: list[Method] = ["ulysses", "allgather", "ring"]
    cases = [replace(cp, method=way, activation=how) for way in ways for how in ("none", "selective", "full")]
    cases += [replace(cp, method="usp", ulysses=2, activation=how) for how in ("none", "selective", "full")]
    cases += [replace(cp, plan=plan, method=way, reshard=plan.pp == 1) for plan in four for way in ways]
    compare(run_ranks, [case for case in cases if case.plan.pp == 1 or case.method != "ring"])
    pipe = replace(cp, plan=MeshPlan(cp=2, pp=2), reshard=False, layers=5, micro_batches=4)
    compare(run_ranks, [replace(pipe, method=way, schedule="zbv_zero_bubble") for way in ways[:2]])


@pytest.mark.long
def test_two_ranks_in_every_way(run_ranks: Any) -> None:
    tp, pp = Case(MeshPlan(tp=2), kv_heads=2), Case(MeshPlan(pp=2), micro_batches=4, layers=5)
    cases = [Case(MeshPlan(dp_replicate=2), tied=True), Case(TWO), Case(TWO, reshard=2, micro_batches=1)]
    cases += [replace(tp, activation=how, tied=True) for how in ("none", "full")]
    cases += [replace(pp, schedule=name, tied=tied) for name in SCHEDULES for tied in (False, True)]
    cases += [replace(pp, schedule=name, layers=8, stages_per_rank=4) for name in ("looped_bfs", "interleaved_1f1b")]
    compare(run_ranks, cases)


@pytest.mark.long
def test_four_ranks(run_ranks: Any) -> None:
    cases = [Case(plan, reshard) for plan in (MeshPlan(dp_shard=4), MeshPlan(2, 2)) for reshard in (True, False, 2)]
    cases += [Case(MeshPlan(dp_shard=4), reshard=4), Case(MeshPlan(2, 2), dtype=torch.bfloat16)]
    cases += [Case(MeshPlan(dp_replicate=4), wide=True), Case(MeshPlan(2, 2), False, 1, dtype=torch.bfloat16)]
    cases += [Case(MeshPlan(tp=2, dp_shard=2), False, 1, kv_heads=2, bf16_gradients=True, dtype=torch.bfloat16)]
    cases += [Case(MeshPlan(tp=2, dp_shard=2), how, kv_heads=2, activation="full") for how in (True, False, 2)]
    cases += [Case(MeshPlan(tp=2, dp_replicate=2), kv_heads=1), Case(MeshPlan(tp=4), kv_heads=2, tied=True)]
    compare(run_ranks, cases)


@pytest.mark.long
def test_pipelines_of_four_ranks(run_ranks: Any) -> None:
    fsdp = Case(MeshPlan(pp=2, dp_shard=2), reshard=False, micro_batches=4, layers=5, tied=True)
    cases = [replace(fsdp, reshard=how, schedule=name) for how in (True, 2) for name in ("1f1b", "interleaved_1f1b")]
    cases += [replace(fsdp, schedule=name, zero=how) for name in SCHEDULES for how in (None, 1)]
    # four stages a rank: torch keeps the weights of three, and gathers again
    cases += [replace(fsdp, schedule=name, layers=9, stages_per_rank=4) for name in MULTI[:3]]
    cases += [replace(fsdp, plan=MeshPlan(pp=2, dp_replicate=2)), replace(fsdp, plan=MeshPlan(pp=4))]
    compare(run_ranks, cases)
    tp = Case(MeshPlan(pp=2, tp=2), micro_batches=4, layers=5, kv_heads=1)
    cases = [replace(tp, schedule=name, tied=name != "1f1b") for name in SCHEDULES]
    compare(run_ranks, [*cases, *(replace(tp, schedule=name, pieces=2) for name in ("1f1b", "zbv_zero_bubble"))])


@pytest.mark.long
def test_eight_ranks(run_ranks: Any) -> None:
    plan = MeshPlan(pp=2, dp_shard=2, tp=2)
    for how, names in ((False, tuple(SCHEDULES)), (True, ("1f1b", "interleaved_1f1b"))):
        cases = [Case(plan, how, kv_heads=1, tied=True, layers=5, micro_batches=4, schedule=name) for name in names]
        compare(run_ranks, cases)
    tied = Case(MeshPlan(2, 2, tp=2), kv_heads=2, activation="selective", tied=True)
    compare(run_ranks, [tied, replace(tied, plan=MeshPlan(dp_replicate=2, pp=2, tp=2), micro_batches=2)])


@pytest.mark.long
def test_weights_gathered_in_fp8(run_ranks: Any) -> None:
    block = Case(MeshPlan(dp_shard=4), float8=Recipe("blockwise"), dtype=torch.bfloat16, kv_heads=1)
    cases = [
        block,
        replace(block, plan=MeshPlan(dp_shard=2, tp=2), float8=Recipe("tensorwise"), activation="full"),
        replace(block, plan=MeshPlan(dp_shard=2, tp=2), kv_heads=2, reshard=False),
        replace(block, reshard=False, zero=1),
        replace(block, plan=MeshPlan(pp=2, dp_shard=2), reshard=False, layers=4, micro_batches=4,
                schedule="zbv_zero_bubble"),
    ]  # fmt: skip
    compare(run_ranks, cases)
    for case in cases:
        weights = [0, 0]
        for place, step in enumerate(
            (case.step, replace(case.step, layout=replace(case.layout, float8_all_gather=False)))
        ):
            weights[place] = sum(row.payload for row in traffic(step) if row.what == "gather weights")
        assert 0.5 < weights[0] / weights[1] < 0.8  # embedding, head and norms travel as they are


def acknowledged() -> int:
    """Bytes that have left this process's TCP sockets and arrived (``tcpi_bytes_acked``, Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        if not Path(f"/proc/self/fd/{name}").is_socket():
            continue
        with socket.socket(fileno=os.dup(int(name))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 120)[0]
    return total


def settled() -> int:
    """When all that was sent has arrived everywhere: a barrier's few bytes say that everyone has sent, not more."""
    before = -1
    while before != (before := acknowledged()):
        time.sleep(0.02)
    return before


def on_the_wire(cases: list[Case]) -> list[int]:
    found = []
    for case in cases:
        parallel = build(case)
        for _ in range(2):
            take(parallel, case)
        dist.barrier()
        before = settled()
        dist.barrier()
        take(parallel, case)
        found.append(settled() - before)
        dist.barrier()
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count is Linux's")
def test_bytes_that_leave_the_sockets(run_ranks: Any) -> None:
    """Ring costs to 1 %, for headers and barriers; but gloo's reduce-scatter is an all-reduce, and costs one."""
    plans = [MeshPlan(dp_replicate=4), MeshPlan(dp_shard=4), MeshPlan(tp=4), MeshPlan(pp=2, dp_shard=2)]
    cases = [Case(plan, plan.pp == 1, wide=True, micro_batches=2, dtype=torch.bfloat16) for plan in plans]
    places = (("num_experts", 8), ("capacity", 1.25))  # which travel filled or not
    cases += [replace(cases[1], plan=MeshPlan(dp_shard=4, ep=4), moe=True, experts=places)]
    for rank, found in enumerate(run_ranks(on_the_wire, 4, cases, timeout_s=850)):
        for case, total in zip(cases, found, strict=True):
            rows = traffic(case.step, rank)
            told = sum(row.sent * (2 if row.collective == "reduce_scatter" else 1) for row in rows)
            assert total == pytest.approx(told, rel=1e-2), f"{case}: rank {rank}"
