from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.bands import PAIR, band_keys, propose, unique_pairs
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


@given(_ROWS, st.integers(1, 4))
def test_each_member_meets_the_first_ones_of_its_band(rows, max_members):
    rows = list({(key, band, rank) for key, band, rank in rows})
    groups: dict[tuple[int, int], list[int]] = {}
    for key, band, rank in rows:
        groups.setdefault((key, band), []).append(rank)
    expected: dict[tuple[int, int], int] = {}
    for (_, band), ranks in groups.items():
        ranks.sort()
        for high in range(len(ranks)):
            for low in range(min(high, max_members)):
                pair = ranks[low], ranks[high]
                expected[pair] = min(band, expected.get(pair, band))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    pairs, stats = propose(columns[:, 0].astype(np.uint64), columns[:, 1].astype(np.uint8), columns[:, 2], max_members)
    assert pairs.dtype == PAIR
    assert pairs.tolist() == [(low, high, band) for (low, high), band in sorted(expected.items())]
    sizes = [len(ranks) for ranks in groups.values() if len(ranks) > 1]
    assert (stats.shared, stats.capped) == (len(sizes), sum(size > max_members for size in sizes))
    assert stats.largest == max(sizes, default=0)


def test_a_pair_proposed_by_many_ranges_is_kept_once_under_its_first_band():
    pairs = np.array([(1, 2, 5), (0, 3, 2), (1, 2, 4), (0, 3, 2), (1, 3, 0)], dtype=PAIR)
    assert unique_pairs(pairs).tolist() == [(0, 3, 2), (1, 2, 4), (1, 3, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("similarity", [0.6, 0.7, 0.8, 0.9])
def test_bands_find_the_share_of_planted_pairs_that_theory_says(similarity):
    """2,000 pairs of exactly this Jaccard similarity under each of 20 seeds, against 1 − (1 − s^8)^16."""
    num_pairs, union, num_seeds = 2000, 200, 20
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
        pairs, _ = propose(band_keys(signatures, 16, 8).ravel(), bands, ranks, 32)
        assert (pairs["low"] // 2 == pairs["high"] // 2).mean() > 0.99
        found += int((pairs["low"] // 2 == pairs["high"] // 2).sum())
    theory = 1 - (1 - similarity**8) ** 16
    assert abs(found / (num_pairs * num_seeds) - theory) < 0.01
