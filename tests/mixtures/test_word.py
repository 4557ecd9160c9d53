"""The blended word: exact shares, even spread, and three functions that undo each other."""

from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import gcd

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quern.mixtures.word import MAX_PERIOD, Word, quantise
from support.named_cases import each
from support.oracles import order_reference as reference

RECIPES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 10**7)), min_size=1, max_size=40).filter(any)
BOUND = 1.68


def array(values):
    return np.array(values, dtype=np.uint64)


def letters(word, n):
    """Sources and ranks of the letters at positions ``n``."""
    sources, ranks = np.empty_like(n), np.empty_like(n)
    for source, where, rank in word.letters(n):
        sources[where], ranks[where] = source, rank
    return sources, ranks


def test_weights_become_the_integers_that_they_write():
    def check(weights, expected):
        assert quantise(weights) == expected

    each(
        [
            ([3], (1,)),
            ([0, 7, 0], (0, 1, 0)),
            ([2, 4, 6], (1, 2, 3)),
            ([0.1, 0.2, 0.7], (1, 2, 7)),
            ([0.5, 1e-6], (500_000, 1)),
            (["0.25", "1/3", "2e-1"], (15, 20, 12)),
            ([Fraction(1, 3), Fraction(1, 6)], (2, 1)),
            ([Decimal("0.3"), 1], (3, 10)),
            ([np.float32(0.1), np.float64(0.1), np.int64(1)], (1, 1, 10)),
            ([MAX_PERIOD - 1, 1], (MAX_PERIOD - 1, 1)),
        ],
        check,
    )


@pytest.mark.slow
@settings(max_examples=70)
@given(st.lists(st.one_of(st.floats(1e-3, 1), st.integers(1, 10**30)), min_size=1, max_size=20))
def test_weights_too_fine_are_rounded_by_largest_remainder(weights):
    exact = [Fraction(repr(weight)) for weight in weights]
    assume(min(exact) * 2**31 > sum(exact))
    counts = quantise(weights)
    total = sum(counts)
    assert total <= MAX_PERIOD
    assert gcd(*counts) == 1
    assert list(counts) == reference.quantise(weights)
    assert quantise(counts) == counts
    shares = [weight / sum(exact) for weight in exact]
    if any(count != share * total for count, share in zip(counts, shares, strict=True)):
        assert MAX_PERIOD % total == 0
        scale = MAX_PERIOD // total
        errors = [count * scale - share * MAX_PERIOD for count, share in zip(counts, shares, strict=True)]
        assert max(map(abs, errors)) < 1
        # whoever was rounded up had a remainder at least as large as any that was rounded down
        assert min((1 - e for e in errors if e > 0), default=1) >= max((-e for e in errors if e <= 0), default=0)


def test_what_is_no_recipe_is_refused_by_name():
    def check(weights, message):
        with pytest.raises(ValueError, match=message):
            quantise(weights)

    each(
        [
            ([], "at least one weight above 0"),
            ([0, 0.0], "at least one weight above 0"),
            ([1, -1], r"weights\[1\]: expected a number ≥ 0, got -1"),
            ([1, -1e-300], r"weights\[1\]"),
            ([float("nan")], r"weights\[0\].*nan"),
            ([1, float("inf")], r"weights\[1\].*inf"),
            ([Decimal("Infinity")], r"weights\[0\]"),
            ([np.float64("nan")], r"weights\[0\]"),
            ([1, True], r"weights\[1\].*True"),
            ([np.True_], r"weights\[0\]"),
            ([None], r"weights\[0\].*None"),
            (["much"], r"weights\[0\].*'much'"),
            (["1/0"], r"weights\[0\].*'1/0'"),
            ([1j], r"weights\[0\]"),
            ([1, 0, 1e-12], r"weights\[2\]: 1e-12 is less than 2\^-32"),
        ],
        check,
    )


@pytest.mark.parametrize("weights", [(), (0, 0), (-1, 3), (MAX_PERIOD, 1)])
def test_a_word_needs_quantised_weights(weights):
    with pytest.raises(ValueError, match="weights"):
        Word(weights)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
def test_a_whole_period_counted_by_hand(weights):
    word = Word(weights)
    size = 2 * word.period + 3
    sources, ranks = letters(word, np.arange(size, dtype=np.uint64))
    seen = Counter()
    for n, (source, rank) in enumerate(zip(sources.tolist(), ranks.tolist(), strict=True)):
        assert rank == seen[source]
        assert word.rank(n) == [seen[s] for s in range(len(weights))]
        seen[source] += 1
        if n + 1 == word.period:
            assert [seen[s] for s in range(len(weights))] == weights
    for source, weight in enumerate(weights):
        if weight:
            places = np.flatnonzero(sources == source)
            assert word.select(source, np.arange(places.size, dtype=np.uint64)).tolist() == places.tolist()


def check_inverse(weights, positions):
    word, plain = Word(weights), reference.Word(weights)
    sources, ranks = letters(word, array(positions))
    assert list(zip(sources.tolist(), ranks.tolist(), strict=True)) == [plain.letter(n) for n in positions]
    for source in set(sources.tolist()):
        here = sources == source
        assert np.array_equal(word.select(source, ranks[here]), array(positions)[here])
    for n, source, rank in zip(positions, sources.tolist(), ranks.tolist(), strict=True):
        before, after = word.rank(n), word.rank(n + 1)
        assert sum(before) == n
        assert before[source] == rank
        assert [b - a for a, b in zip(before, after, strict=True)] == [s == source for s in range(len(weights))]
        turned = word.rank(n + word.period)
        assert [b - a for a, b in zip(before, turned, strict=True)] == list(weights)


@pytest.mark.slow
@settings(max_examples=60)
@given(RECIPES, st.lists(st.integers(0, 2**62), min_size=1, max_size=6))
def test_letter_rank_and_select_undo_each_other(weights, positions):
    check_inverse(weights, positions)


def test_they_do_so_at_the_largest_period():
    rng = random.Random(3)
    for _ in range(60):
        num_sources = rng.randint(2, 40)
        weights = [rng.choice([1, 2, rng.randrange(1, 2**20), rng.randrange(2**28)]) for _ in range(num_sources)]
        weights = list(quantise([*(weight % 2**26 for weight in weights), 2**32]))
        weights[-1] += MAX_PERIOD - sum(weights) - rng.randint(0, 3)
        positions = [rng.randrange(2**62) for _ in range(8)]
        positions += [2**62, 2**62 - 1, MAX_PERIOD - 1, MAX_PERIOD, sum(weights) - 1]
        check_inverse(weights, positions)


def deviation(word, start, size):
    """Largest |count - n·w| over sources with a positive weight and stretches from ``start``, exactly in integers."""
    sources, _ = letters(word, np.arange(start, start + size, dtype=np.uint64))
    worst = 0
    lengths = np.arange(1, size + 1, dtype=np.int64)
    for source, weight in enumerate(word.weights):
        counts = np.cumsum(sources == source)
        worst = max(worst, int(np.abs(counts * word.period - lengths * weight).max()))
    return worst / word.period


@settings(max_examples=60)
@given(RECIPES)
def test_every_prefix_is_even(weights):
    assert deviation(Word(weights), 0, 3000) <= BOUND


@settings(max_examples=60)
@given(RECIPES, st.integers(0, 2**50))
def test_every_stretch_is_even(weights, start):
    assert deviation(Word(weights), start, 1000) <= 2 * BOUND


@pytest.mark.parametrize("num_sources", [2, 5, 20, 40])
def test_deep_trees_are_even(num_sources):
    """Fibonacci weights make the deepest tree."""
    weights = [1, 1]
    while len(weights) < num_sources:
        weights.append(weights[-1] + weights[-2])
    word = Word(weights)
    assert deviation(word, 0, 200_000) <= BOUND
    assert deviation(word, 12_345_678_901, 50_000) <= 2 * BOUND


def test_a_source_of_a_millionth_comes_once_in_a_million():
    word = Word(quantise([1, 1e-6]))
    assert word.period == 1_000_001
    places = word.select(1, np.arange(5, dtype=np.uint64)).tolist()
    assert {b - a for a, b in pairwise(places)} == {word.period}
    assert places[0] < word.period


def test_zeros_leave_the_word_of_the_others_as_it_is():
    a, _ = letters(Word((5, 5, 5)), np.arange(15, dtype=np.uint64))
    b, _ = letters(Word((0, 5, 0, 5, 5)), np.arange(15, dtype=np.uint64))
    assert [[1, 3, 4][s] for s in a.tolist()] == b.tolist()
