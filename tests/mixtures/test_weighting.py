"""Weights by size, under caps: against the papers' own algorithm, a level found by bisection, and an integral."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from quern.errors import InputError
from quern.mixtures.recipe import MixtureSource
from quern.mixtures.weighting import DECAY, even_weights, fresh_tokens, tempered, weigh


def source(tokens: int, seq_len: int = 10, max_epochs: float = 4.0) -> MixtureSource:
    return MixtureSource("web", "r/web/1", "r/web", tokens, max(tokens - 1, 0) // seq_len, 1.0, max_epochs)


def unimax(limits: list[int], budget: int) -> list[float]:
    """Algorithm 1 of Chung et al. (2023): languages by size, each its even share of what is left, or all it has."""
    found, left = [0.0] * len(limits), float(budget)
    for place, own in enumerate(sorted(range(len(limits)), key=limits.__getitem__)):
        found[own] = min(left / (len(limits) - place), limits[own])
        left -= found[own]
    return found


def by_level(weights: list[float], limits: list[int], total: int) -> list[float]:
    """The level at which min(limit, level · weight) adds up to the total, by bisection."""
    low, high = 0.0, 1e9
    for _ in range(300):
        middle = (low + high) / 2
        if sum(min(limit, middle * weight) for weight, limit in zip(weights, limits, strict=True)) < total:
            low = middle
        else:
            high = middle
    return [min(limit, high * weight) for weight, limit in zip(weights, limits, strict=True)]


@given(st.data())
def test_caps_cut_off_and_the_rest_goes_to_the_others(data: Any) -> None:
    limits = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=len(limits), max_size=len(limits)))
    total = data.draw(st.integers(0, sum(limits)))
    found = even_weights(weights, limits, total)
    assert sum(found) == total
    assert all(0 <= own <= limit for own, limit in zip(found, limits, strict=True))
    for own, exact in zip(found, by_level(weights, limits, total), strict=True):
        assert abs(own - exact) < 1 + 1e-6
    for own, exact in zip(even_weights([1.0] * len(limits), limits, total), unimax(limits, total), strict=True):
        assert abs(own - exact) < 1 + 1e-6


def test_without_caps_weights_are_shares_of_a_power() -> None:
    """XLM's own example of its formula: q = p^α / Σ p^α."""
    sizes, alpha = [900, 90, 10], 0.5
    powers = [(size / 1000) ** alpha for size in sizes]
    found = tempered(sizes, alpha)
    for own, power in zip(found, powers, strict=True):
        assert own / sum(found) == pytest.approx(power / sum(powers), rel=1e-14)
    assert tempered([7, 0], 0.0) == [1.0, 0.0]
    with pytest.raises(InputError, match=r"alpha: expected a number from 0 to 1, got 1\.5"):
        tempered(sizes, 1.5)


def test_a_source_keeps_two_samples_of_its_cap_and_none_without_a_window() -> None:
    found = weigh([source(1011), source(100_001), source(5)], 3000, 0.0)
    assert found == [402, 2598, 0]  # 101 windows four times, but for two
    assert weigh([source(1011, max_epochs=0.5), source(100_001)], 3000, 0.0)[0] == 48
    with pytest.raises(InputError, match=r"max_epochs: 9,000 samples are planned, and the sources give 402 at most"):
        weigh([source(1011)], 9000, 1.0)


@pytest.mark.parametrize("epochs", [0.2, 1.0, 1.5, 4.0, 16.0, 60.0])
def test_a_repetition_is_worth_less_and_less(epochs: float) -> None:
    """Each repetition is worth e^(-r / R*) of a fresh reading, r repetitions later."""
    again, _ = quad(lambda r: math.exp(-r / DECAY), 0, max(epochs - 1, 0))
    assert fresh_tokens(1000, epochs) == pytest.approx(1000 * (min(epochs, 1) + again), rel=1e-9)


def test_four_epochs_are_nearly_as_good_as_fresh_ones() -> None:
    """The paper's word: up to four epochs repeated data are almost as good as new, and sixteen are worth far less."""
    assert fresh_tokens(1, 4) > 0.9 * 4
    assert fresh_tokens(1, 60) < 0.3 * 60
