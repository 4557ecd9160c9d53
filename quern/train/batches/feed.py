"""Prefetches the loader's arrays as tensors on the device, and measures the waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from quern.model.attention import Documents
from quern.parallel.context.inputs import Inputs, Sharing, moved
from quern.train.batches.loader import Loader, MicroBatch, StepBatch

__all__ = ["Feed", "Origin", "StepInputs", "to_device"]


@dataclass(frozen=True)
class Origin:
    """The origin of a micro-batch's sequences; each [B], on the host."""

    places: np.ndarray
    """In the global batch."""
    sources: np.ndarray
    """Numbers of the order, as ``epochs`` and ``windows`` are."""
    epochs: np.ndarray
    windows: np.ndarray


@dataclass(frozen=True)
class StepInputs:
    """A rank's share of a step, as tensors on the device."""

    data_step: int
    valid_tokens: int
    """Targets of the whole global batch, over all ranks."""
    micro_batches: tuple[Inputs, ...]
    origins: tuple[Origin, ...]
    """Of each micro-batch."""
    sources_S: torch.Tensor
    """The number of each sequence's source, of all micro-batches in turn."""
    wait_s: float
    """Time the loop stood still for it."""


def to_device(
    batch: MicroBatch, device: torch.device, *, document_mask: bool, sharing: Sharing | None = None
) -> Inputs:
    """Without document masks the model needs neither positions nor boundaries. ``sharing``: of the rows with the other
    ranks of ``cp``; what comes then is of this rank's tokens."""
    tokens, targets = moved(batch.tokens_BL, device), moved(batch.targets_BL, device)
    positions = moved(batch.positions_BL, device) if document_mask else None
    documents = None
    if document_mask:
        documents = Documents(
            ids_BL=moved(batch.documents_BL, device),
            cu_seqlens=moved(_padded(batch.cu_seqlens), device),
            max_seqlen=_bound(batch),
        )
    if sharing is None:
        return Inputs(tokens, targets, positions, documents)
    shared = sharing.of(batch.cu_seqlens, documents, device)
    own = shared.positions_BR
    tokens, targets = tokens.gather(1, own), targets.gather(1, own)
    return Inputs(tokens, targets, None if positions is None else positions.gather(1, own), shared)


def _padded(cu_seqlens: np.ndarray) -> np.ndarray:
    """Up to a power of two with empty documents at the end: few shapes, so few graphs and few allocations."""
    size = 1 << (len(cu_seqlens) - 1).bit_length()
    return np.concatenate([cu_seqlens, np.full(size - len(cu_seqlens), cu_seqlens[-1], cu_seqlens.dtype)])


def _bound(batch: MicroBatch) -> int:
    """The longest document's tokens, up to a power of two: attention kernels start a block for each of them in every
    document, the bound's value is part of a compiled graph, and the exact one differs in every batch."""
    longest = int(np.diff(batch.cu_seqlens).max())
    return min(1 << (longest - 1).bit_length(), batch.tokens_BL.shape[1])


class Feed:
    """Steps in order, from data step ``first`` on, ``depth`` of them ahead of need."""

    def __init__(
        self, loader: Loader, device: torch.device, *, document_mask: bool, sharing: Sharing | None = None,
        depth: int = 4,
    ) -> None:  # fmt: skip
        self._loader = loader
        self._device = device
        self._to_device = partial(to_device, device=device, document_mask=document_mask, sharing=sharing)
        self._depth = depth
        self._batches: Iterator[StepBatch] | None = None
        self.waited_s = 0.0
        """Time the loop has stood still for all steps so far."""

    def start(self, first: int, stop: int) -> None:
        """Start reading data steps [first, stop)."""
        self._batches = iter(self._loader.prefetch(first, stop, self._depth))

    def take(self, data_step: int) -> StepInputs:
        """The next step, which must be ``data_step``."""
        assert self._batches is not None, "start() comes first"
        began = time.perf_counter()
        batch = next(self._batches)
        wait = time.perf_counter() - began
        self.waited_s += wait
        assert batch.data_step == data_step, f"expected data step {data_step}, the loader gave {batch.data_step}"
        inputs = tuple(map(self._to_device, batch.micro_batches))
        origins = tuple(Origin(b.indices, b.sources, b.epochs, b.windows) for b in batch.micro_batches)
        sources = moved(np.concatenate([own.sources for own in origins]).astype(np.int64), self._device)
        return StepInputs(data_step, batch.valid_tokens, inputs, origins, sources, wait)

    def close(self) -> None:
        """Stop the reading thread."""
        self._loader.close()
