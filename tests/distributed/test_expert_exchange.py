"""Tokens sent to the ranks of their experts and back, against a loop over tokens and choices: results and all
gradients.

The tokens of a rank and where they go are, but for `idle` and `home`, the same on 2, 3, 4 and 8 ranks, and so is what
the loop makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quern.model.moe import experts as module
from quern.model.moe.experts import Experts
from quern.parallel.experts.exchange import Compute, Exchange, Places

EXPERTS, DIM, WIDTH = 24, 6, 5
TOKENS = (7, 1, 12, 0, 5, 3, 9, 2)
"""By rank; where experts have places, all ranks have as many."""
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    how: str
    """To which experts tokens go: ``any``; ``few``; all to ``one``; none to those of rank 1 (``idle``); those of rank 0
    to its own alone (``home``); some choices to ``none``."""
    top_k: int
    node: int | None = None
    """Of the ranks, those to which a token travels once."""
    places: tuple[int, int] | None = None
    """Of an expert, for one token: numerator and denominator."""
    dtype: torch.dtype = torch.float64
    poisoned: bool = False
    """A token that goes to no expert is not a number, nor is its gradient, nor what products leave unwritten."""


ANY = Case("any", 2)
CASES = {
    2: [
        replace(ANY, top_k=6), Case("few", 3), Case("idle", 2), Case("home", 2), Case("one", 1), Case("none", 3),
        Case("none", 3, poisoned=True), Case("any", 2, places=(1, 8)), Case("none", 5, places=(1, 2), poisoned=True),
        Case("one", 1, places=(1, 2)), replace(ANY, top_k=4, dtype=torch.bfloat16),
        Case("any", 4, places=(1, 2), dtype=torch.bfloat16),
    ],
    3: [replace(ANY, top_k=4), Case("idle", 5), Case("home", 3), Case("any", 3, places=(1, 5))],
    4: [
        replace(ANY, top_k=1), Case("any", 6, node=2), Case("idle", 2, node=2), Case("home", 3, node=2),
        Case("none", 4, node=2, poisoned=True), Case("any", 4, node=2, dtype=torch.bfloat16),
        Case("any", 3, places=(1, 6)),
    ],
    8: [
        replace(ANY, top_k=3), Case("any", 6, node=4), Case("few", 3, node=2), Case("idle", 5, node=4),
        Case("none", 5, places=(1, 4), poisoned=True),
    ],
}  # fmt: skip


@dataclass
class Given:
    """Of one rank: tokens, experts and weights of their choices, and the gradient of the result."""

    x: Tensor
    sent: Tensor
    weights: Tensor
    upstream: Tensor


def given(case: Case, rank: int, world: int) -> Given:
    generator = torch.Generator().manual_seed(1000 * case.top_k + rank)
    tokens, held = 9 if case.places else TOKENS[rank], EXPERTS // world
    normal: Callable[..., Tensor] = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    x, upstream = normal(tokens, DIM), normal(tokens, DIM)
    merit, weights = normal(tokens, EXPERTS), normal(tokens, case.top_k)
    lost = torch.rand(tokens, case.top_k, generator=generator) < 0.4
    allowed = torch.ones(EXPERTS, dtype=torch.bool)
    if case.how == "few":
        allowed = torch.isin(torch.arange(EXPERTS), torch.tensor([0, 5, 17]))
    elif case.how == "one":
        allowed = torch.arange(EXPERTS) == 7
    elif case.how == "idle":
        allowed[held : 2 * held] = False
    elif case.how == "home" and rank == 0:
        allowed[held:] = False
    sent = merit.masked_fill(~allowed, -1e9).topk(case.top_k).indices
    if case.how == "none":
        sent[lost] = EXPERTS
    if case.poisoned and tokens:
        x[0], upstream[0], sent[0] = NAN, NAN, EXPERTS
    if case.places:
        most, taken = -(-tokens * case.places[0] // case.places[1]), [0] * EXPERTS
        for choices in sent:
            for place, expert in enumerate(choices.tolist()):
                if expert == EXPERTS:
                    continue
                taken[expert] += 1
                if taken[expert] > most:
                    choices[place] = EXPERTS
    return Given(x, sent, weights, upstream)


def whole_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(EXPERTS, WIDTH, DIM), (EXPERTS, DIM, WIDTH), (EXPERTS, WIDTH, DIM)]
    return [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]


Found = tuple[list[tuple[Tensor, ...]], list[Tensor]]
"""Of each rank the result and the gradients of tokens and of weights; gradients of all experts' weights."""


def by_hand(case: Case, world: int) -> Found:
    """Token by token, choice by choice."""
    experts, by_rank = [weight.requires_grad_() for weight in whole_weights()], []
    for rank in range(world):
        own = given(case, rank, world)
        x, weights = own.x.requires_grad_(), own.weights.requires_grad_()
        rows = []
        for t, choices in enumerate(own.sent.tolist()):
            row = torch.zeros(DIM, dtype=torch.float64)
            for k, expert in enumerate(choices):
                if expert < EXPERTS:
                    w1, w2, w3 = (weight[expert] for weight in experts)
                    gate = w1 @ x[t]
                    row = row + weights[t, k] * (w2 @ (gate * torch.sigmoid(gate) * (w3 @ x[t])))
            rows.append(row)
            if choices != [EXPERTS] * case.top_k:
                (row @ own.upstream[t]).backward()
        y = torch.stack(rows).detach() if rows else torch.zeros(0, DIM, dtype=torch.float64)
        gradients = (torch.zeros_like(value) if value.grad is None else value.grad for value in (x, weights))
        by_rank.append((y, *gradients))
    return by_rank, [torch.zeros_like(w) if w.grad is None else w.grad for w in experts]


class _Spoilt(torch.autograd.Function):
    """Rows from ``end`` on hold no numbers; ``forward`` where they are a result, else in the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, end: int, forward: bool) -> Tensor:
        ctx.end = None if forward else end
        rows = rows.clone()
        if forward:
            rows[end:] = NAN
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        if ctx.end is not None:
            grad[ctx.end :] = NAN
        return grad, None, None


def spoilt(x: Tensor, weight: Tensor, ends: Tensor, *recipe: Any) -> Tensor:
    """A product that leaves rows after the last end as they are in fresh memory, forward and backward."""
    end = int(ends[-1])
    y = MULTIPLY(_Spoilt.apply(x, end, False), weight, ends, *recipe)
    return _Spoilt.apply(y, end, True)


MULTIPLY = module.multiply


def computed(case: Case, groups: dict[str, str], rank: int, world: int) -> tuple[Tensor, ...]:
    """On this rank: the result, gradients of tokens and weights, and of its own experts' weights."""
    held, own = EXPERTS // world, given(case, rank, world)
    x = own.x.to(case.dtype).requires_grad_()
    weights = own.weights.to(torch.promote_types(case.dtype, torch.float32)).requires_grad_()
    mine = [value[held * rank : held * (rank + 1)].clone().requires_grad_() for value in whole_weights()]
    experts = Experts(held, DIM, WIDTH)
    module.multiply = spoilt if case.poisoned else MULTIPLY  # type: ignore[assignment]
    if case.places:
        y = Places(groups["all"], world, held, case.places, lambda x, ends: experts.swiglu(x, ends, *mine))(
            x, own.sent, weights
        )
    else:
        compute: Compute = lambda x, sent, by, assigned: experts.multiply(x, sent, by, *mine, assigned=assigned)  # noqa: E731
        ranks, name = world, "all"
        if case.node:
            compute = Exchange(groups[f"of {case.node}"], case.node, held, compute)
            held, ranks, name = held * case.node, world // case.node, f"between {case.node}"
        y = Exchange(groups[name], ranks, held, compute)(x, own.sent, weights)
    y.backward(own.upstream.to(y.dtype))
    module.multiply = MULTIPLY
    assert y.dtype == case.dtype
    return tuple(value.double() for value in (y.detach(), x.grad, weights.grad, *(value.grad for value in mine)))


def exchanged(cases: list[Case]) -> list[tuple[Tensor, ...]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {"all": dist.group.WORLD.group_name}  # type: ignore[union-attr]
    for node in {case.node for case in cases if case.node}:
        for first in range(0, world, node):
            group = dist.new_group(list(range(first, first + node)))
            if rank in range(first, first + node):
                groups[f"of {node}"] = group.group_name
        for first in range(node):
            group = dist.new_group(list(range(first, world, node)))
            if rank % node == first:
                groups[f"between {node}"] = group.group_name
    return [computed(case, groups, rank, world) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_tokens_get_what_their_experts_give(run_ranks: Callable[..., list[Any]], world: int) -> None:
    by_rank = run_ranks(exchanged, world, CASES[world])
    for number, case in enumerate(CASES[world]):
        exact, of_experts = by_hand(case, world)
        experts = [torch.cat([own[number][3 + which] for own in by_rank]) for which in range(3)]
        found = [*(value for own in by_rank for value in own[number][:3]), *experts]
        expected = [*(value for own in exact for value in own), *of_experts]
        assert any(value.abs().max() > 0 for value in of_experts)
        # BF16 keeps 8 bits: seven roundings on the way from a token to its gradient, the greatest sum of six rows
        most = 1e-12 if case.dtype == torch.float64 else 2.0**-5
        for place, (value, other) in enumerate(zip(found, expected, strict=True)):
            assert value.shape == other.shape
            if other.numel():
                assert (value - other).abs().max() <= most * max(other.abs().max(), 1e-300), (case, place)


def test_choices_of_no_expert_read_nothing_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, where rows of dropped choices stay behind the last expert's."""
    monkeypatch.setattr(module, "multiply", spoilt)
    case = Case("none", 4, poisoned=True)
    own, experts = given(case, 0, 2), Experts(EXPERTS, DIM, WIDTH, drops=True).double()
    ((y, dx, dw), _), of_experts = by_hand(case, 2)
    x, weights = own.x.requires_grad_(), own.weights.requires_grad_()
    mine = [value.requires_grad_() for value in whole_weights()]
    found = experts.multiply(x, own.sent, weights, *mine)
    found.backward(own.upstream)
    other, rest = given(case, 1, 2), [value.grad.clone() for value in mine]  # type: ignore[union-attr]
    for value, exact in ((found, y), (x.grad, dx), (weights.grad, dw)):
        assert (value - exact).abs().max() <= 1e-12 * exact.abs().max()
    experts.multiply(other.x, other.sent, other.weights, *mine).backward(other.upstream)
    for value, before, exact in zip(mine, rest, of_experts, strict=True):
        assert before.isfinite().all()
        assert (value.grad - exact).abs().max() <= 1e-12 * exact.abs().max()
