"""Describes a layout: the sizes of the mesh and the settings, as a config gives them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quern.model.config import ModelShape
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.balancing import Balancing
from quern.parallel.planning.context import Context
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.stages import num_stages, stage_layers, stages_of

if TYPE_CHECKING:
    import torch

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """A layout as a config gives it; built once a run (``quern.train.summary.layout_of``)."""

    compute_dtype: torch.dtype
    plan: MeshPlan = field(default_factory=MeshPlan)
    reshard_after_forward: bool | int = True
    zero: int | None = None
    """1: gradients stay whole until a step's last micro-batch; all else is in ``reshard_after_forward``."""
    activation_checkpointing: str = "none"
    activation_checkpointing_layers: int | None = None
    """Of each stage the first so many blocks recompute; None = all."""
    activation_memory_budget: float | None = None
    """Of what a compiled block would keep for backward, the share that it may; None = all."""
    compile_backend: str | None = None
    """Of ``torch.compile``, block by block; None = not compiled."""
    async_tp: bool = False
    tp_pieces: int = 1
    """In which the collectives beside products of ``tp`` travel."""
    nvlink_domain: int | None = None
    tp_across_domains: bool = False
    float8: Recipe | None = None
    """How the blocks' products are computed in FP8; None = in ``compute_dtype``."""
    weights_cast: str = "auto"
    """``auto``: once after each update where neither FSDP2 nor ``tp`` has them; ``per_use``: wherever they are used."""
    float8_all_gather: bool = False
    """FSDP2 gathers in FP8 what these products take."""
    bf16_gradients: bool = False
    """Gradients are summed and kept in BF16; else in the masters' dtype."""
    host_state: bool = False
    """Masters and moments are in host memory, and the device has weights in ``compute_dtype``."""
    schedule: str | None = None
    """Of a pipeline; None = 1f1b."""
    stages_per_rank: int | None = None
    stage_layers: tuple[int, ...] | None = None
    balancing: Balancing = field(default_factory=Balancing)
    """Of experts."""
    ep_node: int | None = None
    """Of the ranks of ``ep`` those on one node, to which a token travels once."""
    ep_float8: bool = False
    """Tokens travel to experts in FP8."""
    ep_backend: str = "torch"
    context: Context = field(default_factory=Context)
    """How the ranks of ``cp`` share a sequence."""
    micro_batch: int = 1
    seq_len: int = 1
    """Sequences of a micro-batch and their tokens, which a pipeline's buffers and cuts go by."""

    @property
    def tokens(self) -> int:
        """Of a sequence, those that a rank of ``cp`` computes."""
        return self.seq_len // self.plan.cp

    def keeps_weights(self, plan: MeshPlan) -> bool:
        """Whether each rank of a mesh keeps its weights as products take them, from one update to the next."""
        return self.weights_cast == "auto" and not plan.by_fsdp and plan.tp == 1

    def adds_gradients(self, plan: MeshPlan) -> bool:
        """Whether then the gradient of a weight is added to the step's as it is formed: in one process, but where
        ``torch.compile`` computes eagerly again, for which it saves the sum (torch 2.13)."""
        again = self.compile_backend == "eager" and self.activation_checkpointing != "none"
        return self.keeps_weights(plan) and plan.dp_replicate == plan.pp == 1 and not again

    def recomputed(self, layers: int) -> int:
        """How many of a stage's ``layers`` blocks recompute."""
        if self.activation_checkpointing == "none":
            return 0
        most = self.activation_checkpointing_layers
        return layers if most is None else min(layers, most)

    @property
    def scheduling(self) -> str:
        """``schedule`` with None resolved: one of :data:`quern.parallel.planning.schedules.SCHEDULES`."""
        return self.schedule or "1f1b"

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; the whole model is one where there is none."""
        return num_stages(self.scheduling, self.plan.pp, self.stages_per_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Numbers of the stages of a pipeline's rank, ascending."""
        return stages_of(rank, self.scheduling, self.plan.pp, self.stages_per_rank)

    def layers_of_stages(self, shape: ModelShape) -> tuple[range, ...]:
        """The layers of every stage in turn; raises :class:`InputError` as :func:`.stages.stage_layers` does."""
        return stage_layers(shape, self.num_stages, self.seq_len, self.stage_layers)
