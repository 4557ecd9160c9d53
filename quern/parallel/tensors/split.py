"""Tensor and sequence parallelism (Shoeybi et al. 2019, Korthikanti et al. 2022): splits a model's matrices over ranks.

Queries, keys, values and the feed-forward's two entries are split by rows, that is by heads and by width; the two
products that lead back into the residual stream by columns; embedding and head by rows of the vocabulary. Between them
the stream is sharded along the sequence: ``x_BlD``, with l = L / ranks.

What is split becomes a DTensor under the same name, so that FSDP2 shards it further and a checkpoint knows its whole
shape. Norms stay whole on every rank, and so do keys and values where there are more ranks than heads of them. **Such
a parameter's gradient is a partial sum**, of this rank's tokens or heads: :class:`quern.parallel.gradients.Gradients`
adds them up once a step.

The model's seams are replaced on the instance; its modules and their names are what they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from quern.errors import InputError
from quern.model.config import ModelShape
from quern.model.moe.layer import MoE
from quern.model.transformer import Attention, Block, FeedForward, Linear, Transformer
from quern.parallel.tensors.collectives import Ranks, gather, gather_multiply, multiply_scatter, sum_scatter
from quern.parallel.tensors.weights import split, to_local

__all__ = ["split_tensors"]


def split_tensors(model: Transformer, mesh: DeviceMesh, *, async_tp: bool = False, pieces: int = 1) -> None:
    """Split a whole model, or part of one, over a 1-D mesh. In place; sends nothing.

    Weights may be on ``meta``; values that are there stay, each rank's share of them. The model then takes the same
    tokens on every rank of the mesh and gives the same loss, and its hidden states are ``x_BlD``; ``logits`` gathers
    the vocabulary and has no gradient. ``async_tp``: compiled blocks overlap products with the gathers and scatters
    beside them (CUDA). ``pieces``: so do all blocks, in so many pieces, which divide a rank's tokens of a sequence.

    That the sizes divide is for :func:`quern.parallel.planning.checks.check_layout` to have said. Raises
    :class:`InputError` for ``async_tp`` elsewhere than on CUDA.
    """
    shape, ranks = model.shape, Ranks.of(mesh)
    assert not any(count % ranks.size for count in (shape.num_heads, shape.ffn_dim, shape.padded_vocab_size))
    assert shape.num_kv_heads % ranks.size == 0 or ranks.size % shape.num_kv_heads == 0
    if async_tp:
        _overlap(mesh)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        _split_attention(block.attention, shape, mesh, ranks, pieces)
        if isinstance(block.ffn, MoE):
            _split_experts(block.ffn, mesh, ranks, pieces)
        else:
            assert isinstance(block.ffn, FeedForward)
            _split_feed_forward(block.ffn, mesh, ranks, pieces)
    for module in (model.embed, model.head):
        if module is not None:
            _shard(module, 0, mesh)
    rows = shape.padded_vocab_size // ranks.size
    vocabulary = _Vocabulary(model, ranks, mesh.get_group(), ranks.rank * rows, rows)
    if model.embed is not None:
        model.embed_tokens = vocabulary.embed_tokens  # type: ignore[method-assign]
    if model.norm is not None:
        model.loss = vocabulary.loss  # type: ignore[assignment, method-assign]
        model.with_output_weight = vocabulary.with_output_weight  # type: ignore[method-assign]
        model.logits = vocabulary.logits  # type: ignore[assignment, method-assign]


def _split_attention(attention: Attention, shape: ModelShape, mesh: DeviceMesh, ranks: Ranks, pieces: int) -> None:
    """This rank's query heads, with the key and value heads that these look at."""
    shared = ranks.size > shape.num_kv_heads  # a key head on several ranks: it stays whole on every one, see above
    _shard(attention.wq, 0, mesh)
    if not shared:
        _shard(attention.wk, 0, mesh)
        _shard(attention.wv, 0, mesh)
    head = ranks.rank * shape.num_kv_heads // ranks.size
    mine = slice(head * shape.head_dim, (head + 1) * shape.head_dim) if shared else slice(None)

    def qkv(x_BlD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = (_local(attention.wq), _local(attention.wk)[mine], _local(attention.wv)[mine])
        recipes = (attention.wq.recipe, attention.wk.recipe, attention.wv.recipe)
        q_BLD, k_BLD, v_BLD = gather_multiply(x_BlD, weights, ranks, recipes, pieces)
        return q_BLD, k_BLD, v_BLD

    attention.qkv = qkv  # type: ignore[assignment, method-assign]
    _split_columns(attention.wo, mesh, ranks, pieces)


def _split_feed_forward(ffn: FeedForward, mesh: DeviceMesh, ranks: Ranks, pieces: int) -> None:
    _shard(ffn.w1, 0, mesh)
    _shard(ffn.w3, 0, mesh)

    def expand(x_BlD: Tensor) -> tuple[Tensor, Tensor]:
        gate_BLF, up_BLF = gather_multiply(
            x_BlD, (_local(ffn.w1), _local(ffn.w3)), ranks, (ffn.w1.recipe, ffn.w3.recipe), pieces
        )
        return gate_BLF, up_BLF

    ffn.expand = expand  # type: ignore[assignment, method-assign]
    _split_columns(ffn.w2, mesh, ranks, pieces)


def _split_experts(moe: MoE, mesh: DeviceMesh, ranks: Ranks, pieces: int) -> None:
    """Every rank has a part of each expert's width (:func:`quern.parallel.experts.deal.split_experts`). Routers stay
    whole, and choose for this rank's tokens alone; all ranks then compute all tokens, with what was chosen for them."""
    experts = moe.experts
    if isinstance(moe.shared, FeedForward):
        _split_feed_forward(moe.shared, mesh, ranks, pieces)

    def forward(
        x_tD: Tensor, sent_tK: Tensor, weights_tK: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        told_tK = torch.cat((weights_tK, sent_tK.to(weights_tK.dtype)), dim=1)  # both in one message: whole numbers
        weights_TK, sent_TK = gather(told_tK[None], ranks)[0].chunk(2, dim=1)
        w1, w2, w3 = map(to_local, (experts.w1, experts.w2, experts.w3))
        x_TD = gather(x_tD[None], ranks)[0]
        part_TD = experts.multiply(x_TD, sent_TK.to(torch.int64), weights_TK, w1, w2, w3, meanwhile=meanwhile)
        return sum_scatter(part_TD[None], ranks)[0]

    experts.forward = forward  # type: ignore[assignment, method-assign]


def _split_columns(linear: Linear, mesh: DeviceMesh, ranks: Ranks, pieces: int) -> None:
    _shard(linear, 1, mesh)

    def forward(x_BLI: Tensor) -> Tensor:
        return multiply_scatter(x_BLI, _local(linear), ranks, linear.recipe, pieces)

    linear.forward = forward  # type: ignore[assignment, method-assign]


@dataclass(frozen=True, eq=False)
class _Vocabulary:
    """What a model does with the rows of embedding and head that this rank holds; loss.py's ``Split``."""

    model: Transformer
    ranks: Ranks
    group: dist.ProcessGroup
    first_row: int
    rows: int

    def embed_tokens(self, tokens_BL: Tensor) -> Tensor:
        """The tokens' embeddings, this rank's share of the sequence: a token's row is on one rank, the rest add 0."""
        length = tokens_BL.shape[1]
        if length % self.ranks.size:  # gloo would end the process
            raise ValueError(f"tokens_BL: expected a length that {self.ranks.size} ranks divide, got {length}")
        assert self.model.embed is not None
        weight_VD = _local(self.model.embed)
        row_BL = tokens_BL - self.first_row
        absent_BL = (row_BL < 0) | (row_BL >= self.rows)
        x_BLD = F.embedding(row_BL.masked_fill(absent_BL, 0), weight_VD).masked_fill(absent_BL[:, :, None], 0)
        return sum_scatter(x_BLD.to(self.model.compute_dtype or x_BLD.dtype), self.ranks)

    def loss(self, x_BlD: Tensor, targets_BL: Tensor, weights_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`Transformer.loss`."""
        return Transformer.loss(self.model, gather(x_BlD, self.ranks), targets_BL, weights_B, split=self)

    @torch.no_grad()
    def logits(self, x_BlD: Tensor) -> Tensor:
        """See :meth:`Transformer.logits`; without gradient."""
        x_BLD = gather(x_BlD, self.ranks)
        part_BLV: Tensor = self.model.with_output_weight(
            x_BLD, lambda x_BLD, weight_VD: F.linear(x_BLD, weight_VD.to(x_BLD.dtype))
        )
        parts = [torch.empty_like(part_BLV) for _ in range(self.ranks.size)]
        dist.all_gather(parts, part_BLV.contiguous(), group=self.group)
        logits_BLV = torch.cat(parts, -1)[..., : self.model.shape.vocab_size]
        return logits_BLV.to(torch.promote_types(x_BLD.dtype, torch.float32))

    def with_output_weight(self, x: Tensor, use: Callable[[Tensor, Tensor], Any]) -> Any:
        """See :meth:`Transformer.with_output_weight`; with this rank's rows."""
        return Transformer.with_output_weight(self.model, x, lambda x, weight_VD: use(x, to_local(weight_VD)))

    def max_(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum_(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values


def _shard(module: Linear | nn.Embedding, dim: int, mesh: DeviceMesh) -> None:
    """The weight becomes this rank's equal part of it along ``dim``, and forgets the rest."""
    module.weight = split(module.weight, [dim], mesh)


def _local(module: Linear | nn.Embedding) -> Tensor:
    return to_local(module.weight)


def _overlap(mesh: DeviceMesh) -> None:
    """Inductor decomposes products beside a collective of this group and pipelines the two (asynchronous TP).

    Both switches are private to torch. The second is deprecated and without effect by its own word, but inductor's
    pass (fx_passes/micro_pipeline_tp.py) in 2.11 and 2.13 fuses for groups alone that have been through it.
    """
    if mesh.device_type != "cuda":
        raise InputError(f"parallel.async_tp: expected false on {mesh.device_type}, got true; it needs CUDA")
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
