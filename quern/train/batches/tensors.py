"""A rank's share of a step as tensors on the CPU, for trainers other than quern's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quern.train.batches.loader import MicroBatch

__all__ = ["MicroBatchTensors", "StepTensors", "tensors_of"]


@dataclass(frozen=True)
class MicroBatchTensors:
    """B sequences of L tokens that a rank computes at a time. Integers on the CPU; they may be written to."""

    tokens: Tensor
    """int64 [B, L]."""
    targets: Tensor
    """int64 [B, L]: the token after each; -100 where there is none to learn. They are shifted already."""
    positions: Tensor
    """int32 [B, L]; with ``document_mask`` they restart where a document starts."""
    documents: Tensor
    """int32 [B, L]: number of the document in its row, from 0; without ``document_mask`` all 0. A token attends to
    those of its own document alone."""
    cu_seqlens: Tensor
    """int32 [documents + 1]: where each starts among the B·L tokens, then B·L, as attention of variable length takes
    it; without ``document_mask`` rows."""
    places: Tensor
    """int64 [B]: place of each sequence in the step's global batch."""

    def for_transformers(self) -> dict[str, Any]:
        """What models of transformers (tested with 5.23) take. ``labels`` let them compute a loss, ``shift_labels`` are
        what it is of; by ``position_ids`` that restart they see that attention stays inside a document, but only where
        they keep no cache, and with flash attention only for one sequence at a time (``micro_batch`` 1)."""
        return {
            "input_ids": self.tokens, "position_ids": self.positions.long(), "labels": self.targets,
            "shift_labels": self.targets, "use_cache": False,
        }  # fmt: skip


@dataclass(frozen=True)
class StepTensors:
    """A rank's share of an optimizer step."""

    step: int
    """From 0."""
    data_step: int
    """Step of the order that it reads."""
    valid_tokens: int
    """Targets of the whole global batch, over all ranks: the loss is a sum over targets divided by it."""
    micro_batches: tuple[MicroBatchTensors, ...]


def tensors_of(batch: MicroBatch) -> MicroBatchTensors:
    """The arrays of a micro-batch as tensors, which share their memory."""
    arrays = (
        batch.tokens_BL,
        batch.targets_BL,
        batch.positions_BL,
        batch.documents_BL,
        batch.cu_seqlens,
        batch.indices,
    )
    return MicroBatchTensors(*map(torch.from_numpy, arrays))
