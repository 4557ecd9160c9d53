"""Causal grouped-query attention, with or without document masks, by three implementations.

Shapes: B batch, L sequence, N query heads, K key/value heads (N a multiple of K), H head dim, T = B·L tokens in a row.

``sdpa``    every device and dtype. Without documents the causal flag, with documents a dense mask, B·L² values,
            built once a forward pass and shared by all blocks.
``varlen``  CUDA, bf16 and fp16: flash attention over documents laid end to end; no mask exists.
``flex``    CUDA: FlexAttention with a block mask of the documents.

Without documents every route is SDPA's causal flag, which is the fastest kernel there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from quern.torch_versions import VARLEN_TAKES_GQA

__all__ = ["BACKENDS", "Documents", "attend", "attention_mask"]

BACKENDS = ("sdpa", "varlen", "flex")


@dataclass(frozen=True, eq=False)
class Documents:
    """The positions of documents in a batch: a token attends only to earlier tokens of its own document."""

    ids_BL: Tensor
    """Number of each token's document within its row, ascending from left to right; any integer dtype."""
    cu_seqlens: Tensor
    """int32 [documents + 1]: where documents start in the T tokens laid end to end, and T. Every row starts one."""
    max_seqlen: int
    """Tokens of the longest document, or any bound on it up to L."""

    @property
    def tensors(self) -> list[Tensor]:
        """What another rank has to be sent, with ``max_seqlen``; their first sizes may differ from batch to batch."""
        return [self.ids_BL, self.cu_seqlens]

    def of_other(self, tensors: Sequence[Tensor], max_seqlen: int) -> Documents:
        """What another rank has sent."""
        ids_BL, cu_seqlens = tensors
        return Documents(ids_BL, cu_seqlens, max_seqlen)


def attention_mask(
    backend: str, documents: Documents | None, device: torch.device, dtype: torch.dtype | None = None
) -> Any:
    """The mask for :func:`attend`; build it once per forward pass and share it between blocks.

    None without documents; else [B, 1, L, L] for ``sdpa``, the documents themselves for ``varlen`` and a ``BlockMask``
    for ``flex``. ``dtype``: that of the queries, in which the mask is 0 where a query (row) may look at a key (column)
    and -inf elsewhere; None = bool, from which attention makes such a mask in every block and keeps it for backward.

    Raises ValueError where the backend cannot run on ``device``.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "sdpa" and device.type != "cuda":
        why = {"varlen": "its flash kernel exists for CUDA only", "flex": "FlexAttention has no backward elsewhere"}
        raise ValueError(f"attention: {backend} needs CUDA ({why[backend]}), got {device.type}; expected sdpa")
    if documents is None:
        return None
    if backend == "varlen":
        return documents
    if backend == "flex":
        return _block_mask(documents.ids_BL)
    may_B1LL = _dense_mask(documents.ids_BL)
    return may_B1LL if dtype is None else torch.zeros_like(may_B1LL, dtype=dtype).masked_fill_(~may_B1LL, -torch.inf)


def attend(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask: Any = None) -> Tensor:
    """softmax(q kᵀ / √H) v over what ``mask`` allows (None = everything before and itself), [B, L, N, H]."""
    if isinstance(mask, Documents):
        return _varlen(q_BLNH, k_BLKH, v_BLKH, mask)
    q_BNLH, k_BKLH, v_BKLH = q_BLNH.transpose(1, 2), k_BLKH.transpose(1, 2), v_BLKH.transpose(1, 2)
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    if mask is None or isinstance(mask, Tensor):
        # enable_gqa and repeated keys cost the same on CPU (both repeat); CUDA's flash kernel needs no repetition
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BKLH, v_BKLH, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    else:
        out_BNLH = _flex()(q_BNLH, k_BKLH, v_BKLH, block_mask=mask, enable_gqa=grouped)
    return out_BNLH.transpose(1, 2)


def _dense_mask(ids_BL: Tensor) -> Tensor:
    length = ids_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=ids_BL.device).tril()
    return ((ids_BL[:, :, None] == ids_BL[:, None, :]) & causal_LL)[:, None]


def _block_mask(ids_BL: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def same_document_before(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids_BL[b, q] == ids_BL[b, k])

    batch, length = ids_BL.shape
    return create_block_mask(same_document_before, batch, None, length, length, device=ids_BL.device)


def _flex() -> Any:
    """FlexAttention, compiled, without which it is no fused kernel; what is being compiled takes it in as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _varlen(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, documents: Documents) -> Tensor:
    if q_BLNH.dtype not in (torch.bfloat16, torch.float16):
        name = str(q_BLNH.dtype).removeprefix("torch.")
        raise ValueError(f"attention: varlen computes in bfloat16 or float16, got {name}; expected sdpa or flex")
    q_TNH, k_TKH, v_TKH = q_BLNH.flatten(0, 1), k_BLKH.flatten(0, 1), v_BLKH.flatten(0, 1)
    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
    group = q_TNH.shape[1] // k_TKH.shape[1]
    if group > 1 and VARLEN_TAKES_GQA:
        options["enable_gqa"] = True
    elif group > 1:
        k_TKH, v_TKH = k_TKH.repeat_interleave(group, dim=1), v_TKH.repeat_interleave(group, dim=1)
    cu_seqlens, longest = documents.cu_seqlens, documents.max_seqlen
    out_TNH = varlen_attn(q_TNH, k_TKH, v_TKH, cu_seqlens, cu_seqlens, longest, longest, **options)
    return cast(Tensor, out_TNH).view(q_BLNH.shape)
