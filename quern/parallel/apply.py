"""Applies a layout to a model; this is the one place that defines the order of application."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quern.model.float8.delayed import Amaxes
from quern.model.float8.torchao import Torchao
from quern.model.moe.layer import MoE
from quern.model.moe.noting import noting_nothing
from quern.model.transformer import Block, Transformer
from quern.parallel.accumulation import Accumulation, Runner
from quern.parallel.activation import checkpoint_blocks
from quern.parallel.context.attention import share_sequence
from quern.parallel.context.inputs import Inputs
from quern.parallel.data import gradients_in, materialise, replicate, shard
from quern.parallel.experts.deal import exchange_tokens, split_experts
from quern.parallel.experts.deepep import open_buffer
from quern.parallel.experts.loads import ExpertLoads
from quern.parallel.float8_gather import Float8Gather
from quern.parallel.gradients import Gradients
from quern.parallel.host_masters import HostMasters, cast_weights
from quern.parallel.kept_weights import KeptWeights
from quern.parallel.pipeline import Pipeline, local_view, my_stages
from quern.parallel.planning.float8 import layers_in_float8, use_float8
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import Mesh
from quern.parallel.tensors.split import split_tensors
from quern.torch_versions import divide_exactly, keep_order, set_memory_budget

__all__ = ["Parallel", "parallelize"]


@dataclass(frozen=True)
class Parallel:
    """A model with its layout applied: what trains it, and its views from outside."""

    model: Transformer
    """This rank's parameters, each under its global name, wrapped by nothing. In a pipeline it is not called."""
    run: Runner
    gradients: Gradients
    float8_gather: Float8Gather | None = None
    """To be updated whenever weights have changed, before the next forward; None where none is gathered in FP8."""
    amaxes: Amaxes | None = None
    """To be rolled after each step; None without delayed scaling."""
    kept: Sequence[KeptWeights] = ()
    """Of each part, what is kept of its weights; nothing where :meth:`Layout.keeps_weights` says no."""
    masters: HostMasters | None = None
    """None where weights are their own masters."""
    loads: ExpertLoads | None = None
    """None where a model has no experts."""

    @property
    def weights(self) -> Transformer:
        """The model whose parameters are the masters: what an optimizer updates, and a checkpoint holds."""
        return self.model if self.masters is None else self.masters.model

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context for forwards outside of a step, as in validation."""
        with noting_nothing(), nullcontext() if self.amaxes is None else self.amaxes.kept():
            yield

    def begin(self, sequences: int, loss_scale: Tensor, micro_batches: Sequence[Inputs] = ()) -> None:
        """A step of so many sequences begins; see :meth:`quern.parallel.experts.loads.ExpertLoads.begin`."""
        if self.loads is not None:
            self.loads.begin(sequences, loss_scale, micro_batches)

    def extra(self) -> dict[str, Tensor]:
        """What a step changes besides parameters and moments, by name, the same on every rank."""
        kept = {} if self.amaxes is None else {"float8.history": self.amaxes.history}
        loads = {} if self.loads is None else self.loads.state_dict()
        return kept | {f"experts.{name}": value for name, value in loads.items()}


def parallelize(model: Transformer, mesh: Mesh, layout: Layout, device: torch.device | None = None) -> Parallel:
    """Stages → experts → tensors → sequence → FP8 → checkpointing → compile → shard → memory → kept weights →
    replicate. Wrong orders run, and train wrongly or waste memory.

    ``model`` is whole, and may be on ``meta``: then its weights are allocated here, each rank's share alone, and hold
    nothing until :func:`quern.model.init.initialise` or a checkpoint fills them. ``device``: None = the current one of
    the mesh's kind.
    """
    device = device or torch.device(mesh.device_type)
    if layout.compile_backend is not None:
        set_memory_budget(layout.activation_memory_budget)
    if layout.tp_pieces > 1 and layout.compile_backend is not None:
        keep_order()
    if layout.float8 is not None and layout.compile_backend is not None:
        divide_exactly()
    float8, amaxes = layout.float8, None
    if float8 is not None and float8.implementation == "torchao":
        float8 = Torchao.of(float8)
    if float8 is not None and float8.delayed:
        amaxes = Amaxes(layers_in_float8(model.shape, mesh.plan.tp, float8), device)
    master = next(model.parameters()).dtype
    cast = layout.host_state and layout.compute_dtype != master
    loads = None
    if model.shape.moe is not None:
        routes = mesh.rank("tp"), mesh.plan.tp
        loads = ExpertLoads(
            model.shape, layout.balancing, layout.seq_len, device, mesh.shares_rows, routes, mesh.plan.ep
        )
    buffer = None
    if model.shape.moe is not None and layout.ep_backend == "deepep":
        tokens = layout.micro_batch * layout.tokens
        buffer = open_buffer(mesh.expert_groups[0], tokens, model.shape.dim, model.shape.moe.top_k)
    stages = my_stages(model.shape, mesh, layout)
    # first: the rest is local
    parts = [model] if stages is None else [model.slice_layers(stage.layers) for stage in stages]
    wrapped: list[nn.Module] = []
    kept: list[KeptWeights] = []
    for part in parts:
        if loads is not None and mesh.experts is not None:
            split_experts(part, mesh.experts)
        if mesh.tp is not None:
            # before all that must see local shapes
            split_tensors(part, mesh.tp, async_tp=layout.async_tp, pieces=layout.tp_pieces)
        if mesh.expert_groups:
            exchange_tokens(part, mesh, float8=layout.ep_float8, buffer=buffer)
        if mesh.context_groups:
            share_sequence(part, layout.seq_len, mesh.context("heads"), mesh.context("shards"), layout.context.ring)
        if loads is not None:
            loads.watch(part, layout.tokens // mesh.plan.tp)
        if float8 is not None:
            use_float8(part, float8, mesh.plan.tp, amaxes)  # goes by local shapes, and is compiled
        blocks = list(part.blocks.children())
        recomputed = blocks[: layout.recomputed(len(blocks))]
        checkpoint_blocks(recomputed, layout.activation_checkpointing)  # before compiling, which must contain it
        if layout.compile_backend is not None:
            for module in (module for block in blocks for module in _compiled(block, mesh.plan.ep)):
                module.compile(backend=layout.compile_backend)  # before sharding, whose hooks stay outside the graphs
            part.loss_compiler = layout.compile_backend
        if cast:
            cast_weights(
                part, layout.compute_dtype, sharded=mesh.fsdp is not None, head=layout.adds_gradients(mesh.plan)
            )
        if mesh.fsdp is not None:  # owns the parameters from here on: whatever changes modules comes before
            shard(
                part, mesh.fsdp, compute_dtype=layout.compute_dtype,
                reshard_after_forward=layout.reshard_after_forward, bf16_gradients=layout.bf16_gradients,
                scatter_once=layout.zero == 1, expert_mesh=mesh.expert_fsdp,
            )  # fmt: skip
        materialise(part, device)  # after sharding: no rank ever holds the whole model
        if layout.bf16_gradients or cast:
            gradients_in(part, torch.bfloat16 if layout.bf16_gradients else master)  # of the tensors that are trained
        if layout.keeps_weights(mesh.plan):
            adds = layout.adds_gradients(mesh.plan)
            compiler = layout.compile_backend
            kept.append(KeptWeights(part, layout.compute_dtype, add_gradients=adds, compiler=compiler, cast=cast))
        trains = any(parameter.requires_grad for parameter in part.parameters())
        # last: buckets are views of gradients
        wrapped.append(replicate(part, mesh.ddp) if mesh.ddp is not None and trains else part)
    gather = None
    if layout.float8_all_gather:
        assert layout.float8 is not None
        gather = Float8Gather(parts, layout.float8, mesh, layout.compute_dtype, layout.compile_backend)
    view = model if stages is None else local_view(model, parts)
    masters = HostMasters(view, parts, master, kept) if layout.host_state else None
    run: Runner
    if stages is None:
        run = Accumulation(wrapped[0], counts=mesh.rank("tp") == 0)
    else:
        run = Pipeline(parts, stages, mesh, layout, device)
    return Parallel(view, run, Gradients(view, mesh), gather, amaxes, kept, masters, loads)


def _compiled(block: nn.Module, ep: int) -> list[nn.Module]:
    """What has a graph of its own: a block, or where its tokens travel to experts, so that the host waits for counts
    and FSDP2 has the experts apart, what comes before."""
    if ep == 1 or not isinstance(block, Block) or not isinstance(block.ffn, MoE):
        return [block]
    return [block.attention_norm, block.attention, block.ffn_norm, *([block.ffn.shared] if block.ffn.shared else [])]
