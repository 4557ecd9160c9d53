"""The oracle itself, against transformers, torch's optimiser and schedulers, and windows written down by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from support.oracles import fast_loop, plain_loop
from support.oracles.plain_loop import IGNORE, Batch, Record, Scaling, Settings, Shape, Weights

transformers = pytest.importorskip("transformers")

SHAPES = {
    "mha": Shape(2, 16, 4, 4, 4, 24, 31),
    "gqa": Shape(2, 24, 6, 2, 8, 40, 31, rope_theta=500.0),
    "tied": Shape(1, 16, 4, 1, 4, 24, 31, tied_embeddings=True, norm_eps=1e-3),
    "llama3": Shape(2, 16, 2, 1, 16, 24, 31, rope_scaling=Scaling(8.0, 1.0, 4.0, 64)),
    "qk_norm": Shape(2, 16, 4, 2, 4, 24, 31, qk_norm=True),
}
THEIR_NAMES = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm", "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj", "ffn.w3": "mlp.up_proj",
}  # fmt: skip


def their_name(name: str) -> str:
    if not name.startswith("blocks."):
        plain = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
        return plain.get(name, "lm_head.weight")
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{THEIR_NAMES[rest.removesuffix('.weight')]}.weight"


def their_config(shape: Shape) -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        factor, low, high, original = shape.rope_scaling
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        rope |= {"original_max_position_embeddings": original}
    made = transformers.Qwen3Config if shape.qk_norm else transformers.LlamaConfig
    return made(
        vocab_size=shape.vocab_size, hidden_size=shape.dim, intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.num_kv_heads, rms_norm_eps=shape.norm_eps, max_position_embeddings=512,
        tie_word_embeddings=shape.tied_embeddings, rope_parameters=rope, attention_bias=False,
    )  # fmt: skip


class Rotary(nn.Module):
    """transformers computes angles in float32 whatever the model's dtype; this stands in for it in float64."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * torch.cat([self.frequencies, self.frequencies])
        return angles.cos(), angles.sin()


def theirs(shape: Shape, weights: Weights) -> nn.Module:
    """Their model with our weights, in float64 throughout: their norms too would go down to float32."""
    made = transformers.Qwen3ForCausalLM if shape.qk_norm else transformers.LlamaForCausalLM
    model = made._from_config(their_config(shape), attn_implementation="sdpa").double()
    model.model.rotary_emb = Rotary(plain_loop.rope_frequencies(shape))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                setattr(module, name, norm)
    parameters = dict(model.named_parameters())
    assert {their_name(name) for name in weights} == set(parameters)
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[their_name(name)].copy_(weight)
    return model


def wild_weights(shape: Shape, seed: int = 0) -> Weights:
    """Nothing at its initial value, norms included; large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64) * (0.3 if len(size) > 1 else 0.5)
        + (1.0 if len(size) == 1 else 0.0)
        for name, size in plain_loop.parameter_shapes(shape).items()
    }


def random_batch(shape: Shape, rows: int, length: int, seed: int = 0, ignored: float = 0.2) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, shape.vocab_size, (rows, length))
    targets = rng.integers(0, shape.vocab_size, (rows, length))
    targets[rng.random((rows, length)) < ignored] = IGNORE
    return Batch(tokens, targets, np.tile(np.arange(length), (rows, 1)), np.zeros((rows, length), np.int64))


def worst(ours: Tensor, others: Tensor) -> float:
    """max |a - b| / max |b|"""
    assert ours.dtype == others.dtype == torch.float64
    assert ours.shape == others.shape
    return float((ours - others).abs().max() / others.abs().max())


def their_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(torch.as_tensor(batch.tokens), position_ids=torch.as_tensor(batch.positions), use_cache=False).logits
    targets = torch.as_tensor(batch.targets)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("case", SHAPES)
def test_logits_and_every_gradient_are_those_of_transformers(case: str) -> None:
    shape = SHAPES[case]
    weights = wild_weights(shape)
    model = theirs(shape, weights)
    batch = random_batch(shape, 3, 40)
    tokens, positions, documents = (torch.as_tensor(x) for x in (batch.tokens, batch.positions, batch.documents))
    ours = plain_loop.forward(weights, shape, tokens, positions, documents)
    assert worst(ours, model(tokens, use_cache=False).logits.detach()) < 1e-12
    loss = their_loss(model, batch) / int((batch.targets != IGNORE).sum())
    loss.backward()
    (record,) = plain_loop.train(weights, shape, [[batch]], Settings(steps=1))
    assert record.loss == pytest.approx(loss.item(), rel=1e-13)
    parameters = dict(model.named_parameters())
    for name, grad in record.grads.items():
        assert worst(grad, parameters[their_name(name)].grad) < 1e-12, name
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert record.grad_norm == pytest.approx(norm.item(), rel=1e-13)


@pytest.mark.parametrize("case", ["gqa", "llama3"])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rotary_frequencies_are_those_of_transformers(case: str, head_dim: int) -> None:
    shape = Shape(**{**vars(SHAPES[case]), "head_dim": head_dim})
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(their_config(shape))
    torch.testing.assert_close(plain_loop.rope_frequencies(shape).float(), rotary.inv_freq, rtol=2e-6, atol=0)
    if case == "llama3":  # all three bands occur: kept, blended, divided
        plain = plain_loop.rope_frequencies(Shape(**{**vars(shape), "rope_scaling": None}))
        ratio = plain / plain_loop.rope_frequencies(shape)
        assert (ratio == 1).any()
        assert (ratio == 8).any()
        assert head_dim < 64 or ((ratio > 1) & (ratio < 8)).any()


@pytest.mark.parametrize("case", ["gqa", "qk_norm"])
def test_packed_documents_do_not_see_each_other(case: str) -> None:
    shape = SHAPES[case]
    weights = wild_weights(shape)
    model = theirs(shape, weights)
    lengths = [[5, 1, 14], [20], [1, 1, 18]]
    tokens = torch.as_tensor(random_batch(shape, 3, 20, seed=1).tokens)
    positions = torch.tensor([[p for length in row for p in range(length)] for row in lengths])
    documents = torch.tensor([[d for d, length in enumerate(row) for _ in range(length)] for row in lengths])
    packed = plain_loop.forward(weights, shape, tokens, positions, documents)
    for row, parts in enumerate(lengths):
        start = 0
        for length in parts:
            alone = model(tokens[row : row + 1, start : start + length], use_cache=False).logits[0].detach()
            assert worst(packed[row, start : start + length], alone) < 1e-12
            start += length


def test_steps_are_those_of_torch_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps with clipping that binds on some, a schedule, and one step without a finite loss."""
    shape = SHAPES["gqa"]
    weights = wild_weights(shape)
    settings = Settings(steps=6, lr=0.02, warmup=2, weight_decay=0.3, clip=9.0, schedule="cosine", eps=1e-5)
    batches = [[random_batch(shape, 2, 12, seed=step)] for step in range(6)]
    poisoned = batches[3][0]
    real = plain_loop.token_losses
    monkeypatch.setattr(
        plain_loop, "token_losses", lambda w, s, b: real(w, s, b) * (math.nan if b is poisoned else 1.0)
    )
    model = theirs(shape, weights)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=settings.lr, betas=(0.9, 0.95), eps=settings.eps,
    )  # fmt: skip
    norms = []
    for record in plain_loop.train(weights, shape, batches, settings):
        (batch,) = batches[record.step]
        optimizer.zero_grad()
        if record.step == 3:
            assert not record.applied
            assert math.isnan(record.grad_norm)
        else:
            (their_loss(model, batch) / int((batch.targets != IGNORE).sum())).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), settings.clip).item())
            assert record.grad_norm == pytest.approx(norms[-1], rel=1e-11)
            for group in optimizer.param_groups:
                group["lr"] = record.lr
            optimizer.step()
        assert record.updates == record.step + (record.step < 3)
        parameters = dict(named)
        for name in weights:
            their = parameters[their_name(name)]
            assert worst(record.weights[name], their.detach()) < 1e-12, (record.step, name)
            # gradients that nearly cancel leave rounding of the size of their terms in the moments
            assert worst(record.first_moments[name], optimizer.state[their]["exp_avg"]) < 1e-11
            assert worst(record.second_moments[name], optimizer.state[their]["exp_avg_sq"]) < 1e-11
    assert min(norms) < settings.clip < max(norms)


def test_non_finite_steps_poison_when_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["tied"]
    real = plain_loop.token_losses
    monkeypatch.setattr(plain_loop, "token_losses", lambda w, s, b: real(w, s, b) * math.inf)
    batches = [[random_batch(shape, 1, 4)]]
    (record,) = plain_loop.train(wild_weights(shape), shape, batches, Settings(steps=1, skip_non_finite=False))
    assert record.applied
    assert not torch.isfinite(record.weights["norm.weight"]).all()


def test_micro_batches_are_one_batch_by_tokens() -> None:
    shape = SHAPES["mha"]
    weights = wild_weights(shape)
    whole = random_batch(shape, 5, 16, seed=3)
    whole.targets[3:] = IGNORE
    whole.targets[4, 2] = 7
    cuts = [slice(0, 1), slice(1, 3), slice(3, 5)]
    parts = [Batch(*(getattr(whole, name)[cut] for name in vars(whole))) for cut in cuts]
    (one,) = plain_loop.train(weights, shape, [[whole]], Settings(steps=1))
    (three,) = plain_loop.train(weights, shape, [parts], Settings(steps=1))
    assert one.valid_tokens == three.valid_tokens == (whole.targets != IGNORE).sum()
    assert three.loss == pytest.approx(one.loss, rel=1e-14)
    assert max(worst(three.grads[name], one.grads[name]) for name in weights) < 1e-12


def test_padded_rows_are_never_read() -> None:
    shape = SHAPES["gqa"]
    weights = wild_weights(shape)
    padded = {**weights}
    for name in ("embed.weight", "head.weight"):
        padded[name] = torch.cat([weights[name], torch.full((5, shape.dim), 3.0, dtype=torch.float64)])
    batches = [[random_batch(shape, 2, 9)]]
    (ours,) = plain_loop.train(weights, shape, batches, Settings(steps=1))
    (other,) = plain_loop.train(padded, shape, batches, Settings(steps=1))
    assert other.loss == ours.loss
    assert not other.grads["embed.weight"][shape.vocab_size :].any()
    assert not other.grads["head.weight"][shape.vocab_size :].any()
    assert torch.equal(other.weights["norm.weight"], ours.weights["norm.weight"])


def test_schedules_are_those_of_torch() -> None:
    steps, warmup, lr, final = 50, 10, 0.3, 0.2
    weight = nn.Parameter(torch.zeros(1))

    def rates(kind: type, **arguments: float) -> list[float]:
        optimizer = torch.optim.SGD([weight], lr=lr)
        scheduler = kind(optimizer, **arguments)
        found = []
        for _ in range(steps - warmup):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    schedulers = torch.optim.lr_scheduler
    expected = {
        "cosine": rates(schedulers.CosineAnnealingLR, T_max=steps - warmup, eta_min=final * lr),
        "linear": rates(schedulers.LinearLR, start_factor=1.0, end_factor=final, total_iters=steps - warmup),
        "constant": [lr] * (steps - warmup),
    }
    expected["wsd"] = [lr] * 30 + rates(schedulers.LinearLR, start_factor=1.0, end_factor=final, total_iters=10)[:10]
    for kind, after in expected.items():
        settings = Settings(steps=steps, lr=lr, schedule=kind, warmup=warmup, final=final, decay=0.2)
        ours = [plain_loop.learning_rate(settings, step) for step in range(steps)]
        assert ours[:warmup] == pytest.approx([lr * n / 10 for n in range(1, 11)])
        assert ours[warmup:] == pytest.approx(after, rel=1e-9), kind


def test_windows_of_a_stream_written_by_hand() -> None:
    # a b | c d e | F G | h i j k   (capitals are purged); L = 4
    stream = [10, 11, 20, 21, 22, 30, 31, 40, 41, 42, 43]
    spans = [(0, 2, False), (2, 3, False), (5, 2, True), (7, 4, False)]
    none = IGNORE
    assert plain_loop.num_windows(stream, 4) == 2
    assert [plain_loop.window(stream, spans, i, 4, True) for i in range(2)] == [
        ([10, 11, 20, 21], [11, none, 21, 22], [0, 1, 0, 1], [0, 0, 1, 1]),
        ([22, 30, 31, 40], [none, none, none, 41], [0, 0, 1, 0], [0, 1, 1, 2]),
    ]
    assert [plain_loop.window(stream, spans, i, 4, False) for i in range(2)] == [
        ([10, 11, 20, 21], [11, 20, 21, 22], [0, 1, 2, 3], [0, 0, 0, 0]),
        ([22, 30, 31, 40], [none, none, 40, 41], [0, 1, 2, 3], [0, 0, 0, 0]),
    ]
    assert plain_loop.cu_seqlens([[0, 0, 1, 1], [0, 1, 1, 2]]) == [0, 2, 4, 5, 7, 8]


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 7))
def test_each_token_after_its_documents_first_is_a_target_once(lengths: list[int], seq_len: int) -> None:
    starts = np.cumsum([0, *lengths]).tolist()
    total = starts.pop()
    spans = [(start, length, False) for start, length in zip(starts, lengths, strict=True)]
    stream = list(range(100, 100 + total))  # every token tells its place
    count = plain_loop.num_windows(stream, seq_len)
    assert count == max(0, (total - 1) // seq_len)
    windows = [plain_loop.window(stream, spans, i, seq_len, True) for i in range(count)]
    targets = [target - 100 for row in windows for target in row.targets if target != IGNORE]
    assert targets == [place for place in range(1, count * seq_len + 1) if place not in starts]
    for row in windows:
        assert row.positions[0] == row.documents[0] == 0
        for at, target in enumerate(row.targets):
            assert target in (IGNORE, row.tokens[at] + 1)  # the next token of the stream


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", ["gqa", "tied", "qk_norm", "llama3"])
def test_fast_loop_takes_the_same_steps(case: str, masked: bool) -> None:
    shape = SHAPES[case]
    weights = plain_loop.random_weights(shape, 3)
    for name in {"embed.weight", "head.weight"} & set(weights):  # padded rows, which nothing may read
        weights[name] = torch.cat([weights[name], torch.ones(5, shape.dim)])
    settings = Settings(steps=8, lr=3e-3, warmup=2, clip=0.5)
    batches = []
    for step in range(8):
        batch = random_batch(shape, 4, 24, seed=step)
        if masked:
            batch.documents[:, 9:] = 1
            batch.positions[:, 9:] -= 9
        batches.append([Batch(*(getattr(batch, name)[cut] for name in vars(batch))) for cut in (slice(3), slice(3, 4))])
    loop = fast_loop.FastLoop(weights, shape, settings)
    ours: list[Record] = list(plain_loop.train(weights, shape, batches, settings))
    for record in ours:
        parts = []
        for batch in batches[record.step]:
            tokens, targets, positions, documents = (torch.as_tensor(part) for part in vars(batch).values())
            parts.append((tokens, targets, positions if masked else positions[0], documents if masked else None))
        loss, norm = loop.step(parts)
        assert loss == pytest.approx(record.loss, rel=1e-5)
        assert norm == pytest.approx(record.grad_norm, rel=1e-3)
    assert ours[-1].loss != pytest.approx(ours[0].loss, rel=1e-3)
