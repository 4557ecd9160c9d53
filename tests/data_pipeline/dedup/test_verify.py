from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.bands import PAIR
from quern.data_pipeline.dedup.verify import VERIFIED, could_match, jaccard, survivors, verify

_SETS = st.sets(st.integers(0, 2**64 - 1) | st.integers(0, 12), max_size=30)
_EDGES = st.dictionaries(
    st.tuples(st.integers(0, 12), st.integers(0, 12)).filter(lambda p: p[0] < p[1]), st.sampled_from([0.8, 0.9, 1.0])
)


def as_array(values: set[int]) -> np.ndarray:
    return np.array(sorted(values), dtype=np.uint64)


def as_verified(edges: dict[tuple[int, int], float]) -> np.ndarray:
    return np.array([(low, high, similarity, 0) for (low, high), similarity in edges.items()], dtype=VERIFIED)


@given(_SETS, _SETS)
def test_jaccard_is_that_of_sets(a, b):
    assert jaccard(as_array(a), as_array(b)) == (len(a & b) / len(a | b) if a | b else 0.0)


def test_a_similarity_of_exactly_the_threshold_counts():
    a, b = as_array(set(range(9))), as_array(set(range(1, 10)))  # 8 of 10
    pairs = np.array([(3, 7, 5)], dtype=PAIR)
    at = (pairs, np.array([3, 7]), np.array([0, 9]), np.array([9, 9]), np.concatenate((a, b)))
    assert verify(*at, 0.8).tolist() == [(3, 7, 0.8, 5)]
    assert verify(*at, np.nextafter(0.8, 1)).tolist() == []


@given(st.sets(st.integers(0, 12), min_size=1), st.sets(st.integers(0, 12), min_size=1), st.floats(0.01, 1))
def test_sizes_never_rule_a_similar_pair_out(a, b, threshold):
    if len(a & b) / len(a | b) >= threshold:
        assert could_match(np.array([len(a)]), np.array([len(b)]), threshold).all()


def test_sizes_rule_out_what_cannot_be_similar():
    assert could_match(np.array([80, 79, 100]), np.array([100, 100, 80]), 0.8).tolist() == [True, False, True]


def test_sets_are_found_wherever_their_values_stand():
    shingles = np.array([50, 60, 1, 2, 3, 1, 2, 3, 4], dtype=np.uint64)
    pairs = np.array([(0, 1, 0), (1, 9, 2), (0, 9, 1)], dtype=PAIR)
    ranks, starts, sizes = np.array([0, 1, 9]), np.array([5, 2, 0]), np.array([4, 3, 2])
    assert verify(pairs, ranks, starts, sizes, shingles, 0.5).tolist() == [(0, 1, 0.75, 0)]


def test_similarity_is_not_passed_on_along_a_chain():
    removed = survivors(as_verified({(0, 1): 0.9, (1, 2): 0.9, (2, 3): 0.9}))
    assert removed[["low", "high"]].tolist() == [(0, 1), (2, 3)]


def test_a_document_counts_as_duplicate_of_the_most_similar_that_is_kept():
    edges = {(0, 3): 0.8, (1, 3): 0.9, (2, 3): 1.0, (0, 2): 0.8}  # 2 goes, so 3 cannot be its duplicate
    assert survivors(as_verified(edges))[["low", "high"]].tolist() == [(0, 2), (1, 3)]
    assert survivors(as_verified({(1, 2): 0.9, (0, 2): 0.9}))["low"].tolist() == [0]


@given(_EDGES)
def test_survivors_are_those_of_the_plain_rule(edges):
    kept: list[int] = []
    expected = []
    for document in range(13):
        to_kept = [(-edges[low, document], low) for low in kept if (low, document) in edges]
        if to_kept:
            similarity, low = min(to_kept)
            expected.append((low, document, -similarity))
        else:
            kept.append(document)
    rows = survivors(as_verified(edges))
    assert rows[["low", "high", "similarity"]].tolist() == expected


def test_the_order_of_the_pairs_does_not_matter(monkeypatch):
    rng = np.random.default_rng(3)
    ends = np.unique(np.sort(rng.integers(0, 300, (900, 2)), axis=1), axis=0)
    edges = {(int(a), int(b)): float(rng.choice([0.8, 0.9])) for a, b in ends if a != b}
    pairs = as_verified(edges)
    expected = survivors(pairs).tolist()
    monkeypatch.setattr("quern.data_pipeline.dedup.verify._BATCH", 7)
    assert survivors(rng.permutation(pairs)).tolist() == expected
