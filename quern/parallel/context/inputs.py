"""Micro-batches as a model takes them: cuts a rank's tokens out of one, and tells attention which keys its queries
attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quern.model.attention import Documents
from quern.parallel.planning.context import Context
from quern.parallel.planning.segments import (
    Segments,
    deal,
    document_starts,
    gathered_segments,
    ring_segments,
    tokens_of,
)

__all__ = ["Inputs", "Shared", "Sharing", "moved"]


@dataclass(frozen=True)
class Inputs:
    """One micro-batch on the device, as the model takes it."""

    tokens_BL: Tensor
    targets_BL: Tensor
    positions_BL: Tensor | None
    documents: Documents | Shared | None
    weights_B: Tensor | None = None
    """By what each row's part in what is minimised is multiplied; None: 1."""

    @property
    def behind(self) -> dict[str, Any]:
        """The arguments of :meth:`quern.model.transformer.Transformer.forward` behind ``tokens_BL``, by name."""
        return {name: value for name, value in vars(self).items() if name != "tokens_BL"}


@dataclass(frozen=True, eq=False)
class Shared:
    """Where the documents of a micro-batch are, for ranks that share its rows; in place of
    :class:`quern.model.attention.Documents`. R: this rank's tokens of a row."""

    whole: Documents | None
    """Of the whole rows; None without document masks."""
    positions_BR: Tensor
    """int64: the position in its row of each of this rank's tokens."""
    told: list[Tensor]
    """For :func:`quern.parallel.context.operator.context_attention`; empty where heads are all that is shared."""

    @property
    def max_seqlen(self) -> int:
        """As of :class:`quern.model.attention.Documents`, and so is what follows."""
        return self.whole.max_seqlen if self.whole is not None else 0

    @property
    def tensors(self) -> list[Tensor]:
        return [self.positions_BR, *([] if self.whole is None else self.whole.tensors), *self.told]

    def of_other(self, tensors: Sequence[Tensor], max_seqlen: int) -> Shared:
        positions_BR, *rest = tensors
        whole = None if self.whole is None else self.whole.of_other(rest[:2], max_seqlen)
        return Shared(whole, positions_BR, list(rest[0 if whole is None else 2 :]))


@dataclass(frozen=True)
class Sharing:
    """A rank's part in ``cp``. ``rank``: its place among the ranks of it."""

    context: Context
    rank: int
    seq_len: int

    def of(self, cu_seqlens: NDArray[np.int32], whole: Documents | None, device: torch.device) -> Shared:
        """``cu_seqlens``: where documents start in the rows laid end to end, then B·L, as the loader gives it."""
        starts = document_starts(cu_seqlens)
        places_ABa = deal(starts, self.seq_len, self.context)
        shards, own = self.context.shards, self.rank // self.context.heads
        told: list[Tensor] = []
        if shards > 1 and self.context.ring:
            for step in range(shards):
                told += _told(ring_segments(places_ABa, starts, own, (own - step) % shards), device)
        elif shards > 1:
            told = _told(gathered_segments(places_ABa, starts, own), device)
        positions_BR = tokens_of(self.rank, places_ABa, self.context) % self.seq_len
        return Shared(whole, moved(positions_BR, device), told)


def _told(segments: Segments, device: torch.device) -> list[Tensor]:
    queries_T = np.zeros(0, np.int64) if segments.queries_T is None else segments.queries_T
    longest = [int(np.diff(own).max(initial=0)) for own in (segments.cu_queries, segments.cu_keys)]
    arrays = (queries_T, segments.cu_queries, segments.keys_U, segments.cu_keys)
    sizes = torch.tensor([*longest, segments.causal, *(len(array) for array in arrays)])
    # a compiled block has a graph of its own for each size of 0 or 1
    return [*(moved(np.append(array, np.zeros(2, array.dtype)), device) for array in arrays), sizes]


def moved(array: NDArray[np.integer], device: torch.device) -> Tensor:
    """On the device, where it may still be on its way; nothing is waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else tensor
