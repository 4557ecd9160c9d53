"""The network: a decoder of the Llama 3 family (RMSNorm before each part, rotary positions, grouped queries, SwiGLU).

Knows nothing of devices, sharding, checkpointing or compilation: those are put on from outside.

Shapes, as suffixes of tensor names:

    B batch    L sequence    D model    N query heads    K key/value heads    H head dim    F ffn    V vocabulary

Parameters may be of any floating dtype; a weight is cast to the dtype of the activation it meets. Norms, rotation and
softmax compute in at least float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.attention import BACKENDS, Documents, attend, attention_mask
from quern.model.config import ModelShape
from quern.model.float8.linear import Kept, apply_linear
from quern.model.float8.recipe import Recipe
from quern.model.loss import Split, by_token, chunked_cross_entropy
from quern.model.moe.layer import MoE
from quern.model.rope import Rotation, rotate, rotation

__all__ = ["Attention", "Block", "FeedForward", "Head", "Linear", "RMSNorm", "Transformer"]


class Linear(nn.Module):
    """``x Wᵀ`` without bias, in the dtype of ``x``; its products in FP8 where there is a ``recipe``, and with a weight
    that a layout has ``kept`` for them where there is one."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.recipe: Recipe | None = None
        self.kept: Kept | None = None

    def forward(self, x: Tensor) -> Tensor:
        how = self.recipe if self.kept is None else self.kept
        if how is not None:
            return apply_linear(x, self.weight, how)
        return F.linear(x, self.weight.to(x.dtype))


class Head(Linear):
    """The output projection. Its weight is used in a call of the module, so that FSDP2 can gather it for that call."""

    def forward(self, x: Tensor, use: Callable[[Tensor, Tensor], Any]) -> Any:  # type: ignore[override]
        """``use(x, weight)``."""
        return use(x, self.weight)


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
        self.whole_norm = shape.qk_norm == "whole"
        self.q_norm, self.k_norm = (
            RMSNorm(width, shape.norm_eps) if shape.qk_norm else None for width in shape.qk_norm_widths
        )

    def forward(self, x_BLD: Tensor, rotation: Rotation, mask: Any = None) -> Tensor:
        out_BLNH = self.attend(*self.project(x_BLD, rotation), mask)
        return self.wo(out_BLNH.flatten(2))

    def attend(self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask: Any = None) -> Tensor:
        """See :func:`quern.model.attention.attend`; a layout that deals tokens out over ranks replaces it."""
        return attend(q_BLNH, k_BLKH, v_BLKH, mask)

    def project(self, x_BLD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, L, N, H], keys and values [B, L, K, H]; queries and keys normed and rotated."""
        q, k, v = self.qkv(x_BLD)
        if self.whole_norm and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BLNH, k_BLKH, v_BLKH = (heads.unflatten(2, (-1, self.head_dim)) for heads in (q, k, v))
        if not self.whole_norm and self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        return rotate(q_BLNH, rotation), rotate(k_BLKH, rotation), v_BLKH

    def qkv(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three projections, heads side by side; a layout that splits heads over ranks replaces it."""
        return self.wq(x_BLD), self.wk(x_BLD), self.wv(x_BLD)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, ffn_dim)
        self.w2 = Linear(ffn_dim, dim)
        self.w3 = Linear(dim, ffn_dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        gate_BLF, up_BLF = self.expand(x_BLD)
        return self.w2(F.silu(gate_BLF) * up_BLF)

    def expand(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """``w1 x`` and ``w3 x``; a layout that splits the width over ranks replaces it."""
        return self.w1(x_BLD), self.w3(x_BLD)


class Block(nn.Module):
    """One layer: attention and feed-forward, or experts in place of it, each added to the residual stream."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.ffn: FeedForward | MoE
        moe = shape.moe
        if moe is None or not moe.is_sparse(layer):
            self.ffn = FeedForward(shape.dim, shape.ffn_dim)
        else:
            shared = FeedForward(shape.dim, moe.shared_ffn_dim) if moe.shared_ffn_dim else None
            self.ffn = MoE(moe, shape.dim, shared)

    def forward(self, x_BLD: Tensor, rotation: Rotation, mask: Any = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotation, mask)
        return x_BLD + self.ffn(self.ffn_norm(x_BLD))


class Transformer(nn.Module):
    """A language model of the given shape. Its weights are uninitialised: see :func:`quern.model.init.initialise`.

    ``compute_dtype`` is the dtype of activations, None = that of the embedding. ``attention`` is one of
    :data:`quern.model.attention.BACKENDS`. The loss holds the logits of ``loss_chunk`` tokens at a time; ``z_loss``
    is the weight of log²Z in it (:func:`quern.model.loss.chunked_cross_entropy`).

    A slice of the whole (:meth:`slice_layers`) has None for ``embed``, ``norm`` or ``head`` where these are elsewhere;
    blocks keep their number in the whole.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        compute_dtype: torch.dtype | None = None,
        attention: str = "sdpa",
        loss_chunk: int = 4096,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        if attention not in BACKENDS:
            raise ValueError(f"attention: expected one of {', '.join(BACKENDS)}, got {attention!r}")
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.attention = attention
        self.loss_chunk = loss_chunk
        self.z_loss = z_loss
        self.loss_compiler: str | None = None
        """Set by a layout: the backend of torch.compile for the loss."""
        self.output_weight: Kept | None = None
        """Set by a layout that keeps the output projection's weight for the loss."""
        self.before_forward: Callable[[], None] | None = None
        """Set by a layout that keeps weights."""
        self.before_use: Callable[[nn.Module], None] | None = None
        """Set by a layout whose weights may still be on their way: given each block, and the last norm."""
        # from_pretrained, because nn.Embedding's own constructor draws from the global random state
        embed = nn.Embedding.from_pretrained(torch.empty(shape.padded_vocab_size, shape.dim), freeze=False)
        self.embed: nn.Embedding | None = embed
        self.blocks = nn.ModuleDict({str(i): Block(shape, i) for i in range(shape.num_layers)})
        self.norm: RMSNorm | None = RMSNorm(shape.dim, shape.norm_eps)
        self.head = None if shape.tied_embeddings else Head(shape.dim, shape.padded_vocab_size)

    def forward(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor | None = None,
        positions_BL: Tensor | None = None,
        documents: Documents | None = None,
        hidden_BLD: Tensor | None = None,
        weights_B: Tensor | None = None,
    ) -> Any:
        """Logits [B, L, vocab_size] in at least float32, or with targets ``(loss_sum, nll_BL)``.

        ``targets_BL`` holds the id to predict at each place, or :data:`quern.model.loss.IGNORE`. ``loss_sum`` is the
        sum over targets, in nats, not their mean; ``nll_BL`` is detached, 0 where there is no target.
        ``positions_BL`` holds integers in [0, L), None = 0 … L - 1 in every row. Without ``documents`` a token attends
        to all tokens before it in its row. ``hidden_BLD`` is what the stretch before gave, None for the first one; a
        stretch that is not the last gives the same to the next. ``weights_B``: by what each row's part in ``loss_sum``
        is multiplied, None = 1.

        Raises ValueError where the attention backend does not run on this device.
        """
        if self.before_forward is not None:
            self.before_forward()
        x_BLD = self.embed_tokens(tokens_BL) if hidden_BLD is None else hidden_BLD
        turn, mask = self.rotation_and_mask(tokens_BL, x_BLD, positions_BL, documents)
        for block in self.blocks.values():
            if self.before_use is not None:
                self.before_use(block)
            x_BLD = block(x_BLD, turn, mask)
        if self.norm is None:
            return x_BLD
        if self.before_use is not None:
            self.before_use(self.norm)
        x_BLD = self.norm(x_BLD)
        return self.logits(x_BLD) if targets_BL is None else self.loss(x_BLD, targets_BL, weights_B)

    def rotation_and_mask(
        self, tokens_BL: Tensor, x_BLD: Tensor, positions_BL: Tensor | None, documents: Documents | None
    ) -> tuple[Rotation, Any]:
        """What all blocks share in a forward pass; a layout that deals tokens out over ranks replaces it."""
        length = tokens_BL.shape[1]
        turn = rotation(self.shape, length, dtype=x_BLD.dtype, device=x_BLD.device, positions_BL=positions_BL)
        return turn, attention_mask(self.attention, documents, x_BLD.device, x_BLD.dtype)

    def embed_tokens(self, tokens_BL: Tensor) -> Tensor:
        """The tokens' embeddings, in the dtype of activations; a layout that splits the vocabulary replaces it."""
        assert self.embed is not None, "a stretch without an embedding is given hidden_BLD"
        x_BLD: Tensor = self.embed(tokens_BL)
        return x_BLD.to(self.compute_dtype or x_BLD.dtype)

    def loss(
        self, x_BLD: Tensor, targets_BL: Tensor, weights_B: Tensor | None = None, split: Split | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(loss_sum, nll_BL)`` of hidden states after the last norm; a split of the vocabulary replaces it."""
        cross_entropy = partial(
            chunked_cross_entropy,
            targets_N=targets_BL.flatten(),
            vocab_size=self.shape.vocab_size,
            chunk=self.loss_chunk,
            z_loss=self.z_loss,
            split=split,
            compiler=self.loss_compiler,
            kept=self.output_weight,
            weights_N=by_token(weights_B, targets_BL),
        )
        loss_sum, nll_N = self.with_output_weight(x_BLD.flatten(0, 1), cross_entropy)
        return loss_sum, nll_N.view(targets_BL.shape)

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Logits [B, L, vocab_size] in at least float32 of hidden states after the last norm."""

        def project(x_BLD: Tensor, weight_VD: Tensor) -> Tensor:
            logits_BLV = F.linear(x_BLD, weight_VD[: self.shape.vocab_size].to(x_BLD.dtype))
            return logits_BLV.to(torch.promote_types(x_BLD.dtype, torch.float32))

        logits_BLV: Tensor = self.with_output_weight(x_BLD, project)
        return logits_BLV

    def with_output_weight(self, x: Tensor, use: Callable[[Tensor, Tensor], Any]) -> Any:
        """``use(x, weight)`` with the output projection [padded vocabulary, D]: the embedding where the two are
        tied."""
        if self.head is not None:
            return self.head(x, use)
        assert self.embed is not None, "a stretch without norm has no output"
        return use(x, self.embed.weight)

    def slice_layers(self, layers: range) -> Transformer:
        """The blocks ``layers`` as a model of their own, with the same modules: with the embedding if the first block
        is among them, with norm and head if the last one is. Tied embeddings at the end are a copy where the first
        block is elsewhere, for the embedding itself is where the first block is.
        """
        with torch.device("meta"):
            part = Transformer(
                self.shape, compute_dtype=self.compute_dtype, attention=self.attention, loss_chunk=self.loss_chunk,
                z_loss=self.z_loss,
            )  # fmt: skip
        first, last = 0 in layers, self.shape.num_layers - 1 in layers
        part.blocks = nn.ModuleDict({str(i): self.blocks[str(i)] for i in layers})
        part.norm, part.head = (self.norm, self.head) if last else (None, None)
        part.embed = self.embed if first else None
        if last and not first and self.shape.tied_embeddings:
            part.embed = copy.deepcopy(self.embed)
        return part
