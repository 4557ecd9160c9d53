"""Layout settings other than the sizes of the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quern.model.float8.recipe import Recipe

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Layout settings other than the sizes of its mesh."""

    compute_dtype: torch.dtype
    reshard_after_forward: bool | int = True
    activation_checkpointing: str = "none"
    compile_backend: str | None = None
    """Of ``torch.compile``, block by block; None = not compiled."""
    async_tp: bool = False
    float8: Recipe | None = None
    """How the blocks' products are computed in FP8; None = in ``compute_dtype``."""
    float8_all_gather: bool = False
    """FSDP2 gathers in FP8 what these products take."""
    schedule: str = "1f1b"
    """Of a pipeline; one of :data:`quern.parallel.planning.schedules.SCHEDULES`."""
    stages_per_rank: int | None = None
    stage_layers: tuple[int, ...] | None = None
    micro_batch: int = 1
    seq_len: int = 1
    """Sequences of a micro-batch and their tokens, which a pipeline's buffers and cuts go by."""
