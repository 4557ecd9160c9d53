"""A plain training loop, written to be read: the oracle of the trainer. It imports nothing from the package under test.

First part: a Llama-style language model and its training step spelled out over a flat dict of tensors, without
``nn.Module``, without ``torch.optim``, without any fused or chunked operation; dense attention masks, whole logits.
Run in float64 it says what every faster or distributed implementation must compute. Second part: windows of a token
stream in pure Python. ``fast_loop.py`` is the same model written for speed.

Legend: B batch, L sequence, D model, N heads, K kv heads, H head dim, F ffn, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
Weights = dict[str, Tensor]


class Scaling(NamedTuple):
    """Llama-3 scaling of rotary frequencies."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Shape:
    """Sizes; any object with these attributes serves."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float = 10_000.0
    rope_scaling: Any = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied_embeddings: bool = False
    product: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.linear
    """``x Wᵀ`` of the blocks' matrices."""
    experts: Any = None
    """:class:`.plain_moe.Experts`."""


@dataclass(frozen=True)
class Settings:
    """Optimiser and schedule; the learning rate is for ``steps`` steps."""

    steps: int
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    schedule: str = "cosine"
    warmup: int = 0
    final: float = 0.1
    decay: float = 0.1
    skip_non_finite: bool = True
    z_loss: float = 0.0
    """Weight of log²Z in what is minimised."""
    own: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    """By part of a name: a factor of the learning rate, and the weight decay if it is another."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch, [B, L] each: integers, as arrays, tensors or lists; targets are -100 where there is none."""

    tokens: Any
    targets: Any
    positions: Any
    documents: Any
    """Number of the document inside its row; attention joins equal numbers only."""


@dataclass(frozen=True)
class Record:
    """One step. ``grads`` are those of the loss and the z-loss, before clipping; weights and moments are those after
    the step."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    applied: bool
    valid_tokens: int
    grads: Weights
    weights: Weights
    first_moments: Weights
    second_moments: Weights
    updates: int
    """Updates applied so far: AdamW's bias correction counts these, not the steps."""
    z_loss: float = 0.0
    """What the z-loss adds to ``loss`` in what is minimised."""


# --- the model -------------------------------------------------------------------------------------------------------


def parameter_shapes(shape: Any) -> dict[str, tuple[int, ...]]:
    """Every parameter's global name and size."""
    d, h, f = shape.dim, shape.head_dim, shape.ffn_dim
    sizes: dict[str, tuple[int, ...]] = {"embed.weight": (shape.vocab_size, d)}
    for i in range(shape.num_layers):
        block = f"blocks.{i}"
        sizes[f"{block}.attention_norm.weight"] = (d,)
        sizes[f"{block}.attention.wq.weight"] = (shape.num_heads * h, d)
        sizes[f"{block}.attention.wk.weight"] = (shape.num_kv_heads * h, d)
        sizes[f"{block}.attention.wv.weight"] = (shape.num_kv_heads * h, d)
        sizes[f"{block}.attention.wo.weight"] = (d, shape.num_heads * h)
        if shape.qk_norm:
            sizes[f"{block}.attention.q_norm.weight"] = (h,)
            sizes[f"{block}.attention.k_norm.weight"] = (h,)
        sizes[f"{block}.ffn_norm.weight"] = (d,)
        sizes[f"{block}.ffn.w1.weight"] = (f, d)
        sizes[f"{block}.ffn.w2.weight"] = (d, f)
        sizes[f"{block}.ffn.w3.weight"] = (f, d)
    sizes["norm.weight"] = (d,)
    if not shape.tied_embeddings:
        sizes["head.weight"] = (shape.vocab_size, d)
    return sizes


def random_weights(shape: Any, seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    """Normal, std 0.02, residual outputs 0.02 / sqrt(2 · layers), norms 1. For runs that have no other weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in parameter_shapes(shape).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(size, dtype=dtype)
            continue
        std = 0.02 / math.sqrt(2 * shape.num_layers) if name.endswith(("wo.weight", "w2.weight")) else 0.02
        weights[name] = torch.randn(size, generator=generator, dtype=dtype) * std
    return weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dim (Zhang & Sennrich 2019)."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope_frequencies(shape: Any) -> Tensor:
    """float64[H/2]: radians a position (Su et al. 2021), long waves slowed down as Llama 3.1 does."""
    half = shape.head_dim // 2
    frequencies = []
    for pair in range(half):
        frequency = shape.rope_theta ** (-pair / half)
        scaling = shape.rope_scaling
        if scaling is not None:
            turns = scaling.original_max_position * frequency / (2 * math.pi)  # full turns over the old context
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            share = min(1.0, max(0.0, (turns - low) / (high - low)))  # 1: a short wave, left alone
            frequency = share * frequency + (1 - share) * frequency / scaling.factor
        frequencies.append(frequency)
    return torch.tensor(frequencies, dtype=torch.float64)


def rotate(x_BLNH: Tensor, angles_BLP: Tensor) -> Tensor:
    """Turn the pairs (i, i + H/2), P = H/2 of them, by their angles."""
    cos = angles_BLP.cos().unsqueeze(2).to(x_BLNH.dtype)
    sin = angles_BLP.sin().unsqueeze(2).to(x_BLNH.dtype)
    first, second = x_BLNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention_mask(documents_BL: Tensor) -> Tensor:
    """bool[B, L, L]: whether row q may look at column k: not later, and in the same document."""
    length = documents_BL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril()
    return causal & (documents_BL[:, :, None] == documents_BL[:, None, :])


def attend(w: Mapping[str, Tensor], prefix: str, shape: Any, x_BLD: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention: query head n reads kv head n // (N / K)."""
    batch, length, _ = x_BLD.shape
    product = getattr(shape, "product", torch.nn.functional.linear)
    q = product(x_BLD, w[f"{prefix}.wq.weight"]).view(batch, length, shape.num_heads, shape.head_dim)
    k = product(x_BLD, w[f"{prefix}.wk.weight"]).view(batch, length, shape.num_kv_heads, shape.head_dim)
    v = product(x_BLD, w[f"{prefix}.wv.weight"]).view(batch, length, shape.num_kv_heads, shape.head_dim)
    if shape.qk_norm:
        q = rms_norm(q, w[f"{prefix}.q_norm.weight"], shape.norm_eps)
        k = rms_norm(k, w[f"{prefix}.k_norm.weight"], shape.norm_eps)
    q, k = rotate(q, angles), rotate(k, angles)
    group = shape.num_heads // shape.num_kv_heads
    heads = []
    for n in range(shape.num_heads):
        scores_BLL = q[:, :, n] @ k[:, :, n // group].transpose(1, 2) / math.sqrt(shape.head_dim)
        scores_BLL = scores_BLL.masked_fill(~mask, -math.inf)
        heads.append(torch.softmax(scores_BLL, dim=-1) @ v[:, :, n // group])
    return product(torch.cat(heads, dim=-1), w[f"{prefix}.wo.weight"])


def forward(w: Mapping[str, Tensor], shape: Any, tokens: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
    """Logits [B, L, V] over the real vocabulary; rows of the weights beyond it are padding and never read."""
    angles = positions[..., None].to(torch.float64) * rope_frequencies(shape).to(positions.device)
    mask = attention_mask(documents)
    product = getattr(shape, "product", torch.nn.functional.linear)
    x_BLD = w["embed.weight"][tokens]
    for i in range(shape.num_layers):
        block = f"blocks.{i}"
        normed = rms_norm(x_BLD, w[f"{block}.attention_norm.weight"], shape.norm_eps)
        x_BLD = x_BLD + attend(w, f"{block}.attention", shape, normed, angles, mask)
        normed = rms_norm(x_BLD, w[f"{block}.ffn_norm.weight"], shape.norm_eps)
        experts = getattr(shape, "experts", None)
        if experts is not None and experts.is_sparse(i):
            x_BLD = x_BLD + experts.feed_forward(w, i, normed, product)
            continue
        gate, up = product(normed, w[f"{block}.ffn.w1.weight"]), product(normed, w[f"{block}.ffn.w3.weight"])
        x_BLD = x_BLD + product(gate * torch.sigmoid(gate) * up, w[f"{block}.ffn.w2.weight"])
    x_BLD = rms_norm(x_BLD, w["norm.weight"], shape.norm_eps)
    head = w["embed.weight"] if shape.tied_embeddings else w["head.weight"]
    return x_BLD @ head[: shape.vocab_size].T


def token_losses(w: Mapping[str, Tensor], shape: Any, batch: Batch) -> Tensor:
    """[B, L] nats: the negative log likelihood of each target, 0 where there is none."""
    return token_terms(w, shape, batch)[0]


def token_terms(w: Mapping[str, Tensor], shape: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """[B, L] each, 0 where there is no target: its negative log likelihood, and log²Z of the softmax it comes from."""
    device = w["embed.weight"].device
    tokens, targets, positions, documents = (
        torch.as_tensor(np.asarray(part), dtype=torch.int64, device=device)
        for part in (batch.tokens, batch.targets, batch.positions, batch.documents)
    )
    logits_BLV = forward(w, shape, tokens, positions, documents)
    valid = targets != IGNORE
    picked = logits_BLV.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    log_z = torch.logsumexp(logits_BLV, dim=-1)
    return torch.where(valid, log_z - picked, 0.0), torch.where(valid, log_z**2, 0.0)


# --- the step --------------------------------------------------------------------------------------------------------


def learning_rate(settings: Settings, step: int) -> float:
    """Of step ``step`` (the first is 0): warm-up, then the schedule; ``final · lr`` would be reached at ``steps``."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    start = settings.warmup
    if settings.schedule == "wsd":
        start = max(start, settings.steps - max(1, round(settings.decay * settings.steps)))
    progress = min(1.0, max(0.0, (step - start) / (settings.steps - start))) if settings.steps > start else 1.0
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif settings.schedule in ("linear", "wsd"):
        height = 1 - progress
    else:
        raise ValueError(f"unknown schedule {settings.schedule!r}")
    return settings.lr * (settings.final + (1 - settings.final) * height)


def train(
    weights: Mapping[str, Tensor],
    shape: Any,
    batches: Iterable[Sequence[Batch]],
    settings: Settings,
    dtype: torch.dtype = torch.float64,
    skipped: Container[int] = (),
) -> Iterator[Record]:
    """A record for each step; a step's batch is all micro-batches of the global batch, of all ranks.

    The loss of a step is the sum over its targets divided by their number in the whole global batch. Steps in
    ``skipped`` are not applied, as if something outside of this loop had spoilt their gradients.
    """
    w = {name: weight.detach().to(dtype).clone() for name, weight in weights.items()}
    m = {name: torch.zeros_like(weight) for name, weight in w.items()}
    v = {name: torch.zeros_like(weight) for name, weight in w.items()}
    updates = 0
    for step, micro_batches in enumerate(batches):
        leaves = {name: weight.clone().requires_grad_() for name, weight in w.items()}
        valid = sum(int((np.asarray(batch.targets) != IGNORE).sum()) for batch in micro_batches)
        loss = z_loss = 0.0
        experts = getattr(shape, "experts", None)
        if experts is not None:
            experts.begin(sum(len(batch.tokens) for batch in micro_batches))
        for batch in micro_batches:
            part = token_losses(leaves, shape, batch).sum() / valid
            (part if experts is None else part + experts.take()).backward()  # type: ignore[no-untyped-call]
            loss += part.item()
            if settings.z_loss:
                part = settings.z_loss * token_terms(leaves, shape, batch)[1].sum() / valid
                part.backward()  # type: ignore[no-untyped-call]
                z_loss += part.item()
        grads = {name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items()}
        norm = math.sqrt(sum(float((grad.double() ** 2).sum()) for grad in grads.values()))
        lr = learning_rate(settings, step)
        healthy = math.isfinite(loss) and math.isfinite(norm) and step not in skipped
        applied = healthy or not settings.skip_non_finite
        if applied:
            updates += 1
            # as torch.nn.utils.clip_grad_norm_; a NaN norm gives a NaN factor, which is why such steps are skipped
            scale = 1.0 if settings.clip is None else settings.clip / (norm + 1e-6)
            scale = 1.0 if scale > 1.0 else scale
            w, m, v = adamw(w, {name: grad * scale for name, grad in grads.items()}, m, v, updates, lr, settings)
        if experts is not None:
            experts.end(applied)
        yield Record(step, loss, lr, norm, applied, valid, grads, w, m, v, updates, z_loss)


def adamw(
    w: Weights, grads: Weights, m: Weights, v: Weights, update: int, lr: float, settings: Settings
) -> tuple[Weights, Weights, Weights]:
    """Update number ``update`` (the first is 1) of AdamW (Loshchilov & Hutter 2019): new weights and moments."""
    b1, b2 = settings.beta1, settings.beta2
    new_w, new_m, new_v = {}, {}, {}
    for name, weight in w.items():
        grad = grads[name]
        new_m[name] = b1 * m[name] + (1 - b1) * grad
        new_v[name] = b2 * v[name] + (1 - b2) * grad * grad
        m_hat = new_m[name] / (1 - b1**update)
        v_hat = new_v[name] / (1 - b2**update)
        decay = settings.weight_decay if weight.dim() >= 2 else 0.0
        rate = lr
        for part, (factor, other) in settings.own.items():
            if part in name:
                rate, decay = lr * factor, decay if other is None else other
        new_w[name] = weight * (1 - rate * decay) - rate * m_hat / (v_hat.sqrt() + settings.eps)
    return new_w, new_m, new_v


# --- the data --------------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """What a window of a stream gives the model, L integers each."""

    tokens: list[int]
    targets: list[int]
    positions: list[int]
    documents: list[int]


def num_windows(stream: Sequence[int], seq_len: int) -> int:
    """Windows of ``seq_len + 1`` tokens that start every ``seq_len`` tokens."""
    count = 0
    while count * seq_len + seq_len + 1 <= len(stream):
        count += 1
    return count


def window(
    stream: Sequence[int], spans: Sequence[tuple[int, int, bool]], index: int, seq_len: int, document_mask: bool
) -> Window:
    """Window ``index`` of a stream whose documents are ``spans`` (start, length, purged), which cover it in order.

    With ``document_mask`` a document sees itself only: positions restart where a document or the window starts, and a
    document's first token is no target. A token of a purged span is never one.
    """
    owner, purged, first = {}, set(), set()
    for number, (start, length, is_purged) in enumerate(spans):
        for place in range(start, start + length):
            owner[place] = number
            if is_purged:
                purged.add(place)
        first.add(start)
    begin = index * seq_len
    tokens, targets, positions, documents = [], [], [], []
    position, document = -1, 0
    for place in range(begin, begin + seq_len):
        position += 1
        if document_mask and place > begin and owner[place] != owner[place - 1]:
            position, document = 0, document + 1
        tokens.append(int(stream[place]))
        silent = place + 1 in purged or (document_mask and place + 1 in first)
        targets.append(IGNORE if silent else int(stream[place + 1]))
        positions.append(position)
        documents.append(document)
    return Window(tokens, targets, positions, documents)


def cu_seqlens(rows: Sequence[Sequence[int]]) -> list[int]:
    """Where documents start in the flattened rows of document numbers, and the end; a row starts one too."""
    starts, place = [], 0
    for row in rows:
        for column, document in enumerate(row):
            if column == 0 or document != row[column - 1]:
                starts.append(place)
            place += 1
    return [*starts, place]


def batch_of(windows: Sequence[Window]) -> Batch:
    """Windows as the rows of a micro-batch."""
    return Batch(*(np.array([getattr(row, part) for row in windows], np.int64) for part in Window._fields))
