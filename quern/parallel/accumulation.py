"""Gradient accumulation for models without a pipeline: runs one step's micro-batches one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from quern.parallel.context.inputs import Inputs
from quern.parallel.data import accumulation

__all__ = ["Accumulation", "Runner"]


class Runner(Protocol):
    """Runs micro-batches through a model, wherever its layers are. Collective."""

    def forward_backward(
        self, inputs: Sequence[Inputs], weigh: Callable[[Tensor], Tensor], losses: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Gradients of ``weigh(objective)`` of every micro-batch, summed, in ``.grad``; ``weigh`` is linear.

        Returns [2] in at least float32, detached: the sum of the objective, and of the cross-entropy alone, over this
        rank's targets, unweighed. Zero where another rank has them (``counts`` is False). ``losses`` is given every
        micro-batch's cross-entropies [B, L], detached, by its number, on ranks that compute them.
        """

    def forward(self, inputs: Sequence[Inputs], losses: dict[int, Tensor] | None = None) -> Tensor:
        """The same without gradients."""

    @property
    def counts(self) -> bool:
        """Whether this rank's sums count: of ranks that compute the same sums, one does."""


class Accumulation:
    """Forward and backward of each micro-batch in turn; DDP, HSDP and FSDP2 reduce as :func:`accumulation` says.

    ``model`` is wrapped already. ``counts``: see :class:`Runner`.
    """

    def __init__(self, model: nn.Module, *, counts: bool = True) -> None:
        self._model = model
        self.counts = counts

    def forward_backward(
        self, inputs: Sequence[Inputs], weigh: Callable[[Tensor], Tensor], losses: dict[int, Tensor] | None = None
    ) -> Tensor:
        """See :class:`Runner`."""
        sums, last = [], len(inputs) - 1
        for number, micro_batch in enumerate(inputs):
            with accumulation(self._model, number == last):
                loss_sum, nll_BL = self._run(micro_batch)
                weigh(loss_sum).backward()
            sums.append(torch.stack((loss_sum.detach(), nll_BL.sum())))
            if losses is not None:
                losses[number] = nll_BL
        return self._counted(sums)

    @torch.no_grad()
    def forward(self, inputs: Sequence[Inputs], losses: dict[int, Tensor] | None = None) -> Tensor:
        """See :class:`Runner`."""
        found = [self._run(micro_batch) for micro_batch in inputs]
        if losses is not None:
            losses |= {number: nll_BL for number, (_, nll_BL) in enumerate(found)}
        return self._counted([torch.stack((loss_sum, nll_BL.sum())) for loss_sum, nll_BL in found])

    def _run(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._model(inputs.tokens_BL, **inputs.behind)
        return found

    def _counted(self, sums: Sequence[Tensor]) -> Tensor:
        total = torch.stack(list(sums)).sum(0)
        return total if self.counts else torch.zeros_like(total)
