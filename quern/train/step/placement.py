"""Gives experts other numbers, so that the ranks of ``parallel.ep`` have even loads.

An expert is its weights, its row of the router and its bias, each with their moments: moved together the model computes
what it did, and a checkpoint needs to say nothing. So a place is a number, and a layout deals places out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from quern.model.init import local_slice
from quern.model.moe.layer import MoE
from quern.parallel.apply import Parallel
from quern.parallel.planning.placing import placing
from quern.parallel.tensors.weights import to_local
from quern.train.history.ledger import Ledger
from quern.train.step.optimizer import Optimizer

__all__ = ["Placement"]

log = logging.getLogger(__name__)


class Placement:
    """Places experts anew every ``experts.place_interval`` steps, by what they were given since the last time."""

    def __init__(self, parallel: Parallel, optimizer: Optimizer, ledger: Ledger | None) -> None:
        self._parallel, self._optimizer, self._ledger = parallel, optimizer, ledger
        loads = parallel.loads
        self.interval = None if loads is None else loads.balancing.place_interval

    @torch.no_grad()
    def follow(self, done: int) -> None:
        """After ``done`` steps, their last update taken: place experts if it is time. Collective."""
        if self.interval is None or done % self.interval:
            return
        loads = self._parallel.loads
        assert loads is not None
        counts_NE = loads.since.long().tolist()
        loads.since.zero_()
        ep = self._parallel.gradients.mesh.plan.ep
        orders = [placing(counts, loads.moe, ep) for counts in counts_NE]
        moved = {row: order for row, order in enumerate(orders) if order != list(range(loads.moe.num_experts))}
        for row, order in moved.items():
            order_E = torch.tensor(order, device=loads.last.device)
            loads.last[row] = loads.last[row][order_E]
            for tensor in self._of_layer(loads.layers[row]):
                _renumber(tensor, order_E)
        if self._ledger is not None and moved:
            self._ledger.append(
                "placement", step=done, layers={str(loads.layers[row]): own for row, own in moved.items()}
            )
            log.info("after step %d: experts of %d layers are placed anew, by their loads", done - 1, len(moved))

    def _of_layer(self, layer: int) -> Iterator[Tensor]:
        """What has a row for each expert, in the same order on every rank that holds the layer."""
        moe = getattr(dict(self._parallel.weights.blocks.named_children()).get(str(layer)), "ffn", None)
        if not isinstance(moe, MoE):
            return
        for parameter in (moe.router.weight, *moe.experts.parameters()):
            yield parameter
            state = self._optimizer.state.get(parameter, {})
            yield from (value for _, value in sorted(state.items()) if isinstance(value, Tensor) and value.ndim)
        if moe.bias is not None:
            yield moe.bias


def _renumber(tensor: Tensor, order_E: Tensor) -> None:
    """Rows in this order; of one tensor at a time the whole is on every rank, and this rank's part once more."""
    whole = tensor
    if isinstance(whole, DTensor):
        for axis in range(whole.device_mesh.ndim):  # one by one, as torch warns of several at once
            placements = [Replicate() if other <= axis else own for other, own in enumerate(whole.placements)]
            whole = whole.redistribute(placements=placements)
    rows, *columns = local_slice(tensor)
    to_local(tensor).copy_(to_local(whole)[:, *columns][order_E[rows]])
