"""Balances the loads of experts on any layout: the losses of each micro-batch, and once a step the biases, by counts of
the global batch.

What a rank's routers choose is noted in a row a layer (:mod:`quern.model.moe.noting`); one sum over all ranks makes
them the global batch's. Ranks that hold the same layer have other tokens each, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quern.model.config import ModelShape
from quern.model.moe.balance import balance_losses, carry, z_losses
from quern.model.moe.layer import MoE
from quern.model.moe.noting import FIGURES, listen, note_routing
from quern.model.moe.routing import Routing
from quern.model.transformer import Block, Transformer
from quern.parallel.context.inputs import Inputs, Shared
from quern.parallel.planning.balancing import Balancing

__all__ = ["SUMMARY", "ExpertLoads", "Routed"]

SUMMARY = ("max_over_mean", "unused", "dropped", "entropy", "logits_rms")
"""Of a step's loads: the greatest of an expert over the mean of its layer's, the number of experts that no token chose,
the share of assignments that were dropped, a token's entropy in nats, and the root mean square of logits."""


@dataclass(frozen=True, eq=False)
class Routed:
    """Which experts the documents of a micro-batch chose, or its rows where documents are not masked: S of them."""

    edges: Tensor
    """int64 [S + 1]: where they start in the rows laid end to end, then the end of all."""
    documents_T: Tensor
    """Of each of this rank's tokens."""
    counts_NSE: Tensor
    """int32, of this rank's tokens: 0 in layers that it does not hold."""


class ExpertLoads:
    """The loads of all layers with experts of a model, of which this rank may hold some.

    ``sharing``: names of the groups of ranks that compute other tokens of the same rows. ``part``: which part of its
    rows' tokens this rank routes, of how many. ``ep``: ranks that the experts are dealt out over.
    """

    def __init__(
        self, shape: ModelShape, balancing: Balancing, seq_len: int, device: torch.device, sharing: Sequence[str] = (),
        part: tuple[int, int] = (0, 1), ep: int = 1,
    ) -> None:  # fmt: skip
        assert shape.moe is not None
        self.moe, self.balancing, self.seq_len, self.sharing = shape.moe, balancing, seq_len, tuple(sharing)
        self.layers = [layer for layer in range(shape.num_layers) if shape.moe.is_sparse(layer)]
        self.noted = torch.zeros(
            len(self.layers), shape.moe.num_experts + len(FIGURES), dtype=torch.float64, device=device
        )
        """[layers with experts, E + 3], of this step: of this rank, and once :meth:`update` was called of all."""
        self.last = torch.zeros(len(self.layers), shape.moe.num_experts, dtype=torch.float64, device=device)
        """[layers with experts, E]: counts of the last step whose update was applied."""
        self.since = torch.zeros_like(self.last)
        """[layers with experts, E]: counts of the steps since experts were placed, where they are."""
        self.factor = torch.zeros((), dtype=torch.float64, device=device)
        self._biases: dict[int, nn.Module] = {}
        self._part, self._ep = part, ep
        self._routed: list[Routed] = []
        self._forwards = [0] * len(self.layers)

    def watch(self, part: Transformer, seq_len: int) -> None:
        """Note what the routers of a model, or of a part of one, choose, and let them learn to choose evenly. In place.
        ``seq_len``: the tokens of a row that this rank's routers see."""
        for number, block in part.blocks.items():
            assert isinstance(block, Block)
            if isinstance(block.ffn, MoE):
                row = self.layers.index(int(number))
                self._biases[row] = block.ffn
                watched = _Watched(self, block.ffn, torch.tensor(row), self.noted[row], self.last[row], seq_len)
                block.ffn.route = watched.route  # type: ignore[method-assign]

    def begin(self, sequences: int, loss_scale: Tensor, micro_batches: Sequence[Inputs] = ()) -> None:
        """A step of so many sequences begins. :meth:`routed` is to tell of this rank's ``micro_batches``."""
        self.noted.zero_()
        self.factor.copy_(loss_scale).div_(sequences)  # not before: a scale is of float32
        self._routed, self._forwards = [self._by_document(own) for own in micro_batches], [0] * len(self.layers)
        listen(self._hear if micro_batches else None)

    def routed(self) -> list[Routed]:
        """Of each micro-batch, once all forwards of the step are done."""
        listen(None)
        return self._routed

    def _by_document(self, inputs: Inputs) -> Routed:
        rows, documents, device = len(inputs.tokens_BL), inputs.documents, self.noted.device
        positions_BR = torch.arange(self.seq_len, device=device).expand(rows, -1)
        if isinstance(documents, Shared):
            positions_BR, documents = documents.positions_BR, documents.whole
        starts_B = self.seq_len * torch.arange(rows + 1, device=device)
        edges = starts_B if documents is None else documents.cu_seqlens.long()
        at_T = (positions_BR.chunk(self._part[1], dim=1)[self._part[0]] + starts_B[:-1, None]).flatten()
        counts = torch.zeros(len(self.layers), len(edges) - 1, self.moe.num_experts, dtype=torch.int32, device=device)
        return Routed(edges, torch.searchsorted(edges, at_T, right=True) - 1, counts)

    def _hear(self, layer: int, chosen_TK: Tensor) -> None:
        own = self._routed[self._forwards[layer]]  # forwards are in the order of micro-batches, in a pipeline too
        self._forwards[layer] += 1
        at_S = (own.documents_T[:, None] * self.moe.num_experts + chosen_TK).flatten()
        own.counts_NSE[layer].view(-1).scatter_add_(0, at_S, torch.ones_like(at_S, dtype=torch.int32))

    @torch.no_grad()
    def update(self, skip: Tensor | None) -> None:
        """Sum up the step's loads over all ranks, and move biases by them unless ``skip``, 0-d, is 1. Collective."""
        if dist.is_initialized():
            dist.all_reduce(self.noted)
        counts_NE = self.noted[:, : self.moe.num_experts]
        applied = torch.ones_like(self.factor) if skip is None else 1 - skip.to(self.factor.dtype)
        self.last.copy_(torch.where(applied > 0, counts_NE, self.last))
        if self.balancing.place_interval is not None:
            self.since += counts_NE
        if self.balancing.bias_rate == 0:
            return
        # whole numbers, compared without rounding
        less_NE = (counts_NE.sum(dim=1, keepdim=True) - counts_NE * self.moe.num_experts).sign()
        for row, module in self._biases.items():
            bias_E = module.bias
            assert isinstance(bias_E, Tensor)
            moved_E = bias_E + self.balancing.bias_rate * less_NE[row].to(bias_E.dtype)
            if self.balancing.center_bias:
                moved_E = moved_E - moved_E.mean()
            bias_E.copy_(torch.where(applied > 0, moved_E, bias_E))

    def sent(self) -> Tensor:
        """:attr:`noted`, once :meth:`update` was called, on its way to the host."""
        return self.noted.to("cpu", non_blocking=True, copy=True)

    def read(self, noted: Tensor, *, counts: bool) -> dict[str, Any]:
        """The step's line for the metrics, by what :meth:`sent` gave: the :data:`SUMMARY`, ``max_over_mean_of_layer``
        by the layer's number, with ``ep`` the greatest load of a rank over the mean as ``max_over_mean_of_ranks``, and
        with ``counts`` those of all experts of each such layer."""
        counts_NE = noted[:, : self.moe.num_experts]
        dropped, entropy, logits = noted[:, self.moe.num_experts :].sum(dim=0)
        assigned = counts_NE.sum()
        tokens = assigned / self.moe.top_k
        greatest_N = counts_NE.amax(dim=1) / counts_NE.mean(dim=1)
        figures = (
            greatest_N.max(), (counts_NE == 0).sum().to(assigned.dtype), dropped / assigned, entropy / tokens,
            (logits / tokens / self.moe.num_experts).sqrt(),
        )  # fmt: skip
        by_layer = {str(n): float(f"{value:.4g}") for n, value in zip(self.layers, greatest_N.tolist(), strict=True)}
        told = dict(zip(SUMMARY, torch.stack(figures).tolist(), strict=True)) | {"max_over_mean_of_layer": by_layer}
        if self._ep > 1:
            ranks_NR = counts_NE.unflatten(1, (self._ep, -1)).sum(dim=2)
            told["max_over_mean_of_ranks"] = float((ranks_NR.amax(dim=1) / ranks_NR.mean(dim=1)).max())
        return told | ({"counts": counts_NE.long().tolist()} if counts else {})

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs beside the biases, which are the model's; empty where that is nothing."""
        globally = self.balancing.balance_over == "global" and self.balancing.balance_loss
        kept = {"last": self.last} if globally else {}
        return kept if self.balancing.place_interval is None else kept | {"since": self.since}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What :meth:`state_dict` gave; without it, or of other layers, the first step's shares are even."""
        for name, own in (("last", self.last), ("since", self.since)):
            if name in state and state[name].shape == own.shape:
                own.copy_(state[name])


@dataclass(frozen=True, eq=False)
class _Watched:
    """A router's choice, noted, with the gradient of its losses. What differs from layer to layer are tensors: compiled
    blocks of a number would each have a graph of their own, of which torch makes eight at most."""

    loads: ExpertLoads
    module: MoE
    row: Tensor
    """0-d, on the host: which of the layers with experts it is."""
    noted: Tensor
    last_E: Tensor
    tokens: int

    def route(self, x_TD: Tensor) -> Routing:
        found = MoE.route(self.module, x_TD)
        if not torch.is_grad_enabled():
            return found
        balancing, loads = self.loads.balancing, self.loads
        scores_TE = found.scores_TE.detach()
        shares_TE = scores_TE / (scores_TE.sum(dim=1, keepdim=True) + 1e-20)
        figures = torch.stack((
            (found.sent_TK == loads.moe.num_experts).sum().to(scores_TE.dtype),
            torch.special.entr(shares_TE).sum(),
            found.logits_TE.detach().square().sum(),
        ))  # fmt: skip
        note_routing(found.chosen_TK, figures, self.noted, self.row)
        loss: Tensor | None = None
        if balancing.balance_loss:
            losses = balance_losses(
                found, loads.moe, len(x_TD) // self.tokens, loads.seq_len, balancing.balance_over,
                self.last_E, self._total,
            )  # fmt: skip
            loss = balancing.balance_loss * losses
        if balancing.z_loss:
            z = balancing.z_loss * z_losses(found, loads.seq_len)
            loss = z if loss is None else loss + z
        return found if loss is None else found._replace(weights_TK=carry(found.weights_TK, loss, loads.factor))

    def _total(self, counts: Tensor) -> Tensor:
        for group in self.loads.sharing:
            counts = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(counts, "sum", group))
        return counts
