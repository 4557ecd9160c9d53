"""The plain loop as a competent person writes it for speed, with what torch offers: the peer of speed comparisons.

Fused attention, fused AdamW, whole logits in one cross-entropy, float32 masters. It imports nothing from the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.oracles.plain_loop import IGNORE, Settings, attention_mask, learning_rate, rope_frequencies


class FastModel(nn.Module):
    """The same model with what torch offers: fused attention, one flat list of weights, whole logits."""

    def __init__(self, shape: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.shape = shape
        self.w = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(w.clone()) for name, w in weights.items()})
        self.register_buffer("frequencies", rope_frequencies(shape), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        """Sum of the losses; ``documents`` None = plain causal attention. ``positions`` [L] or [B, L]."""
        shape, w = self.shape, {name.replace("/", "."): weight for name, weight in self.w.items()}
        batch, length = tokens.shape
        angles = positions[..., None].double() * self.frequencies
        cos, sin = (f(angles).float().unsqueeze(-3) for f in (torch.cos, torch.sin))
        mask = None if documents is None else attention_mask(documents).unsqueeze(1)
        x = F.embedding(tokens, w["embed.weight"])
        for i in range(shape.num_layers):
            b, a = f"blocks.{i}", f"blocks.{i}.attention"
            n = F.rms_norm(x, (shape.dim,), w[f"{b}.attention_norm.weight"], shape.norm_eps)
            q, k, v = (
                F.linear(n, w[f"{a}.{part}.weight"]).view(batch, length, -1, shape.head_dim).transpose(1, 2)
                for part in ("wq", "wk", "wv")
            )
            if shape.qk_norm:
                q = F.rms_norm(q, (shape.head_dim,), w[f"{a}.q_norm.weight"], shape.norm_eps)
                k = F.rms_norm(k, (shape.head_dim,), w[f"{a}.k_norm.weight"], shape.norm_eps)
            q, k = (
                torch.cat([p * cos - s * sin, s * cos + p * sin], -1).to(v.dtype)
                for p, s in (q.chunk(2, -1), k.chunk(2, -1))
            )
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            x = x + F.linear(y.transpose(1, 2).reshape(batch, length, -1), w[f"{a}.wo.weight"])
            n = F.rms_norm(x, (shape.dim,), w[f"{b}.ffn_norm.weight"], shape.norm_eps)
            n = F.silu(F.linear(n, w[f"{b}.ffn.w1.weight"])) * F.linear(n, w[f"{b}.ffn.w3.weight"])
            x = x + F.linear(n, w[f"{b}.ffn.w2.weight"])
        x = F.rms_norm(x, (shape.dim,), w["norm.weight"], shape.norm_eps)
        head = w["embed.weight" if shape.tied_embeddings else "head.weight"]
        logits = F.linear(x, head)[..., : shape.vocab_size]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


class FastLoop:
    """Model, fused AdamW, clipping; float32 masters, forward optionally under bfloat16 autocast."""

    def __init__(self, weights: Mapping[str, Tensor], shape: Any, settings: Settings, *, bf16: bool = False) -> None:
        self.model = FastModel(shape, {name: weight.float() for name, weight in weights.items()})
        self.settings, self.bf16, self.done = settings, bf16, 0
        matrices = [w for w in self.model.parameters() if w.dim() >= 2]
        vectors = [w for w in self.model.parameters() if w.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}
        ]  # fmt: skip
        betas = (settings.beta1, settings.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)

    def step(self, micro_batches: Sequence[tuple[Tensor | None, ...]]) -> tuple[float, float]:
        """One step over (tokens, targets, positions, documents or None) each; the loss and the gradient norm."""
        valid = sum(int((batch[1] != IGNORE).sum()) for batch in micro_batches if batch[1] is not None)
        lr = learning_rate(self.settings, self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros(())
        for batch in micro_batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                loss = self.model(*batch) / valid
            loss.backward()
            total += loss.detach()
        clip = math.inf if self.settings.clip is None else self.settings.clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return total.item(), norm.item()
