from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.dedup import verify as module
from quern.data_pipeline.dedup.bands import PAIR, sizes_of, tokens
from quern.data_pipeline.dedup.verify import VERIFIED, could_match, fitting, survivors, verify

#: Small ones too, of which many pairs are exactly as similar as a threshold.
_SETS = st.sets(st.integers(0, 3), min_size=1) | st.sets(st.integers(0, 2**64 - 1) | st.integers(0, 12), max_size=30)
_EDGES = st.dictionaries(
    st.tuples(st.integers(0, 12), st.integers(0, 12)).filter(lambda p: p[0] < p[1]), st.sampled_from([0.8, 0.9, 1.0])
)


def as_array(values: set[int]) -> np.ndarray:
    return np.array(sorted(values), dtype=np.uint64)


def as_verified(edges: dict[tuple[int, int], float]) -> np.ndarray:
    return np.array([(low, high, similarity, 0) for (low, high), similarity in edges.items()], dtype=VERIFIED)


def as_pairs(ends: list[tuple[int, int, int]], sets: dict[int, set[int]]) -> np.ndarray:
    low, high, band = np.array(ends, dtype=np.int64).reshape(-1, 3).T
    pairs = np.empty(len(ends), dtype=PAIR)
    for side, ranks in (("low", low), ("high", high)):
        pairs[side] = tokens(ranks, np.array([len(sets[rank]) for rank in ranks.tolist()], dtype=np.int64))
    pairs["band"] = band
    return pairs


def verified(ends: list[tuple[int, int, int]], sets: dict[int, set[int]], threshold: float) -> list[tuple]:
    """The documents' shingles stand in an order of their own."""
    order = sorted(sets, key=lambda rank: (rank * 7) % 5)
    shingles = np.concatenate([np.empty(0, dtype=np.uint64), *(as_array(sets[rank]) for rank in order)])
    ranks = np.array(sorted(sets), dtype=np.int64)
    sizes = np.array([len(sets[rank]) for rank in ranks.tolist()], dtype=np.int64)
    before = {rank: sum(len(sets[other]) for other in order[:place]) for place, rank in enumerate(order)}
    starts = np.array([before[rank] for rank in ranks.tolist()], dtype=np.int64)
    return verify(as_pairs(ends, sets), ranks, starts, sizes, shingles, threshold).tolist()


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.sampled_from([1, 20, 1 << 20]),
    st.lists(_SETS, min_size=2, max_size=8),
    st.data(),
    st.sampled_from([0.1, 0.5, 0.8, 1.0]),
)
def test_similarity_is_that_of_sets(at_once, sets, data, threshold):
    ranks = [3 * i + 2 for i in range(len(sets))]
    by_rank = dict(zip(ranks, sets, strict=True))
    pair = st.tuples(st.sampled_from(ranks), st.sampled_from(ranks), st.integers(0, 9)).filter(lambda p: p[0] < p[1])
    ends = data.draw(st.lists(pair, max_size=20))
    expected = []
    for low, high, band in ends:
        a, b = by_rank[low], by_rank[high]
        similarity = len(a & b) / len(a | b) if a | b else 0.0
        if similarity >= threshold:
            expected.append((low, high, similarity, band))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SHINGLES", at_once)
        assert verified(ends, by_rank, threshold) == expected


def test_sets_beside_one_that_is_far_larger_are_compared_with_it_at_once():
    rng = np.random.default_rng(3)
    sets = [
        set(range(3000)),
        *(set(rng.integers(0, 4000, size).tolist()) for size in (1, 5, 90, 170, 250, 2900)),
        set(),
    ]
    sets.append({*range(2500, 5000)})
    pairs = [(a, b) for a in range(len(sets)) for b in range(len(sets)) if a != b]
    given_ = np.zeros(len(pairs), dtype=PAIR)
    sizes = np.array([len(s) for s in sets])
    for side, place in (("low", 0), ("high", 1)):
        ranks = np.array([pair[place] for pair in pairs])
        given_[side] = tokens(ranks, sizes[ranks])
    shingles = np.array([value for s in sets for value in sorted(s)], dtype=np.uint64)
    found = verify(given_, np.arange(len(sets)), np.cumsum(sizes) - sizes, sizes, shingles, 0.0)
    assert found["similarity"].tolist() == [len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a, b in pairs]


def test_a_similarity_of_exactly_the_threshold_counts():
    sets = {3: set(range(9)), 7: set(range(1, 10))}  # 8 of 10
    assert verified([(3, 7, 5)], sets, 0.8) == [(3, 7, 0.8, 5)]
    assert verified([(3, 7, 5)], sets, np.nextafter(0.8, 1)) == []


def test_pieces_that_are_too_large_are_not_tried_again():
    """One pair takes less than a third of the budget, and two of them more than all: neither may be tried in turns."""
    sets = {8: set(range(3)), 14: set(range(3, 6)), 2: set(range(10)), 17: set(range(10, 20))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SHINGLES", 20)
        assert verified([(8, 14, 1), (2, 17, 8), (2, 17, 9)], sets, 0.5) == []


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60),
    st.lists(st.integers(0, 30), min_size=10, max_size=10),
    st.integers(1, 120),
    st.integers(0, 3),
)
def test_pieces_of_pairs_fit_or_are_one_pair(ends, sizes, budget, per_pair):
    docs = tokens(np.arange(10), np.array(sizes))
    low, high = (docs[np.array([end[side] for end in ends], dtype=np.int64)] for side in (0, 1))
    done = 0
    for start, end, found in fitting(low, high, budget, per_pair):
        assert start == done < end
        assert set(found.tolist()) == {*low[start:end].tolist(), *high[start:end].tolist()}
        assert sizes_of(found).sum() + per_pair * (end - start) <= budget or end - start == 1
        done = end
    assert done == len(ends)


@given(st.sets(st.integers(0, 12), min_size=1), st.sets(st.integers(0, 12), min_size=1), st.floats(0.01, 1))
def test_sizes_never_rule_a_similar_pair_out(a, b, threshold):
    if len(a & b) / len(a | b) >= threshold:
        assert could_match(np.array([len(a)]), np.array([len(b)]), threshold).all()


def test_sizes_rule_out_what_cannot_be_similar():
    assert could_match(np.array([80, 79, 100]), np.array([100, 100, 80]), 0.8).tolist() == [True, False, True]


def test_similarity_is_not_passed_on_along_a_chain():
    removed = survivors(as_verified({(0, 1): 0.9, (1, 2): 0.9, (2, 3): 0.9}))
    assert removed[["low", "high"]].tolist() == [(0, 1), (2, 3)]


def test_a_document_counts_as_duplicate_of_the_most_similar_that_is_kept():
    edges = {(0, 3): 0.8, (1, 3): 0.9, (2, 3): 1.0, (0, 2): 0.8}  # 2 goes, so 3 cannot be its duplicate
    assert survivors(as_verified(edges))[["low", "high"]].tolist() == [(0, 2), (1, 3)]
    assert survivors(as_verified({(1, 2): 0.9, (0, 2): 0.9}))["low"].tolist() == [0]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 1 << 16])
@given(_EDGES)
def test_survivors_are_those_of_the_plain_rule(batch, edges):
    kept: list[int] = []
    expected = []
    for document in range(13):
        to_kept = [(-edges[low, document], low) for low in kept if (low, document) in edges]
        if to_kept:
            similarity, low = min(to_kept)
            expected.append((low, document, -similarity))
        else:
            kept.append(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BATCH", batch)
        rows = survivors(as_verified(edges))
    assert rows[["low", "high", "similarity"]].tolist() == expected


def test_the_order_of_the_pairs_does_not_matter(monkeypatch):
    rng = np.random.default_rng(3)
    ends = np.unique(np.sort(rng.integers(0, 300, (900, 2)), axis=1), axis=0)
    edges = {(int(a), int(b)): float(rng.choice([0.8, 0.9])) for a, b in ends if a != b}
    pairs = as_verified(edges)
    expected = survivors(pairs).tolist()
    for batch in (1, 7, 40):
        monkeypatch.setattr(module, "_BATCH", batch)
        assert survivors(rng.permutation(pairs)).tolist() == expected
