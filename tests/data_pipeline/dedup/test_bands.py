from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.bands import (
    MAX_SIZE,
    MEMBER,
    PAIR,
    band_keys,
    propose,
    ranks_of,
    repeated,
    sizes_of,
    tokens,
    unique_pairs,
)
from quern.data_pipeline.dedup.signature import minhash

_ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 12)), unique=True, max_size=40)


def random_signatures(num: int, num_perm: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (num, num_perm), dtype=np.uint32)


def test_equal_rows_are_an_equal_key_and_any_other_row_another():
    signatures = np.repeat(random_signatures(1, 12), 13, axis=0)
    for column in range(12):
        signatures[column + 1, column] ^= 1
    keys = band_keys(signatures, 3, 4)
    for column in range(12):
        changed = keys[column + 1] != keys[0]
        assert changed.tolist() == [band == column // 4 for band in range(3)]


def test_the_same_values_in_two_bands_are_two_keys():
    signatures = np.tile(random_signatures(50, 4), (1, 16))
    keys = band_keys(signatures, 16, 4)
    assert len(np.unique(keys)) == keys.size


def test_the_order_of_the_rows_of_a_band_counts():
    forth, back = band_keys(np.array([[1, 2], [2, 1]], dtype=np.uint32), 1, 2)[:, 0]
    assert forth != back


def test_keys_use_all_64_bits_evenly():
    keys = band_keys(random_signatures(4000, 8), 1, 8)[:, 0]
    ones = ((keys[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
    assert (abs(ones - 0.5) < 0.05).all()


def proposed(members: np.ndarray, max_members: int, block: int, max_pairs: int):
    """All pairs of the rows given in blocks, and the stats."""
    starts = range(0, len(members), block)
    pieces = [np.empty(0, dtype=PAIR)]
    blocks = [members[start : start + block] for start in starts]
    return pieces, propose(lambda: blocks, max_members, max_pairs, pieces.append)


@given(_ROWS, st.integers(1, 4), st.sampled_from([1, 3, 100]), st.sampled_from([1, 5, 100]))
def test_each_member_meets_the_first_ones_of_its_band(rows, max_members, block, max_pairs):
    groups: dict[tuple[int, int], list[int]] = {}
    for key, band, doc in rows:
        groups.setdefault((key, band), []).append(doc)
    expected = []
    for (_, band), docs in groups.items():
        docs.sort()
        expected += [
            (docs[low], docs[high], band) for high in range(len(docs)) for low in range(min(high, max_members))
        ]
    members = np.array([(key, doc, band) for key, band, doc in rows], dtype=MEMBER)
    pieces, stats = proposed(members, max_members, block, max_pairs)
    assert sorted(np.concatenate(pieces).tolist()) == sorted(expected)
    assert all(len(piece) <= max(max_pairs, max_members) for piece in pieces)
    sizes = [len(docs) for docs in groups.values() if len(docs) > 1]
    assert (stats.shared, stats.capped) == (len(sizes), sum(size > max_members for size in sizes))
    assert stats.largest == max(sizes, default=0)
    twice = repeated(members)
    keys = [key for key, _, _ in rows]
    assert sorted(twice.tolist()) == sorted((key, doc, band) for key, band, doc in rows if keys.count(key) > 1)


def test_a_document_is_its_rank_and_size_in_one_number():
    ranks, sizes = np.array([0, 5, 2**40 - 1]), np.array([0, MAX_SIZE, MAX_SIZE + 9])
    docs = tokens(ranks, sizes)
    assert ranks_of(docs).tolist() == ranks.tolist()
    assert sizes_of(docs).tolist() == [0, MAX_SIZE, MAX_SIZE]
    assert (np.diff(docs.astype(object)) > 0).all()


def test_a_pair_proposed_by_many_ranges_is_kept_once_under_its_first_band():
    pairs = np.array([(1, 2, 5), (0, 3, 2), (1, 2, 4), (0, 3, 2), (1, 3, 0)], dtype=PAIR)
    assert unique_pairs(pairs).tolist() == [(1, 2, 4), (0, 3, 2), (1, 3, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("similarity", [*(pytest.param(s, marks=pytest.mark.long) for s in (0.6, 0.7, 0.9)), 0.8])
def test_bands_find_the_share_of_planted_pairs_that_theory_says(similarity):
    """2,000 pairs of exactly this Jaccard similarity under each of 4 seeds, against 1 − (1 − s^8)^16."""
    num_pairs, union, num_seeds = 2000, 200, 4
    common = round(similarity * union)
    alone = (union - common) // 2
    assert common / (common + 2 * alone) == similarity
    shingles = np.random.default_rng(round(similarity * 10)).integers(0, 2**64, (num_pairs, union), dtype=np.uint64)
    first, second = shingles[:, : common + alone], np.delete(shingles, np.s_[common : common + alone], axis=1)
    ranks = np.repeat(np.arange(2 * num_pairs), 16)
    found = 0
    for seed in range(num_seeds):
        signatures = np.stack([minhash(row, 128, seed) for both in zip(first, second, strict=True) for row in both])
        bands = np.tile(np.arange(16, dtype=np.uint8), 2 * num_pairs)
        members = np.empty(len(ranks), dtype=MEMBER)
        members["key"], members["doc"], members["band"] = band_keys(signatures, 16, 8).ravel(), ranks, bands
        pairs = unique_pairs(np.concatenate(proposed(members, 32, len(members), 1 << 20)[0]))
        assert (pairs["low"] // 2 == pairs["high"] // 2).mean() > 0.99
        found += int((pairs["low"] // 2 == pairs["high"] // 2).sum())
    theory = 1 - (1 - similarity**8) ** 16
    assert abs(found / (num_pairs * num_seeds) - theory) < 0.01
