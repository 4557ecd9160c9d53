"""The network: a decoder of the Llama 3 family (RMSNorm before each part, rotary positions, grouped queries, SwiGLU).

Knows nothing of devices, sharding, checkpointing or compilation: those are put on from outside.

Shapes, as suffixes of tensor names:

    B batch    L sequence    D model    N query heads    K key/value heads    H head dim    F ffn    V vocabulary

Parameters may be of any floating dtype; a weight is cast to the dtype of the activation it meets. Norms, rotation and
softmax compute in at least float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.attention import BACKENDS, Documents, attend, attention_mask
from quern.model.config import ModelShape
from quern.model.loss import chunked_cross_entropy
from quern.model.rope import Rotation, rotate, rotation

__all__ = ["Attention", "Block", "FeedForward", "Linear", "RMSNorm", "Transformer"]


class Linear(nn.Module):
    """``x Wᵀ`` without bias, in the dtype of ``x``."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        compute = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(compute), self.weight.shape, self.weight.to(compute), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and ``num_kv_heads`` shared by groups of query heads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = Linear(shape.dim, shape.num_heads * shape.head_dim)
        self.wk = Linear(shape.dim, shape.num_kv_heads * shape.head_dim)
        self.wv = Linear(shape.dim, shape.num_kv_heads * shape.head_dim)
        self.wo = Linear(shape.num_heads * shape.head_dim, shape.dim)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None

    def forward(self, x_BLD: Tensor, rotation: Rotation, mask: Any = None) -> Tensor:
        out_BLNH = attend(*self.project(x_BLD, rotation), mask)
        return self.wo(out_BLNH.flatten(2))

    def project(self, x_BLD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, L, N, H], keys and values [B, L, K, H]; queries and keys normed and rotated."""
        q_BLNH = self.wq(x_BLD).unflatten(2, (-1, self.head_dim))
        k_BLKH = self.wk(x_BLD).unflatten(2, (-1, self.head_dim))
        v_BLKH = self.wv(x_BLD).unflatten(2, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        return rotate(q_BLNH, rotation), rotate(k_BLKH, rotation), v_BLKH


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.w1 = Linear(shape.dim, shape.ffn_dim)
        self.w2 = Linear(shape.ffn_dim, shape.dim)
        self.w3 = Linear(shape.dim, shape.ffn_dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x_BLD: Tensor, rotation: Rotation, mask: Any = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotation, mask)
        return x_BLD + self.ffn(self.ffn_norm(x_BLD))


class Transformer(nn.Module):
    """A language model of the given shape. Its weights are uninitialised: see :func:`quern.model.init.initialise`.

    ``compute_dtype`` is the dtype of activations, None = that of the embedding. ``attention`` is one of
    :data:`quern.model.attention.BACKENDS`. The loss holds the logits of ``loss_chunk`` tokens at a time.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        compute_dtype: torch.dtype | None = None,
        attention: str = "sdpa",
        loss_chunk: int = 4096,
    ) -> None:
        super().__init__()
        if attention not in BACKENDS:
            raise ValueError(f"attention: expected one of {', '.join(BACKENDS)}, got {attention!r}")
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.attention = attention
        self.loss_chunk = loss_chunk
        # from_pretrained, because nn.Embedding's own constructor draws from the global random state
        self.embed = nn.Embedding.from_pretrained(torch.empty(shape.padded_vocab_size, shape.dim), freeze=False)
        self.blocks = nn.ModuleDict({str(i): Block(shape) for i in range(shape.num_layers)})
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        self.head = None if shape.tied_embeddings else Linear(shape.dim, shape.padded_vocab_size)

    def forward(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor | None = None,
        positions_BL: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Any:
        """Logits [B, L, vocab_size] in at least float32, or with targets ``(loss_sum, nll_BL)``.

        ``targets_BL`` holds the id to predict at each place, or :data:`quern.model.loss.IGNORE`. ``loss_sum`` is the
        sum over targets, in nats, not their mean; ``nll_BL`` is detached, 0 where there is no target.
        ``positions_BL`` holds integers in [0, L), None = 0 … L - 1 in every row. Without ``documents`` a token attends
        to all tokens before it in its row.

        Raises ValueError where the attention backend does not run on this device.
        """
        length = tokens_BL.shape[1]
        x_BLD = self.embed(tokens_BL)
        x_BLD = x_BLD.to(self.compute_dtype or x_BLD.dtype)
        turn = rotation(self.shape, length, dtype=x_BLD.dtype, device=x_BLD.device, positions_BL=positions_BL)
        mask = attention_mask(self.attention, documents, x_BLD.device)
        for block in self.blocks.values():
            x_BLD = block(x_BLD, turn, mask)
        x_BLD = self.norm(x_BLD)
        if targets_BL is None:
            return self.logits(x_BLD)
        loss_sum, nll_N = chunked_cross_entropy(
            x_BLD.flatten(0, 1),
            self.output_weight,
            targets_BL.flatten(),
            vocab_size=self.shape.vocab_size,
            chunk=self.loss_chunk,
        )
        return loss_sum, nll_N.view(targets_BL.shape)

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Logits [B, L, vocab_size] in at least float32 of hidden states after the last norm."""
        weight_VD = self.output_weight[: self.shape.vocab_size]
        return F.linear(x_BLD, weight_VD.to(x_BLD.dtype)).to(torch.promote_types(x_BLD.dtype, torch.float32))

    @property
    def output_weight(self) -> Tensor:
        """The output projection [padded vocabulary, D]: the embedding where the two are tied."""
        return self.embed.weight if self.head is None else self.head.weight
