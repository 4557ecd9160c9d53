"""Loss on the held-out documents, over the same windows every time, split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from quern.parallel.accumulation import Runner
from quern.parallel.context.inputs import Sharing
from quern.train.batches.feed import to_device
from quern.train.batches.held_out import HeldOut
from quern.train.batches.loader import IGNORE, Loader, StepBatch, open_loader
from quern.train.config import TrainConfig
from quern.train.processes.ranks import Ranks

__all__ = ["TOGETHER", "Validator"]

TOGETHER = 8
"""Micro-batches that a runner gets at a time, so that a pipeline's ranks work side by side, and gather their weights
once for all of them; a stage holds the hidden states of so many."""


@dataclass(frozen=True)
class _Phase:
    global_batch: int


class _FromTheStart:
    """The first ``count`` windows of one source, a batch at a time; what fills up the last batch has epoch 1."""

    def __init__(self, windows: int, count: int, batch: int) -> None:
        self.windows = (windows,)
        self.phases = (_Phase(batch),)
        self.steps = -(-count // batch)
        self._count, self._batch = count, batch

    def first_sample(self, step: int) -> int:
        return step * self._batch

    def global_batch_at(self, step: int) -> int:
        return self._batch

    def samples(self, positions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        epochs, windows = np.divmod(np.asarray(positions, np.uint64), np.uint64(self._count))
        return np.zeros_like(windows), epochs, windows


@dataclass(frozen=True)
class _Source:
    name: str
    is_set: bool
    loader: Loader
    steps: int


class Validator:
    """Mean loss a target, over the held-out windows of each source and each set, and over all of the sources."""

    def __init__(
        self, config: TrainConfig, held_out: Sequence[HeldOut], ranks: Ranks, dp_rank: int, dp_size: int, cache: str,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        self._ranks = ranks
        self._inputs = partial(to_device, device=ranks.device, document_mask=config.document_mask, sharing=sharing)
        self._sources = []
        for own in held_out:
            (windows,) = own.corpus.windows
            wanted = min(windows, config.validation.windows or windows)
            order = _FromTheStart(windows, wanted, config.micro_batch * dp_size)
            loader = open_loader(config, own.corpus, order, cache, dp_rank, dp_size)
            self._sources.append(_Source(own.name, own.is_set, loader, order.steps))

    def run(self, model: Runner) -> dict[str, Any]:
        """``loss`` (nats a target), ``tokens`` (targets) and the same by source (:func:`source_names`), and of the
        ``sets`` that are given. The first two are over the sources, over the sets where no source has held-out
        documents. Collective."""
        rows = [(source, self._mean(model, source)) for source in self._sources]
        sources = {source.name: row for source, row in rows if not source.is_set}
        sets = {source.name: row for source, row in rows if source.is_set}
        counted = (sources or sets).values()
        tokens = sum(row["tokens"] for row in counted)
        loss = sum(row["loss"] * row["tokens"] for row in counted) / max(tokens, 1)
        return {"loss": loss, "tokens": tokens, "sources": sources, **({"sets": sets} if sets else {})}

    def _mean(self, model: Runner, source: _Source) -> dict[str, Any]:
        summed = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        for first in range(0, source.steps, TOGETHER):
            steps = map(source.loader.take, range(first, min(first + TOGETHER, source.steps)))
            inputs = [self._inputs(batch) for step in steps for batch in _without_filling(step)]
            summed[0] += model.forward(inputs)[1]
            if model.counts:
                for batch in inputs:
                    summed[1] += (batch.targets_BL != IGNORE).sum()
        loss, tokens = self._ranks.sum(summed).tolist()
        return {"loss": loss / max(tokens, 1), "tokens": int(tokens)}


def _without_filling(step: StepBatch) -> Sequence[Any]:
    """Rows beyond the last window are forwarded, since every rank must take every forward, and count for nothing."""
    for batch in step.micro_batches:
        batch.targets_BL[batch.epochs > 0] = IGNORE
    return step.micro_batches
