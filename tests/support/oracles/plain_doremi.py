"""DoReMi as algorithm 1 of Xie et al. (2023, 2305.10429) says it, over the plain loop's model: the oracle of the
trainer's. Domain by domain, in Python's floats; it imports nothing from the package under test."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.oracles import plain_loop


@dataclass(frozen=True)
class Record:
    """After a step, by domain: its weight, the mean of its weights so far, its excess loss; and the step's loss."""

    weights: list[float]
    means: list[float]
    excess: list[float]
    objective: float
    loss: float
    grad_norm: float
    model: dict[str, Tensor]


def train(
    proxy: Mapping[str, Tensor], reference: Mapping[str, Tensor], shape: Any,
    batches: Iterable[tuple[plain_loop.Batch, Sequence[int]]], settings: plain_loop.Settings, domains: int,
    step_size: float, smoothing: float,
) -> Iterator[Record]:  # fmt: skip
    """``batches``: every global batch, and the domain of each of its rows."""
    w = {name: weight.detach().double().clone() for name, weight in proxy.items()}
    m = {name: torch.zeros_like(weight) for name, weight in w.items()}
    v = {name: torch.zeros_like(weight) for name, weight in w.items()}
    alpha, excess, total = [1 / domains] * domains, [0.0] * domains, [0.0] * domains
    for step, (batch, rows) in enumerate(batches):
        leaves = {name: weight.clone().requires_grad_() for name, weight in w.items()}
        ours = plain_loop.token_losses(leaves, shape, batch)
        theirs = plain_loop.token_losses(reference, shape, batch)
        is_target = torch.as_tensor(np.asarray(batch.targets) != plain_loop.IGNORE)
        own = {}
        for domain in range(domains):
            mask = is_target & (torch.as_tensor(rows) == domain)[:, None]
            if mask.any():
                own[domain] = ours[mask].mean()
                excess[domain] = float(torch.relu(ours[mask].detach() - theirs[mask]).mean())
        raised = [weight * math.exp(step_size * excess[domain]) for domain, weight in enumerate(alpha)]
        alpha = [(1 - smoothing) * weight / sum(raised) + smoothing / domains for weight in raised]
        total = [before + weight for before, weight in zip(total, alpha, strict=True)]
        share = sum(alpha[domain] for domain in own)
        objective = sum(alpha[domain] / share * mean for domain, mean in own.items())
        assert isinstance(objective, Tensor)
        objective.backward()  # type: ignore[no-untyped-call]
        grads = {name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items()}
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
        scale = 1.0 if settings.clip is None else min(1.0, settings.clip / (norm + 1e-6))
        scaled = {name: grad * scale for name, grad in grads.items()}
        w, m, v = plain_loop.adamw(w, scaled, m, v, step + 1, plain_loop.learning_rate(settings, step), settings)
        means = [weight / (step + 1) for weight in total]
        yield Record(
            alpha, means, list(excess), objective.item(), float(ours.detach().sum() / is_target.sum()), norm, w
        )
