"""Weights' noise, sizes and draws against brute force."""

from __future__ import annotations

import hashlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quern.mixtures.importance import draw as module
from quern.mixtures.importance.draw import CANDIDATE, Draw
from quern.mixtures.importance.weights import effective_size, gumbel, log_sums


def ids(count: int) -> list[bytes]:
    return [hashlib.md5(b"%d" % number).digest() for number in range(count)]


def candidates(scores: list[float], tokens: list[int] | None = None, seed: int = 0) -> np.ndarray:
    """With ids in an order that has nothing to do with theirs; their halves are equal now and then."""
    found = np.zeros(len(scores), CANDIDATE)
    found["score"], found["tokens"], found["row"] = scores, tokens or 1, np.arange(len(scores))
    order = np.random.default_rng(seed).permutation(len(scores))
    found["high"], found["low"] = order // 3, 2 - order % 3
    return found


SCORES = st.lists(st.integers(-2, 2), min_size=12, max_size=60)


@given(SCORES, st.integers(1, 20), st.integers(1, 4), st.integers(1, 6))
def test_the_first_k_are_those_of_a_sort_of_all(scores: list[int], most: int, chunk: int, waiting: int) -> None:
    every = candidates([float(score) for score in scores], seed=most)
    expected = sorted(every.tolist(), key=lambda row: (-row[0], row[1], row[2]))[:most]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WAITING", waiting)
        own = Draw(most)
        for first in range(0, len(every), chunk):
            own.add(every[first : first + chunk])
        assert own.first().tolist() == expected
        assert len(own._held) <= most + 1


@given(SCORES, st.data(), st.integers(1, 4), st.integers(1, 6))
def test_tokens_are_a_sum_that_is_not_exceeded(
    scores: list[int], data: st.DataObject, chunk: int, waiting: int
) -> None:
    tokens = [data.draw(st.integers(1, 9)) for _ in scores]
    most = data.draw(st.integers(1, 60))
    every = candidates([float(score) for score in scores], tokens, most)
    expected, total = [], 0
    for row in sorted(every.tolist(), key=lambda row: (-row[0], row[1], row[2])):
        total += row[3]
        if total > most:
            break
        expected.append(row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WAITING", waiting)
        own = Draw(most, by_tokens=True)
        for first in range(0, len(every), chunk):
            own.add(every[first : first + chunk])
        assert own.first().tolist() == expected


def test_noise_is_a_function_of_seed_and_document_alone() -> None:
    every = ids(50)
    found = gumbel(7, every)
    backwards = gumbel(7, every[::-1])[::-1]
    alone = [float(gumbel(7, [own])[0]) for own in every]
    assert found.tolist() == backwards.tolist() == alone
    assert not set(found.tolist()) & set(gumbel(8, every).tolist())
    for doc_id, value in zip(every, found.tolist(), strict=True):
        number = int.from_bytes(hashlib.blake2b(b"7\0gumbel\0" + doc_id, digest_size=8).digest(), "little")
        uniform = (Fraction(number >> 12) + Fraction(1, 2)) / 2**52
        assert value == pytest.approx(-math.log(-math.log(float(uniform))), rel=1e-12)


def test_noise_is_gumbels_and_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gumbel(1, ids(20_000))
    assert stats.kstest(found, stats.gumbel_r.cdf).pvalue > 1e-3
    ends = np.array([0, 2**64 - 1], np.uint64)
    monkeypatch.setattr("quern.mixtures.importance.weights.keyed_hashes", lambda *_: ends)
    least, greatest = gumbel(1, []).tolist()
    assert least == pytest.approx(-math.log(53 * math.log(2)), rel=1e-12)
    assert greatest == pytest.approx(53 * math.log(2), rel=1e-9)


def inclusion(weights: list[float], k: int) -> list[float]:
    """Of a draw of k without replacement, each by its share of the weights that are left: over all sequences."""
    found = [0.0] * len(weights)
    for sequence in itertools.permutations(range(len(weights)), k):
        chance, left = 1.0, sum(weights)
        for own in sequence:
            chance *= weights[own] / left
            left -= weights[own]
        for own in sequence:
            found[own] += chance
    return found


def test_documents_are_drawn_as_often_as_their_weights_say() -> None:
    """Over 2,000 seeds; each count is farther from its mean than allowed with a chance of 1e-7 (Hoeffding)."""
    weights, k, seeds = [0.5, 1.0, 1.0, 2.0, 4.0, 7.0], 3, 2000
    every = candidates([0.0] * len(weights))
    counts = np.zeros(len(weights))
    for seed in range(seeds):
        every["score"] = np.log(weights) + gumbel(seed, ids(len(weights)))
        own = Draw(k)
        own.add(every)
        counts[own.first()["row"]] += 1
    allowed = math.sqrt(math.log(2 / 1e-7) / (2 * seeds))
    np.testing.assert_allclose(counts / seeds, inclusion(weights, k), atol=allowed)


@given(st.lists(st.integers(-200, 200), max_size=12), st.integers(0, 12))
def test_effective_size_is_kishs(log_weights: list[int], cut: int) -> None:
    exact = [Fraction(2) ** own for own in log_weights]
    sums = [log_sums(np.array(part) * math.log(2)) for part in (log_weights[:cut], log_weights[cut:])]
    squares = sum(own * own for own in exact)
    expected = float(sum(exact) ** 2 / squares) if exact else 0.0
    assert effective_size(sums) == pytest.approx(expected, rel=1e-9)
