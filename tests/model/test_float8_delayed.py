"""Delayed scaling: scales of a history that plain Python keeps too, on any number of ranks, recomputed and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from quern.model.float8.delayed import HISTORY, Amaxes
from quern.model.float8.linear import apply_linear, products
from quern.model.float8.quantise import E4M3, E5M2, cast
from quern.model.float8.recipe import Recipe
from quern.model.transformer import FeedForward

RECIPE = Recipe("tensorwise", "e5m2", delayed=True)
DYNAMIC = Recipe("tensorwise", "e5m2")
T, K, O = 32, 64, 48  # noqa: E741


def case(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """``x``, a weight and ``dy`` of a step: of another size in each."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, dy = (torch.randn(size, generator=generator) for size in ((T, K), (O, K), (T, O)))
    size = 2.0 ** torch.randint(-3, 4, (3,), generator=generator)
    return (x * size[0]).to(dtype), weight * size[1], (dy * size[2]).to(dtype)


def gradients(function: Callable[..., Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    out = function(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), dy)]


def by(layer: object) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: apply_linear(x, weight, layer)  # type: ignore[arg-type]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_scales_are_those_of_a_history_kept_by_hand():
    amaxes = Amaxes(["a", "b"])
    layer = amaxes.of("b", RECIPE)
    history: list[list[float]] = []
    for step in range(HISTORY + 5):
        x, weight, dy = case(step)
        parts = (x.float(), weight.bfloat16().float(), dy.float())
        own = [part.abs().max().item() for part in parts]
        known = [max(past) for past in zip(*history[-HISTORY:], strict=True)] if history else own
        values = []
        for part, most, fp8 in zip(parts, known, (E4M3, E4M3, E5M2), strict=True):
            scale = torch.tensor(most) / torch.finfo(fp8).max
            values.append(cast(part, scale, fp8).float() * scale)
        x_TK, weight_OK, dy_TO = values
        expected = [product.bfloat16() for product in (x_TK @ weight_OK.T, dy_TO @ weight_OK, dy_TO.T @ x_TK)]
        same(gradients(by(layer), x, weight, dy), [*expected[:2], expected[2].float()])
        assert amaxes.current.tolist() == [[0.0] * 3, own]
        amaxes.roll()
        history.append(own)
        assert amaxes.current.tolist() == [[0.0] * 3] * 2
        assert amaxes.history[1].T.tolist() == ([[0.0] * 3] * HISTORY + history)[-HISTORY:]


def test_the_first_step_is_dynamic_and_so_is_one_after_zeros():
    amaxes = Amaxes(["a"])
    matrices = case(0)
    same(gradients(by(amaxes.of("a", RECIPE)), *matrices), gradients(by(DYNAMIC), *matrices))
    amaxes = Amaxes(["a"])
    gradients(by(amaxes.of("a", RECIPE)), *(matrix * 0 for matrix in matrices))
    amaxes.roll()
    same(gradients(by(amaxes.of("a", RECIPE)), *matrices), gradients(by(DYNAMIC), *matrices))


def test_what_is_larger_than_all_of_the_history_is_clamped_for_a_step():
    amaxes = Amaxes(["a"])
    layer = amaxes.of("a", RECIPE)
    x, weight, dy = case(0)
    gradients(by(layer), x, weight, dy)
    amaxes.roll()
    for _ in range(2):
        out, _, _ = gradients(by(layer), x * 2.0**60, weight, dy)
        assert torch.isfinite(out).all()
    limit = x.abs().max().float() * weight.abs().sum(1).max()
    assert 0 < out.abs().max() <= 1.01 * limit
    amaxes.roll()
    out, _, _ = gradients(by(layer), x * 2.0**60, weight, dy)
    exact = (x.double() * 2.0**60) @ weight.double().T
    assert torch.linalg.norm(out.double() - exact) < 0.06 * torch.linalg.norm(exact)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_arrives_and_leaves_the_history_alone(bad, which):
    amaxes = Amaxes(["a"])
    layer = amaxes.of("a", RECIPE)
    gradients(by(layer), *case(0))
    amaxes.roll()
    before = amaxes.history.clone()
    matrices = list(case(1))
    matrices[which][3, 5] = bad
    found = gradients(by(layer), *matrices)
    reached = ((0, 2), (0, 1), (1, 2))[which]
    assert all(torch.isfinite(result).all() == (place not in reached) for place, result in enumerate(found))
    amaxes.roll()
    assert torch.isfinite(amaxes.history).all()
    assert amaxes.history[0, which, -1] == 0
    assert torch.equal(amaxes.history[..., :-1], before[..., 1:])


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_what_a_skipped_step_has_seen_stays_out_of_the_history(skipped):
    amaxes = Amaxes(["a"])
    layer = amaxes.of("a", RECIPE)
    gradients(by(layer), *case(0))
    amaxes.roll()
    before = amaxes.history.clone()
    gradients(by(layer), *(1e6 * matrix for matrix in case(1)))
    amaxes.roll(skip=torch.tensor(skipped))
    assert torch.equal(amaxes.history, before) == bool(skipped)
    assert not amaxes.current.any()


def test_ranks_with_parts_of_the_tokens_and_layers_keep_one_history():
    """Two ranks share a layer's tokens, each holds a layer that the other does not: MAX makes both one process's."""
    names = ["shared", "first's", "second's"]
    alone, ranks = Amaxes(names), [Amaxes(names), Amaxes(names)]
    for step in range(3):
        matrices = {name: case(10 * step + number) for number, name in enumerate(names)}
        parts: list[list[Tensor]] = []
        for name in names:
            whole = gradients(by(alone.of(name, RECIPE)), *matrices[name])
            if name != "shared":
                holder = ranks[names.index(name) - 1]
                same(gradients(by(holder.of(name, RECIPE)), *matrices[name]), whole)
                continue
            x, weight, dy = matrices[name]
            parts = [
                gradients(by(rank.of(name, RECIPE)), x[part], weight, dy[part])
                for rank, part in zip(ranks, (slice(0, T // 2), slice(T // 2, None)), strict=True)
            ]
            if step > 0:  # before, each has scales of its own tokens
                same([torch.cat([part[place] for part in parts]) for place in (0, 1)], whole[:2])
        most = torch.maximum(*[rank.current for rank in ranks])
        for rank in ranks:
            rank.roll(lambda seen, most=most: seen.copy_(most))
        alone.roll()
        for rank in ranks:
            assert torch.equal(rank.history, alone.history)


def test_recomputed_and_in_micro_batches_it_sees_the_same():
    x, weight, dy = case(0)
    plain, again, halves = (Amaxes(["a"]) for _ in range(3))
    expected = gradients(by(plain.of("a", RECIPE)), x, weight, dy)
    layer = again.of("a", RECIPE)
    same(gradients(lambda *both: checkpoint(by(layer), *both, use_reentrant=False), x, weight, dy), expected)
    layer = halves.of("a", RECIPE)
    for part in (slice(0, T // 2), slice(T // 2, None)):
        gradients(by(layer), x[part], weight, dy[part])
    assert torch.equal(again.current, plain.current)
    assert torch.equal(halves.current, plain.current)


def test_each_half_of_a_split_backward_pass_uses_the_same_scales():
    amaxes = Amaxes(["a"])
    layer = amaxes.of("a", RECIPE)
    gradients(by(layer), *case(0))
    amaxes.roll()
    x, weight, dy = case(1)
    state = amaxes.state_dict()
    _, dx, dw = gradients(by(layer), x, weight, dy)
    seen = amaxes.current
    amaxes.load_state_dict(state)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = apply_linear(x, weight, layer)
    assert torch.equal(torch.autograd.grad(out, x, dy, retain_graph=True)[0], dx)
    assert torch.equal(torch.autograd.grad(out, weight, dy)[0], dw)
    assert torch.equal(amaxes.current, seen)


def test_a_forward_outside_of_steps_leaves_no_trace():
    amaxes = Amaxes(["a"])
    layer = amaxes.of("a", RECIPE)
    gradients(by(layer), *case(0))
    before = amaxes.current
    with amaxes.kept(), torch.no_grad():
        apply_linear(case(1)[0] * 1000, case(1)[1], layer)
    assert torch.equal(amaxes.current, before)


def test_its_state_goes_on_where_it_was():
    one, other = Amaxes(["a", "b"]), Amaxes(["a", "b"])
    for step in range(3):
        gradients(by(one.of("b", RECIPE)), *case(step))
        one.roll()
    gradients(by(other.of("a", RECIPE)), *case(7))
    state = one.state_dict()
    gradients(by(one.of("b", RECIPE)), *case(3))
    one.roll()
    other.load_state_dict(state)
    gradients(by(other.of("b", RECIPE)), *case(3))
    other.roll()
    assert torch.equal(one.history, other.history)
    same(gradients(by(other.of("b", RECIPE)), *case(4)), gradients(by(one.of("b", RECIPE)), *case(4)))
    with pytest.raises(ValueError, match="expected those of 1"):
        Amaxes(["a"]).load_state_dict(state)
    with pytest.raises(ValueError, match="by name"):
        Amaxes(["a", "c"]).load_state_dict(state)


def test_delayed_is_of_tensorwise_and_of_a_layer():
    with pytest.raises(ValueError, match="not of blockwise"):
        Recipe("blockwise", delayed=True)
    with pytest.raises(AssertionError, match="needs a history"):
        products(RECIPE)
    amaxes = Amaxes(["a", "b"])
    first, again, second = (amaxes.of(name, RECIPE) for name in ("a", "a", "b"))
    assert isinstance(first, Recipe)
    assert first.multiple == 16
    assert len({first, again, second, RECIPE}) == 4


@pytest.mark.long
def test_compiled_to_one_graph_it_gives_the_same_bits_and_sees_the_same():
    """Forward and backward change what was seen; layers of one graph do not disturb each other."""
    eager, compiled = Amaxes(["a", "b"]), Amaxes(["a", "b"])

    def two(amaxes: Amaxes) -> Callable[[Tensor, Tensor], Tensor]:
        first, second = (amaxes.of(name, RECIPE) for name in amaxes.names)
        return lambda x, weight: apply_linear(apply_linear(x, weight, first), weight.T, second)

    plain, fast = two(eager), torch.compile(two(compiled), backend="aot_eager", fullgraph=True)
    for step in range(3):
        x, weight, _ = case(step)
        dy = case(step + 10)[0]
        same(gradients(fast, x, weight, dy), gradients(plain, x, weight, dy))
        assert torch.equal(compiled.current, eager.current)
        assert torch.count_nonzero(eager.current) == 6
        eager.roll()
        compiled.roll()


@pytest.mark.long
def test_blocks_with_histories_of_their_own_share_a_graph():
    """A graph for each would soon be more than torch keeps."""
    counter = CompileCounterWithBackend("aot_eager")
    names = [f"{number}.{name}" for number in range(3) for name in ("w1", "w2", "w3")]
    amaxes = Amaxes(names)
    blocks = [FeedForward(64, 128) for _ in range(3)]
    for number, block in enumerate(blocks):
        for name, layer in block.named_children():
            torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))
            layer.recipe = amaxes.of(f"{number}.{name}", RECIPE)
        block.compile(backend=counter, fullgraph=True)
    x = case(0)[0].requires_grad_()
    torch.stack([block(x) for block in blocks]).float().sum().backward()
    assert counter.frame_count == 1
    assert torch.count_nonzero(amaxes.current) == 27
