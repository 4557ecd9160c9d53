"""Sums a step's losses by source, on the device, for the sum over ranks that the step takes anyway; and what has been
read of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quern.mixtures.order import Order
from quern.model.loss import IGNORE
from quern.train.batches.feed import StepInputs

__all__ = ["SourceLosses"]


class SourceLosses:
    """``names``: of each source of ``order``, by its number there."""

    def __init__(self, names: Sequence[str], order: Order) -> None:
        self._names, self._order = names, order

    def __len__(self) -> int:
        return 2 * len(self._names)

    def of_this_rank(self, batch: StepInputs, losses: Mapping[int, Tensor] | None, like: Tensor) -> Tensor:
        """[2 K] of K sources: nats and targets in this rank's sequences, as shares of the global batch's targets.

        ``losses``: [B, L] of each micro-batch, by number; None where another rank counts them."""
        if losses is None:
            return like.new_zeros(len(self))
        nats_S = torch.cat([losses[number].sum(-1, dtype=torch.float64) for number in range(len(batch.micro_batches))])
        targets_S = torch.cat([(inputs.targets_BL != IGNORE).sum(-1) for inputs in batch.micro_batches])
        own_KS = batch.sources_S == torch.arange(len(self._names), device=like.device)[:, None]
        sums = [torch.where(own_KS, value_S.double(), 0.0).sum(-1) for value_S in (nats_S, targets_S)]
        return (torch.cat(sums) / batch.valid_tokens).to(like.dtype)

    def read(self, values: Sequence[float]) -> dict[str, float]:
        """The mean loss of each source that has a target in the step, from the sums over ranks."""
        count = len(self._names)
        pairs = zip(self._names, values[:count], values[count:], strict=True)
        return {name: nats / targets for name, nats, targets in pairs if targets > 0}

    def shares(self, data_step: int) -> dict[str, dict[str, float]]:
        """Of several sources: which share of all samples up to the end of a data step the order has given of each, and
        which its weights plan."""
        if len(self._names) < 2:
            return {}
        end = self._order.first_sample(data_step + 1)
        starts = [phase.first_sample for phase in self._order.phases]
        planned = [0.0] * len(self._names)
        for phase, stop in zip(self._order.phases, [*starts[1:], end], strict=True):
            samples, whole = min(stop, end) - phase.first_sample, sum(phase.weights)
            for source, weight in enumerate(phase.weights if samples > 0 else ()):
                planned[source] += samples * weight / whole
        read = self._order.consumed(end)
        return {
            "read_by_source": {name: count / end for name, count in zip(self._names, read, strict=True)},
            "planned_by_source": {name: count / end for name, count in zip(self._names, planned, strict=True)},
        }
