"""A model on a layout whose collectives of a step are counted: every one that torch dispatches, by the ranks of its
group, bytes and calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
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
from quern.parallel.planning.traffic import Step, traffic
from support.distributed.ranks import KeptRanks

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
    experts: tuple[tuple[str, Any], ...] = ()
    """Settings of those, by key."""
    node: int | None = None
    """Of ``ep``."""
    tokens_in_float8: bool = False

    def __str__(self) -> str:
        said = f"{self.plan} reshard {self.reshard} zero {self.zero} AC {self.activation} x{self.micro_batches}"
        said += f" {self.method}" if self.plan.cp > 1 else ""
        said += f" ep {self.plan.ep} {dict(self.experts)} node {self.node}" if self.plan.ep > 1 else ""
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
            sizes["moe"] |= dict(self.experts)
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
            ep_node=self.node, ep_float8=self.tokens_in_float8,
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

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._plan = mesh.plan
        stages = ["ep"] if len(mesh.expert_groups) == 1 else ["ep nodes", "ep in a node"]
        self._of_experts = {group.group_name: axis for group, axis in zip(mesh.expert_groups, stages, strict=False)}
        if mesh.expert_mesh is not None:
            self._of_experts[mesh.group("expert_shard").group_name] = "expert_shard"
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.bytes: Counter[tuple[str, str, int]] = Counter()
        self.away: Counter[tuple[str, str, int]] = Counter()
        """Of all-to-alls to experts, what goes to other ranks."""

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
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            kind, tensors = {
                "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
                "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
                "all_reduce_coalesced": "all_reduce", "all_reduce_coalesced_": "all_reduce",
                "all_to_all_single": "all_to_all",
            }[name], args[0]  # fmt: skip
            times = dist.get_world_size(group) if kind == "all_gather" else 1
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
        key = self._of_experts.get(group.group_name, axes), kind, len(ranks)
        self.calls[key] += 1
        self.bytes[key] += times * sum(tensor.nbytes for tensor in tensors)
        if key[0].startswith("ep"):
            stays = args[2][ranks.index(dist.get_rank())]
            self.away[key] += tensors[0][stays:].nbytes  # of equal rows

    @property
    def seen(self) -> Sent:
        return {key: (self.calls[key], self.bytes[key]) for key in self.calls}


def mesh_of(case: Case) -> Mesh:
    return build_mesh(case.plan, "cpu", case.layout.context.heads, case.node)


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
    generator = torch.Generator().manual_seed(1 + parallel.gradients.mesh.dp_rank)
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
        with Collectives(parallel.gradients.mesh) as watch:
            take(parallel, case)
        found.append(watch.seen)
    return found


def compare(run_ranks: Any, cases: list[Case]) -> None:
    """In fresh ranks, or in kept ones, which have a time limit of their own."""
    limit = {} if isinstance(run_ranks, KeptRanks) else {"timeout_s": 300}
    for rank, seen in enumerate(run_ranks(counted, cases[0].plan.world_size, cases, **limit)):
        for case, sent in zip(cases, seen, strict=True):
            assert sent == told(case, rank), f"{case}: rank {rank}"
