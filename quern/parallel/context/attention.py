"""Puts context parallelism on a model: each rank computes its tokens of every row, and attention alone sees the others.

The seams of the model are replaced on the instance; its modules, their names and its weights are what they were. The
gradient of every weight is then a sum over this rank's tokens, which FSDP2 adds up over the ranks of ``cp`` as it does
over those of ``dp_shard``: both hold shards of the same weights.

Shapes: B rows, r tokens of a rank, a = r · heads of its shard, N query heads and K key heads of a rank of ``tp``, M
ranks that exchange heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from quern.model.attention import attend, attention_mask
from quern.model.rope import Rotation, rotation
from quern.model.transformer import Block, Transformer
from quern.parallel.context.inputs import Shared
from quern.parallel.context.operator import context_attention, group_of

__all__ = ["share_sequence"]


def share_sequence(model: Transformer, seq_len: int, heads: str | None, shards: str | None, ring: bool) -> None:
    """Let a model, or a part of one, take a rank's tokens of rows of ``seq_len``. In place; sends nothing.

    ``heads``: the name of the group of ranks that exchange heads; ``shards``: of those that share keys, ``ring``: one
    after the other; None = this rank alone. The model is then given :class:`Shared` as its documents.
    """
    own = _Attention(model, seq_len, heads, 1 if heads is None else dist.get_world_size(group_of(heads)), shards, ring)
    model.rotation_and_mask = own.rotation_and_mask  # type: ignore[method-assign]
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention.attend = own.attend  # type: ignore[method-assign, assignment]


@dataclass(frozen=True, eq=False)
class _Attention:
    model: Transformer
    seq_len: int
    heads: str | None
    head_ranks: int
    """Ranks that exchange them."""
    shards: str | None
    ring: bool

    def rotation_and_mask(
        self, tokens_BL: Tensor, x_BLD: Tensor, positions_BL: Tensor | None, documents: Any
    ) -> tuple[Rotation, Any]:
        """See :meth:`Transformer.rotation_and_mask`."""
        shared = cast(Shared, documents)
        turn = rotation(
            self.model.shape, self.seq_len, dtype=x_BLD.dtype, device=x_BLD.device,
            positions_BL=shared.positions_BR if positions_BL is None else positions_BL,
        )  # fmt: skip
        if self.shards is not None:
            return turn, shared.told
        return turn, attention_mask(self.model.attention, shared.whole, x_BLD.device, x_BLD.dtype)

    def attend(self, q_BrNH: Tensor, k_BrKH: Tensor, v_BrKH: Tensor, mask: Any = None) -> Tensor:
        """See :func:`quern.model.attention.attend`; ``mask`` is the whole rows', or tells of stretches."""
        if self.heads is None:
            return self._over_shards(q_BrNH, k_BrKH, v_BrKH, mask)
        size = self.head_ranks
        if k_BrKH.shape[2] < size:  # a key head for several ranks
            k_BrKH, v_BrKH = (own.repeat_interleave(size // own.shape[2], 2) for own in (k_BrKH, v_BrKH))
        parts = [own.unflatten(2, (size, -1)) for own in (q_BrNH, k_BrKH, v_BrKH)]
        counts = [own.shape[3] for own in parts]
        together = _Exchange.apply(torch.cat(parts, 3).flatten(2, 3), self.heads, size, False)
        q_BaNH, k_BaKH, v_BaKH = cast(Tensor, together).split(counts, 2)
        out_BaNH = self._over_shards(q_BaNH, k_BaKH, v_BaKH, mask)
        return cast(Tensor, _Exchange.apply(out_BaNH, self.heads, size, True))

    def _over_shards(self, q_BaNH: Tensor, k_BaKH: Tensor, v_BaKH: Tensor, mask: Any) -> Tensor:
        if self.shards is None:
            return attend(q_BaNH, k_BaKH, v_BaKH, mask)
        out_BaNH, _ = context_attention(q_BaNH, k_BaKH, v_BaKH, mask, self.shards, self.ring)
        return out_BaNH


class _Exchange(torch.autograd.Function):
    """From a rank's tokens with all heads [B, r, M·n, H] to all tokens with its heads [B, M·r, n, H], or ``back``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, back: bool) -> Tensor:
        ctx.group, ctx.size, ctx.back = group, size, back
        return _heads_for_tokens(x, group, size) if back else _tokens_for_heads(x, group, size)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        way = _tokens_for_heads if ctx.back else _heads_for_tokens
        return way(dy, ctx.group, ctx.size), None, None, None


def _tokens_for_heads(x_BrNH: Tensor, group: str, size: int) -> Tensor:
    leaving = x_BrNH.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4)
    return _exchanged(leaving, group, size).permute(1, 0, 2, 3, 4).flatten(1, 2)


def _heads_for_tokens(x_BanH: Tensor, group: str, size: int) -> Tensor:
    leaving = x_BanH.unflatten(1, (size, -1)).transpose(0, 1)
    return _exchanged(leaving, group, size).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchanged(leaving: Tensor, group: str, size: int) -> Tensor:
    """Part m of [M, …] goes to rank m; what comes is by the rank that it is from."""
    leaving = leaving.contiguous()
    shape, rows = leaving.shape, [1] * size
    started = torch.ops._c10d_functional.all_to_all_single(leaving, rows, rows, group)
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return arrived.view(shape)
