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
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.config import ModelConfig, ModelShape
from quern.model.float8.recipe import Recipe
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context import operator
from quern.parallel.context.inputs import Inputs, Sharing
from quern.parallel.planning.context import Context, Method
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import AXES, Mesh, MeshPlan, build_mesh
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.traffic import Step, traffic

MICRO_BATCH = 2


@dataclass(frozen=True)
class Case:
    plan: MeshPlan
    reshard: bool | int = True
    zero: int | None = None
    activation: str = "none"
    recomputed: int | None = None
    micro_batches: int = 3
    tied: bool = False
    dtype: torch.dtype = torch.float64
    wide: bool = False
    """Tensors that are large beside the headers of messages."""
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    layers: int = 3
    kv_heads: int = 3
    pieces: int = 1
    float8: Recipe | None = None
    """By which weights are gathered in FP8; with sizes that it fits."""
    bf16_gradients: bool = False
    method: Method = "ulysses"
    """Of ``cp``."""
    ulysses: int | None = None
    mask: bool = False
    moe: bool = False
    """Experts in all layers but the first, and shared ones."""

    def __str__(self) -> str:
        said = f"{self.plan} reshard {self.reshard} zero {self.zero} AC {self.activation} x{self.micro_batches}"
        said += f" {self.method}" if self.plan.cp > 1 else ""
        return said + (f" {self.schedule}" if self.plan.pp > 1 else "") + (" tied" if self.tied else "")

    @property
    def shape(self) -> ModelShape:
        """Nothing divides by a number of ranks that does not have to."""
        tp = self.plan.tp > 1
        sizes: dict[str, Any] = {"dim": 30, "num_heads": 12, "num_kv_heads": self.kv_heads, "head_dim": 10}
        sizes["ffn_dim"] = 68 if tp else 61
        if self.float8 is not None:  # keys and values of one head are for two ranks, and travel whole
            sizes = {"dim": 128, "num_heads": 2, "num_kv_heads": self.kv_heads, "head_dim": 128, "ffn_dim": 256}
        if self.wide:
            sizes = {"dim": 256, "num_heads": 4, "ffn_dim": 768}
        if self.moe:
            sizes["moe"] = {"num_experts": 5, "top_k": 2, "ffn_dim": 14, "shared_ffn_dim": 22, "first_dense": 1}
        return ModelConfig(
            num_layers=self.layers, **sizes, vocab_multiple=12 if tp else 10, tied_embeddings=self.tied, qk_norm=True
        ).shape(vocab_size=127)  # fmt: skip

    @property
    def seq_len(self) -> int:
        return 256 if self.wide else 24 if self.plan.cp > 1 else 8

    @property
    def layout(self) -> Layout:
        return Layout(
            self.dtype, self.plan, reshard_after_forward=self.reshard, zero=self.zero,
            activation_checkpointing=self.activation,
            activation_checkpointing_layers=self.recomputed, micro_batch=MICRO_BATCH, seq_len=self.seq_len,
            schedule=self.schedule, tp_pieces=self.pieces, stages_per_rank=self.stages_per_rank,
            float8=self.float8, float8_all_gather=self.float8 is not None, bf16_gradients=self.bf16_gradients,
            context=Context(self.method, cp := self.plan.cp, self.ulysses or (cp if self.method == "ulysses" else 1)),
        )  # fmt: skip

    @property
    def step(self) -> Step:
        size = self.dtype.itemsize
        return Step(self.shape, self.layout, self.micro_batches, size, max(size, 4), 4096 if self.wide else 5)


Sent = dict[tuple[str, str, int], tuple[int, int]]
"""By (axes, collective, ranks): calls and bytes."""


def told(case: Case, rank: int) -> Sent:
    found: Sent = {}
    for row in traffic(case.step, rank):
        calls, payload = found.get((row.axis, row.collective, row.ranks), (0, 0))
        found[row.axis, row.collective, row.ranks] = (calls + row.calls, payload + row.payload)
    return found


class Collectives(TorchDispatchMode):
    """Every collective of more than one rank: who takes part, and how large the whole tensor is."""

    def __init__(self, plan: MeshPlan) -> None:
        super().__init__()
        self._plan = plan
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.bytes: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._see(func.overloadpacket.__name__.strip("_"), args)
        own = {"context_attention": operator.context_attention, "context_attention_backward": operator._backward}
        if func.namespace == "quern" and (inside := own.get(func.overloadpacket.__name__)):
            with self:  # what an operation of ours does in turn
                return inside._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _see(self, name: str, args: Any) -> None:
        if name in ("wait_tensor", "recv", "barrier"):
            return
        if isinstance(args[-1], str):  # a functional collective: the group's name stands last
            ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(args[-1]))
            kind, tensors = {
                "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
                "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
                "all_reduce_coalesced": "all_reduce", "all_reduce_coalesced_": "all_reduce",
                "all_to_all_single": "all_to_all",
            }[name], args[0]  # fmt: skip
            times = len(ranks) if kind == "all_gather" else 1
        else:
            kind, place, times = {
                "allgather_base": ("all_gather", 0, 1), "reduce_scatter_base": ("reduce_scatter", 1, 1),
                "allreduce": ("all_reduce", 0, 1), "allreduce_coalesced": ("all_reduce", 0, 1), "send": ("send", 0, 1),
            }[name]  # fmt: skip
            tensors = args[place]
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        places = [self._plan.coordinates(rank) for rank in ranks]
        axes = "+".join(axis for axis in AXES if len({place[axis] for place in places}) > 1)
        key = axes, kind, len(ranks)
        self.calls[key] += 1
        self.bytes[key] += times * sum(tensor.nbytes for tensor in tensors)

    @property
    def seen(self) -> Sent:
        return {key: (self.calls[key], self.bytes[key]) for key in self.calls}


def mesh_of(case: Case) -> Mesh:
    return build_mesh(case.plan, "cpu", case.layout.context.heads)


def build(case: Case) -> Parallel:
    torch.set_default_dtype(torch.promote_types(case.dtype, torch.float32))
    try:
        with torch.device("meta"):
            model = Transformer(case.shape, compute_dtype=case.dtype, loss_chunk=case.step.loss_chunk)
    finally:
        torch.set_default_dtype(torch.float32)
    parallel = parallelize(model, mesh_of(case), case.layout)
    initialise(parallel.model, seed=7)
    return parallel


def take(parallel: Parallel, case: Case) -> None:
    """One step's forward and backward passes, until all gradients are whole."""
    rows = np.arange(0, (MICRO_BATCH + 1) * case.seq_len, case.seq_len, dtype=np.int32)
    shared = None
    if case.plan.cp > 1:
        rank = parallel.gradients.mesh.rank("cp")
        shared = Sharing(case.layout.context, rank, case.seq_len).of(rows, None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    inputs = []
    for _ in range(case.micro_batches):
        tokens_BL, targets_BL = torch.randint(127, (2, MICRO_BATCH, case.seq_len), generator=generator).unbind()
        if shared is not None:
            tokens_BL, targets_BL = (own.gather(1, shared.positions_BR) for own in (tokens_BL, targets_BL))
        inputs.append(Inputs(tokens_BL, targets_BL, None, shared))
    parallel.model.zero_grad(set_to_none=True)
    if parallel.float8_gather is not None:
        parallel.float8_gather.update()
    parallel.run.forward_backward(inputs, lambda loss_sum: loss_sum / 100)
    parallel.gradients.finish()


def counted(cases: list[Case]) -> list[Sent]:
    found = []
    for case in cases:
        parallel = build(case)
        by_ddp = case.plan.dp_replicate > 1 and not case.plan.by_fsdp
        for _ in range(1 + by_ddp):  # DDP learns its buckets in the first and agrees on them in the second
            take(parallel, case)
        with Collectives(case.plan) as watch:
            take(parallel, case)
        found.append(watch.seen)
    return found


def compare(run_ranks: Any, cases: list[Case]) -> None:
    ranks = cases[0].plan.world_size
    for rank, seen in enumerate(run_ranks(counted, ranks, cases, timeout_s=300)):
        for case, sent in zip(cases, seen, strict=True):
            assert sent == told(case, rank), f"{case}: rank {rank}"


@pytest.mark.slow
def test_one_rank_sends_nothing(run_ranks: Any) -> None:
    compare(run_ranks, [Case(MeshPlan())])
    assert traffic(Case(MeshPlan()).step) == []


MULTI = tuple(name for name in SCHEDULES if name not in ("1f1b", "gpipe"))
TWO = MeshPlan(dp_shard=2)


@pytest.mark.slow
def test_experts_on_two_ranks(run_ranks: Any) -> None:
    tp = Case(MeshPlan(tp=2), kv_heads=2, moe=True)
    compare(run_ranks, [tp, replace(tp, activation="selective", pieces=2), Case(TWO, moe=True)])


@pytest.mark.long
def test_experts_recomputed_and_in_bf16(run_ranks: Any) -> None:
    tp = Case(MeshPlan(tp=2), kv_heads=2, moe=True)
    compare(run_ranks, [
        replace(tp, activation="full", recomputed=2), replace(tp, dtype=torch.bfloat16),
        Case(TWO, False, 1, moe=True, activation="full"), Case(MeshPlan(dp_replicate=2), moe=True),
    ])  # fmt: skip


@pytest.mark.slow
def test_two_ranks(run_ranks: Any) -> None:
    tp = Case(MeshPlan(tp=2), kv_heads=2)
    compare(run_ranks, [
        Case(MeshPlan(dp_replicate=2), dtype=torch.bfloat16), Case(TWO, activation="full", tied=True),
        Case(TWO, reshard=False), replace(tp, kv_heads=1), replace(tp, activation="selective", dtype=torch.bfloat16),
        replace(tp, activation="full", recomputed=2, pieces=2), replace(tp, activation="selective", pieces=4),
        replace(tp, kv_heads=1, dtype=torch.bfloat16, bf16_gradients=True),
        Case(TWO, dtype=torch.bfloat16, bf16_gradients=True), Case(TWO, False, 1, dtype=torch.bfloat16),
        Case(MeshPlan(pp=2), tied=True), Case(MeshPlan(pp=2), layers=4, schedule="zbv_zero_bubble", micro_batches=4),
    ])  # fmt: skip


@pytest.mark.slow
def test_two_ranks_share_a_sequence(run_ranks: Any) -> None:
    cp = Case(MeshPlan(cp=2), micro_batches=2, kv_heads=2)
    compare(run_ranks, [
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
    for rank, found in enumerate(run_ranks(on_the_wire, 4, cases, timeout_s=850)):
        for case, total in zip(cases, found, strict=True):
            rows = traffic(case.step, rank)
            told = sum(row.sent * (2 if row.collective == "reduce_scatter" else 1) for row in rows)
            assert total == pytest.approx(told, rel=1e-2), f"{case}: rank {rank}"
