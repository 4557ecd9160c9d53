"""Sampling against the uncached network and against the distribution it should follow."""

from __future__ import annotations

import pytest
import torch

from quern.model.config import ModelConfig
from quern.model.generate import _choose, generate
from quern.model.init import initialise
from quern.model.transformer import Transformer

VOCAB = 60


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(
        ModelConfig(num_layers=2, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=40, qk_norm=True).shape(VOCAB)
    ).double()
    initialise(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 30
    return model


def prompt(batch: int = 3, length: int = 5) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("length", [1, 5])
def test_greedy_is_the_argmax_of_the_network_without_a_cache(model, length):
    found = generate(model, prompt(3, length), max_new_tokens=24, temperature=0)
    tokens = prompt(3, length)
    for _ in range(24):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(dim=1, keepdim=True)], dim=1)
    assert torch.equal(found, tokens)
    assert len(set(tokens[0].tolist())) > 5  # the sequence is no fixed point, where any cache would do


def test_the_seed_decides_and_a_row_is_its_own(model):
    options = {"max_new_tokens": 20, "temperature": 1.5}
    once = generate(model, prompt(), seed=1, **options)
    assert torch.equal(once, generate(model, prompt(), seed=1, **options))
    assert not torch.equal(once, generate(model, prompt(), seed=2, **options))
    assert torch.equal(once[:1], generate(model, prompt()[:1], seed=1, **options))
    assert torch.equal(once[:, :5], prompt())
    same = generate(model, prompt()[:1].expand(2, -1), seed=1, **options)
    assert not torch.equal(same[0], same[1])


def test_draws_do_not_touch_the_global_random_state(model):
    before = torch.get_rng_state()
    generate(model, prompt(), max_new_tokens=3)
    assert torch.equal(before, torch.get_rng_state())


def counted(logits: torch.Tensor, num: int = 20_000, **options) -> torch.Tensor:
    """Share of each token over evenly spread chances."""
    settings = {"temperature": 1.0, "top_k": None} | options
    chance = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    chosen = _choose(logits.expand(num, -1), chance, settings["temperature"], settings["top_k"])
    return torch.bincount(chosen, minlength=logits.numel()) / num


def test_shares_are_the_softmax():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -torch.inf, 1.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(0)
        torch.testing.assert_close(counted(logits, temperature=temperature), expected, rtol=0, atol=1e-4)


def test_top_k_keeps_the_likeliest():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0])
    kept = torch.tensor([0.3, -torch.inf, 2.0, -torch.inf, 1.0])
    torch.testing.assert_close(counted(logits, top_k=3), kept.softmax(0), rtol=0, atol=1e-4)
    torch.testing.assert_close(counted(logits, top_k=99), logits.softmax(0), rtol=0, atol=1e-4)


def test_chances_at_the_ends_choose_a_kept_token():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]] * 2)
    chance = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert _choose(logits, chance, 1.0, None).tolist() == [2, 1]
    assert _choose(logits, chance, 1.0, 1).tolist() == [2, 2]


def test_a_row_that_ended_is_filled_up_and_all_ended_stop(model):
    free = generate(model, prompt(), max_new_tokens=20, temperature=0)
    eot = int(free[0, 5 + 3])
    bound = generate(model, prompt(), max_new_tokens=20, temperature=0, eot_id=eot)
    ends = []
    for row, expected in zip(bound.tolist(), free.tolist(), strict=True):
        end = 5 + expected[5:].index(eot) if eot in expected[5:] else len(expected) - 1
        ends.append(end)
        assert row[: end + 1] == expected[: end + 1]
        assert set(row[end + 1 :]) <= {eot}
    assert bound.shape[1] == max(ends) + 1
    alone = generate(model, prompt()[:1], max_new_tokens=20, temperature=0, eot_id=eot)
    assert alone.shape[1] == ends[0] + 1 < free.shape[1]


def test_nothing_new_returns_the_prompt(model):
    assert torch.equal(generate(model, prompt(), max_new_tokens=0), prompt())


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, "tokens: expected"),
        (torch.zeros(1, 0, dtype=torch.int64), {}, "tokens: expected"),
        (torch.tensor([[VOCAB]]), {}, r"tokens: expected ids in \[0, 60\)"),
        (torch.tensor([[-1]]), {}, r"tokens: expected ids in \[0, 60\)"),
        (prompt(), {"max_new_tokens": -1}, "max_new_tokens: expected an integer ≥ 0, got -1"),
        (prompt(), {"temperature": -0.5}, "temperature: expected a number ≥ 0, got -0.5"),
        (prompt(), {"top_k": 0}, "top_k: expected an integer ≥ 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(model, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, tokens, **{"max_new_tokens": 2} | options)
