"""The layer with experts against one token at a time, in float64; its products against a loop; permutations of rows."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quern.model.moe import experts, products
from quern.model.moe.config import MoEShape
from quern.model.moe.layer import MoE
from quern.model.moe.routing import Routing, choose, routing
from quern.model.transformer import FeedForward

DIM = 16
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 8, "top_k": 2, "ffn_dim": 24, "normalize": True},
    "olmoe": {"num_experts": 8, "top_k": 3, "ffn_dim": 8},
    "qwen2": {"num_experts": 5, "top_k": 2, "ffn_dim": 8, "shared_ffn_dim": 24, "shared_gate": True},
    "switch": {"num_experts": 4, "top_k": 1, "ffn_dim": 8, "capacity": 1.0},
    "full experts": {"num_experts": 4, "top_k": 2, "ffn_dim": 8, "capacity": 0.7, "drop": "score", "normalize": True},
    "deepseek": {"num_experts": 12, "top_k": 4, "ffn_dim": 8, "shared_ffn_dim": 16, "score": "sigmoid", "bias": True,
                 "groups": 4, "top_groups": 2, "normalize": True, "scale": 2.5},
    "sigmoids": {"num_experts": 6, "top_k": 3, "ffn_dim": 8, "score": "sigmoid", "bias": True, "scale": 0.5},
}  # fmt: skip


def layer_of(moe: MoEShape, dtype: torch.dtype = torch.float64, dim: int = DIM, seed: int = 0) -> MoE:
    shared = FeedForward(dim, moe.shared_ffn_dim) if moe.shared_ffn_dim else None
    layer = MoE(moe, dim, shared).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * tensor.shape[-1] ** -0.5)
    return layer


def tokens_of(batch: int = 2, length: int = 13, dtype: torch.dtype = torch.float64, dim: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (2 * torch.randn(batch, length, dim, generator=generator, dtype=torch.float64)).to(dtype)


def scores_by_hand(logits: list[float], kind: str) -> list[float]:
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-logit)) for logit in logits]
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def choice_by_hand(merits: list[float], moe: MoEShape) -> list[int]:
    size = moe.num_experts // moe.groups
    groups = [range(group * size, (group + 1) * size) for group in range(moe.groups)]
    sums = [sum(sorted((merits[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(moe.groups), key=lambda group: (-sums[group], group))[: moe.top_groups]
    allowed = [e for group in best for e in groups[group]]
    return sorted(allowed, key=lambda e: (-merits[e], e))[: moe.top_k]


def kept_by_hand(chosen: list[list[int]], weights: list[list[float]], moe: MoEShape) -> set[tuple[int, int]]:
    """(token, expert) of what experts have room for."""
    if moe.capacity is None:
        return {(token, e) for token, row in enumerate(chosen) for e in row}
    room = math.ceil(Fraction(str(moe.capacity)) * len(chosen) * moe.top_k / moe.num_experts)
    kept = set()
    for e in range(moe.num_experts):
        asked = [(token, weights[token][row.index(e)]) for token, row in enumerate(chosen) if e in row]
        if moe.drop == "score":
            asked.sort(key=lambda pair: (-pair[1], pair[0]))
        kept |= {(token, e) for token, _ in asked[:room]}
    return kept


def weights_by_hand(scores: Any, chosen: list[int], moe: MoEShape) -> list[Any]:
    own = [scores[e] for e in chosen]
    whole = sum(own) if moe.normalize else 1.0
    return [moe.scale * one / whole for one in own]


def by_hand(layer: MoE, x_BLD: Tensor) -> Tensor:
    """Token by token, expert by expert; only the products and softmax or sigmoid are torch's."""
    moe, rows = layer.moe, x_BLD.flatten(0, 1)
    logits = [layer.router.weight @ x for x in rows]
    plain = [scores_by_hand(one.tolist(), moe.score) for one in logits]
    bias = layer.bias.tolist() if layer.bias is not None else [0.0] * moe.num_experts
    chosen = [choice_by_hand([s + b for s, b in zip(scores, bias, strict=True)], moe) for scores in plain]
    kept = kept_by_hand(chosen, [weights_by_hand(s, row, moe) for s, row in zip(plain, chosen, strict=True)], moe)
    found = []
    for token, x in enumerate(rows):
        scores = logits[token].sigmoid() if moe.score == "sigmoid" else logits[token].softmax(0)
        y = torch.zeros_like(x)
        for e, weight in zip(chosen[token], weights_by_hand(scores, chosen[token], moe), strict=True):
            if (token, e) in kept:
                w1, w2, w3 = (getattr(layer.experts, name)[e] for name in ("w1", "w2", "w3"))
                y = y + weight * (w2 @ (F.silu(w1 @ x) * (w3 @ x)))
        if layer.shared is not None:
            w1, w2, w3 = (getattr(layer.shared, name).weight for name in ("w1", "w2", "w3"))
            shared = w2 @ (F.silu(w1 @ x) * (w3 @ x))
            y = y + (shared if layer.shared_gate is None else shared * (layer.shared_gate.weight @ x).sigmoid())
        found.append(y)
    return torch.stack(found).view(x_BLD.shape)


def gradients(layer: MoE, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*layer.named_parameters(), strict=True)
    weigh = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    found = torch.autograd.grad(y, [x, *parameters], weigh, materialize_grads=True)
    return dict(zip(("x", *names), found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_every_gradient_equal_one_token_at_a_time(kind: str) -> None:
    layer = layer_of(MoEShape(**KINDS[kind]))
    x = tokens_of().requires_grad_()
    ours, theirs = layer(x), by_hand(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    exact = gradients(layer, theirs, x)
    for name, found in gradients(layer, ours, x).items():
        assert exact[name].abs().max() > 1e-3, name
        torch.testing.assert_close(found, exact[name], rtol=0, atol=1e-12, msg=name)


SHAPES = st.builds(
    lambda groups, size, share, **rest: dict(
        num_experts=groups * size, groups=groups, top_groups=(top := 1 + int(share[0] * (groups - 1))),
        top_k=1 + int(share[1] * (top * size - 1)), ffn_dim=4, **rest,
    ),
    groups=st.integers(1, 4), size=st.integers(1, 4), share=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    score=st.sampled_from(["softmax", "sigmoid"]), normalize=st.booleans(), scale=st.sampled_from([1.0, 2.5]),
    bias=st.booleans(), capacity=st.sampled_from([None, 0.3, 1.0, 1.1, 4.0]),
)  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(SHAPES, st.sampled_from(["position", "score"]), st.integers(1, 9), st.integers(0, 3), st.integers(0, 2**32))
def test_laws_of_routing(given: dict[str, Any], drop: str, tokens: int, levels: int, seed: int) -> None:
    """Logits of a few ``levels`` alone are equal for many experts; 0 levels are all different."""
    moe = MoEShape(**given, drop=drop if given["capacity"] is not None else "position")
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, moe.num_experts, generator=generator, dtype=torch.float64)
    bias = torch.randn(moe.num_experts, generator=generator).double() if moe.bias else None
    if levels:
        logits, bias = (logits * levels / 2).round(), None if bias is None else bias.round()
    found: Routing = routing(logits, moe, bias)
    counts = torch.bincount(found.sent_TK.flatten(), minlength=moe.num_experts + 1).tolist()
    for token, scores in enumerate(found.scores_TE.tolist()):
        merits = [s + b for s, b in zip(scores, bias.tolist(), strict=True)] if bias is not None else scores
        row = found.chosen_TK[token].tolist()
        assert len(set(row)) == moe.top_k
        assert len({e // moe.group_size for e in row}) <= moe.top_groups
        if row != choice_by_hand(merits, moe):  # sums of a group may round otherwise
            assert moe.groups > 1
            assert not levels
        weights = found.weights_TK[token]
        torch.testing.assert_close(weights, torch.tensor(weights_by_hand(scores, row, moe)).double(), rtol=1e-6, atol=0)
        assert scores == pytest.approx(scores_by_hand(logits[token].tolist(), moe.score), rel=1e-12)
        if moe.normalize:
            assert weights.sum().item() == pytest.approx(moe.scale, rel=1e-12)
    assert sum(counts) == tokens * moe.top_k
    kept = kept_by_hand(found.chosen_TK.tolist(), found.weights_TK.tolist(), moe)
    sent = {(t, e) for t, row in enumerate(found.sent_TK.tolist()) for e in row if e < moe.num_experts}
    assert sent == kept
    assert bool(((found.sent_TK == found.chosen_TK) | (found.sent_TK == moe.num_experts)).all())
    if moe.capacity is None:
        assert counts[-1] == 0
    else:
        room = math.ceil(Fraction(str(moe.capacity)) * tokens * moe.top_k / moe.num_experts)
        assert max(counts[:-1]) <= room
        assert (counts[-1] == 0) == (max(torch.bincount(found.chosen_TK.flatten()).tolist()) <= room)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_grouped_products_equal_a_loop(
    kind: str, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the largest value. BF16: two roundings of 2⁻⁸ each, of a sum and of what it goes into."""
    called = []
    real = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **options: called.append(1) or real(*args, **options))
    layer, x = layer_of(MoEShape(**KINDS[kind]), dtype), tokens_of(dtype=dtype).requires_grad_()
    y = layer(x)
    found = {"y": y, **gradients(layer, y, x)}
    assert len(called) == 9
    with monkeypatch.context() as context:
        context.setattr(products, "_grouped", lambda *_: False)
        y = layer(x)
        exact = {"y": y, **gradients(layer, y, x)}
    assert len(called) == 9
    for name, value in exact.items():
        assert found[name].dtype == dtype
        assert (found[name] - value).abs().max() <= bound * value.abs().max(), name


def test_half_precision_is_as_close_to_float64_as_its_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and tokens that BF16 holds exactly; scores are in float32, so that the choice is the same."""
    moe = MoEShape(**KINDS["deepseek"])
    layer, x = layer_of(moe, torch.bfloat16), tokens_of(dtype=torch.bfloat16)
    exact = layer_of(moe, torch.float64)
    exact.load_state_dict({name: tensor.double() for name, tensor in layer.state_dict().items()})
    assert torch.equal(layer.route(x.flatten(0, 1)).chosen_TK, exact.route(x.double().flatten(0, 1)).chosen_TK)
    assert layer.route(x.flatten(0, 1)).scores_TE.dtype == torch.float32
    assert (layer(x).double() - exact(x.double())).abs().max() <= 2**-6 * exact(x.double()).abs().max()


def test_sizes_that_no_grouped_product_takes_run_in_the_loop() -> None:
    moe = MoEShape(num_experts=3, top_k=2, ffn_dim=7)
    layer, x = layer_of(moe, torch.float32, dim=13), tokens_of(dtype=torch.float32, dim=13)
    exact = layer_of(moe, torch.float64, dim=13)
    assert (layer(x) - exact(x.double())).abs().max() <= 1e-5 * exact(x.double()).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("capacity", "tokens", "bias"),
    [(None, 9, [9.0, 0, 0, 0]), (0.5, 9, [9.0, 0, 0, 0]), (None, 1, [0.0, 9, 0, 0]), (0.1, 1, [0.0, 0, 0, 9])],
)
def test_all_tokens_to_one_expert_and_one_token(
    dtype: torch.dtype, capacity: float | None, tokens: int, bias: list[float]
) -> None:
    layer = layer_of(MoEShape(num_experts=4, top_k=1, ffn_dim=8, bias=True, capacity=capacity), dtype)
    layer.bias.copy_(torch.tensor(bias))
    x = tokens_of(1, tokens, dtype).requires_grad_()
    expert, room = bias.index(9), tokens if capacity is None else math.ceil(capacity * tokens / 4)
    y, exact = layer(x), by_hand(layer, x)
    assert (y - exact).abs().max() <= 1e-5
    assert torch.count_nonzero(y[0, room:]) == 0
    assert torch.count_nonzero(y[0, :room]) == room * DIM
    found = gradients(layer, y, x)
    for gradient in (found["experts.w1"], found["experts.w2"], found["experts.w3"]):
        assert torch.count_nonzero(gradient[[e for e in range(4) if e != expert]]) == 0
        assert gradient[expert].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_no_expert_reach_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a product leaves in them, and in their gradients, is NaN here."""
    real = experts.multiply

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows_SI: Tensor, end: int) -> Tensor:
            ctx.end = end
            return rows_SI.index_fill(0, torch.arange(end, len(rows_SI)), torch.nan)

        @staticmethod
        def backward(ctx: Any, grad_SI: Tensor) -> Any:
            return grad_SI.index_fill(0, torch.arange(ctx.end, len(grad_SI)), torch.nan), None

    def spoils(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor, recipe: None) -> Tensor:
        end = int(ends_E[-1])
        assert end < len(x_SI)
        return Spoilt.apply(real(Spoilt.apply(x_SI, end), weight_EOI, ends_E, recipe), end)

    layer, x = layer_of(MoEShape(**KINDS["full experts"]), dtype), tokens_of(dtype=dtype).requires_grad_()
    y = layer(x)
    plain = {"y": y, **gradients(layer, y, x)}
    monkeypatch.setattr(experts, "multiply", spoils)
    y = layer(x)
    for name, found in {"y": y, **gradients(layer, y, x)}.items():
        assert torch.isfinite(found).all(), name
        assert torch.equal(found, plain[name]), name


def test_bits_are_the_same_each_time() -> None:
    layer = layer_of(MoEShape(**KINDS["deepseek"]), torch.float32)
    runs = []
    for _ in range(3):
        x = tokens_of(4, 64, torch.float32).requires_grad_()
        y = layer(x)
        runs.append({"y": y, **gradients(layer, y, x)})
    for again in runs[1:]:
        assert all(torch.equal(again[name], value) for name, value in runs[0].items())


@pytest.mark.parametrize("groups", [1, 4])
def test_of_equal_scores_the_lower_number_is_chosen(groups: int) -> None:
    """Of many experts: torch.topk begins to differ there."""
    moe = MoEShape(num_experts=64, top_k=6, ffn_dim=1, groups=groups, top_groups=max(groups // 2, 1))
    assert choose(torch.ones(3, 64), moe).tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    merits = torch.ones(1, 64)
    merits[0, 20] = 2.0
    assert choose(merits, moe).tolist() == [[20, 0, 1, 2, 3, 4]]
    merits = torch.zeros(1, 64)
    merits[0, 32:] = 0.5
    assert choose(merits, moe).tolist() == [[32, 33, 34, 35, 36, 37]]


def test_the_bias_is_for_the_choice_alone() -> None:
    layer = layer_of(MoEShape(**KINDS["sigmoids"]))
    x_TD = tokens_of().flatten(0, 1)
    layer.bias.zero_()
    before = layer.route(x_TD)
    layer.bias[2] = 5.0
    after = layer.route(x_TD)
    assert torch.equal(before.scores_TE, after.scores_TE)
    assert bool((after.chosen_TK[:, 0] == 2).all())
    torch.testing.assert_close(after.weights_TK, 0.5 * after.scores_TE.gather(1, after.chosen_TK), rtol=0, atol=0)
    assert "bias" in layer.state_dict()


def test_a_layer_tells_its_routing() -> None:
    layer, seen = layer_of(MoEShape(**KINDS["switch"])), []
    layer.on_routing = seen.append
    x = tokens_of()
    layer(x)
    (found,) = seen
    assert all(torch.equal(a, b) for a, b in zip(found, layer.route(x.flatten(0, 1)), strict=True))
    assert int((found.sent_TK == 4).sum()) > 0
