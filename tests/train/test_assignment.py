"""Who computes what: exactness, balance beside the best there is, and beside chance."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quern.train.batches.assignment import balance, check_divides, round_robin

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))


def waiting(costs: NDArray[np.int64], places: NDArray[np.int64]) -> int:
    """Time of a step whose ranks wait for each other at every micro-batch."""
    return int(costs[places].sum(axis=2).max(axis=0).sum())


def slowest(costs: NDArray[np.int64], places: NDArray[np.int64]) -> int:
    """Time of a step whose ranks wait for each other at its end."""
    return int(costs[places].sum(axis=(1, 2)).max())


def best_waiting(costs: list[int], world: int, micro_batch: int) -> int:
    """The least :func:`waiting` of all assignments, by trying each."""

    @cache
    def rounds(left: frozenset[int]) -> int:
        if not left:
            return 0
        first = min(left)  # rounds have no order: the next one has the first sample left
        return min(
            heaviest(frozenset(chosen) | {first}) + rounds(left - set(chosen) - {first})
            for chosen in combinations(sorted(left - {first}), world * micro_batch - 1)
        )

    @cache
    def heaviest(left: frozenset[int]) -> int:
        if not left:
            return 0
        first = min(left)
        return min(
            max(costs[first] + sum(costs[i] for i in chosen), heaviest(left - set(chosen) - {first}))
            for chosen in combinations(sorted(left - {first}), micro_batch - 1)
        )

    return rounds(frozenset(range(len(costs))))


def heavy_tailed(rng: np.random.Generator, num: int, seq_len: int = 2048) -> NDArray[np.int64]:
    """Σ length² of windows cut from documents of log-normal lengths."""
    lengths = np.maximum(1, rng.lognormal(6, 1.3, num * 40)).astype(np.int64)
    ends = np.cumsum(lengths)
    edges = np.unique(np.concatenate([[0], ends, np.arange(num + 1) * seq_len]))
    edges = edges[edges <= num * seq_len]
    pieces = np.diff(edges)
    return np.bincount(edges[:-1] // seq_len, pieces.astype(np.float64) ** 2, num).astype(np.int64)


@pytest.mark.slow
@given(shape=SHAPES, data=st.data())
def test_every_sample_has_one_place_and_every_rank_as_many(shape: tuple[int, int, int], data: st.DataObject) -> None:
    world, steps, micro_batch = shape
    num = world * steps * micro_batch
    costs = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=num, max_size=num)), np.int64)
    for places in (balance(costs, world, micro_batch), round_robin(num, world, micro_batch)):
        assert places.shape == shape
        assert sorted(places.ravel().tolist()) == list(range(num))
    assert np.array_equal(balance(costs.copy(), world, micro_batch), balance(costs, world, micro_batch))
    shifted = balance(costs + 12345, world, micro_batch)
    assert waiting(costs, shifted) == waiting(costs, balance(costs, world, micro_batch))


@given(world=st.integers(1, 6), steps=st.integers(1, 3), data=st.data())
def test_single_samples_wait_as_little_as_any_assignment_lets_them(world: int, steps: int, data: st.DataObject) -> None:
    num = min(world * steps, 9) // world * world
    costs = data.draw(st.lists(st.integers(0, 50), min_size=num, max_size=num))
    if world > 1:
        assert waiting(np.array(costs), balance(np.array(costs), world, 1)) == best_waiting(costs, world, 1)


@pytest.mark.parametrize(("world", "steps", "micro_batch"), [(2, 1, 2), (2, 2, 2), (3, 1, 2), (4, 1, 2), (2, 1, 4)])
def test_micro_batches_are_close_to_the_best_of_all_assignments(world: int, steps: int, micro_batch: int) -> None:
    rng = np.random.default_rng(5)
    ratios = []
    for _ in range(60):
        costs = heavy_tailed(rng, world * steps * micro_batch)
        ratios.append(
            waiting(costs, balance(costs, world, micro_batch)) / best_waiting(costs.tolist(), world, micro_batch)
        )
    assert min(ratios) >= 1
    assert max(ratios) < 1.34  # Graham's bound for LPT without equal counts
    assert np.mean(ratios) < 1.03


@pytest.mark.slow
@pytest.mark.parametrize(("world", "steps", "micro_batch"), [(8, 8, 1), (8, 8, 4), (64, 4, 2), (256, 8, 1)])
def test_balance_is_far_better_than_chance(world: int, steps: int, micro_batch: int) -> None:
    rng = np.random.default_rng(6)
    own, chance, own_end, chance_end = [], [], [], []
    for _ in range(10):
        costs = heavy_tailed(rng, world * steps * micro_batch)
        ideal = costs.sum() / world
        places = balance(costs, world, micro_batch)
        random = rng.permutation(costs.size).reshape(places.shape)
        own.append(waiting(costs, places) / ideal)
        chance.append(waiting(costs, random) / ideal)
        own_end.append(slowest(costs, places) / ideal)
        chance_end.append(slowest(costs, random) / ideal)
    assert np.mean(own) - 1 < 0.25 * (np.mean(chance) - 1)
    assert np.mean(own_end) - 1 < 0.1 * (np.mean(chance_end) - 1)


def test_round_robin_deals_places_in_turn() -> None:
    assert round_robin(12, 2, 3).tolist() == [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]]


def test_one_rank_takes_the_places_as_they_come() -> None:
    assert balance(np.array([5, 1, 9, 3]), 1, 2).tolist() == [[[0, 1], [2, 3]]]


def test_what_does_not_divide_is_told_with_what_would() -> None:
    assert check_divides(24, 3, 4) is None
    message = check_divides(30, 3, 4)
    assert message is not None
    assert "a multiple of 12 (3 data-parallel ranks × micro_batch 4), got 30; 24 or 36 would fit" in message
    assert message.endswith("or a micro_batch of 1, 2, 5, 10")
    small = check_divides(5, 4, 2)
    assert small is not None
    assert small.endswith("got 5; 8 would fit")
