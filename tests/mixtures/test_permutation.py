"""The keyed permutation: a bijection of every range, equal to the plain one, and not told from chance."""

from __future__ import annotations

import hashlib
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.mixtures import permutation
from quern.mixtures.permutation import base_key, mix, permute, subkey, unpermute
from support.named_cases import each
from support.oracles import order_reference as reference

EDGES = [2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 127, 128, 129, 1000, 1024, 1025, 4096, 4097, 65537, 10**6 + 3, 2**20 + 1]
LARGE = [10**12, 10**12 + 7, 2**40, 2**40 + 1, 2**61 - 1, 2**62]
KEYS = st.integers(0, 2**64 - 1)


def array(values):
    return np.array(values, dtype=np.uint64)


@pytest.fixture
def fewer_rounds(monkeypatch):
    """Sets one number of rounds for every range."""

    def set_rounds(rounds):
        monkeypatch.setattr(permutation, "ROUNDS", ((2**64, rounds),))
        permutation._domain.cache_clear()

    yield set_rounds
    monkeypatch.undo()
    permutation._domain.cache_clear()


def test_subkeys_are_the_published_outputs_of_splitmix64():
    assert [subkey(0, j) for j in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [subkey(1234567, j) for j in range(5)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_keys_of_arrays_are_the_keys_of_their_elements(base, numbers):
    expected = [reference.subkey(base, j) for j in numbers]
    assert [subkey(base, j) for j in numbers] == expected
    assert subkey(base, array(numbers)).tolist() == expected
    assert subkey(array([base, 5]), numbers[0]).tolist() == [expected[0], reference.subkey(5, numbers[0])]
    assert mix(array([base])).tolist() == [mix(base)] == [reference.mix(base)]


def test_base_key_is_blake2b_of_the_joined_parts():
    expected = hashlib.blake2b("7\0src\0crawl/ä".encode(), digest_size=8).digest()
    assert base_key(7, "src", "crawl/ä") == int.from_bytes(expected, "little")


def test_base_keys_of_neighbours_differ():
    keys = {base_key(seed, tag, str(i)) for seed in range(64) for tag in ("src", "block", "off") for i in range(100)}
    assert len(keys) == 64 * 3 * 100
    assert base_key(1, "src", "11") != base_key(11, "src", "1")


@pytest.mark.slow
def test_every_value_of_the_range_comes_once():
    def check(n):
        every = np.arange(n, dtype=np.uint64)
        for key in (0, 1, base_key(3, "src", str(n))):
            there = permute(every, n, key)
            assert np.array_equal(np.sort(there), every)
            assert np.array_equal(unpermute(there, n, key), every)

    each([*range(1, 140), 255, 256, 257, 1000, 1024, 1025, 4097], check)


def test_equals_the_plain_permutation():
    def check(n):
        rng = np.random.default_rng(n)
        values = rng.integers(0, n, 60, dtype=np.uint64)
        keys = rng.integers(0, 2**64 - 1, 60, dtype=np.uint64)
        one = int(keys[0])
        there = permute(values, n, one)
        assert there.tolist() == [reference.permute(int(value), n, one) for value in values]
        assert unpermute(values, n, one).tolist() == [reference.unpermute(int(value), n, one) for value in values]
        by_key = permute(values, n, keys)
        assert by_key.tolist() == [reference.permute(int(v), n, int(key)) for v, key in zip(values, keys, strict=True)]
        assert np.array_equal(unpermute(by_key, n, keys), values)

    each([1, *EDGES, *LARGE], check)


@settings(max_examples=70)
@given(st.data(), st.one_of(st.integers(1, 300), st.integers(1, 2**41), st.integers(1, 2**62)), KEYS)
def test_backward_undoes_forward(data, n, key):
    values = array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)))
    there = permute(values, n, key)
    assert (there < n).all()
    assert np.array_equal(unpermute(there, n, key), values)
    assert np.array_equal(permute(unpermute(values, n, key), n, key), values)


@pytest.mark.parametrize("n", [2**16 + 1, 10**12 + 7])
def test_a_long_array_is_permuted_like_its_parts(n):
    size = 2 * permutation.SLICE + 77
    values = np.random.default_rng(0).integers(0, n, size, dtype=np.uint64)
    keys = np.random.default_rng(1).integers(0, 2**63, size, dtype=np.uint64)
    kept = values.copy()
    for key in (5, keys):
        parts = [
            permute(values[i : i + 999], n, key if isinstance(key, int) else key[i : i + 999])
            for i in range(0, size, 999)
        ]
        there = permute(values, n, key)
        assert np.array_equal(there, np.concatenate(parts))
        assert np.array_equal(unpermute(there, n, key), values)
    assert np.array_equal(values, kept)


def drawn(n, num_keys, tag="uniform"):
    """[num_keys, n]: the permutations of ``range(n)`` under the epoch keys of one source."""
    keys = subkey(base_key(0, tag, str(n)), np.arange(num_keys, dtype=np.uint64))
    return np.stack([permute(np.full(num_keys, value, np.uint64), n, keys) for value in range(n)], axis=1).astype(int)


def score(observed, degrees=None):
    """Normal score of the chi-square of counts that should be equal."""
    observed = np.asarray(observed, float).ravel()
    degrees = degrees or observed.size - 1
    expected = observed.mean()
    chi2 = ((observed - expected) ** 2).sum() / expected
    # Wilson & Hilferty 1931
    return ((chi2 / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))


def scores(tables):
    """Scores of where each value goes, which two stand together, and what follows in the next epoch."""
    n = tables.shape[1]
    placed = [np.bincount(tables[:, i], minlength=n) for i in range(n)]
    follows = [np.bincount((tables[1:, i] - tables[:-1, i]) % n, minlength=n) for i in range(n)]
    # rows and columns of `placed` have fixed sums: (n - 1)^2 cells are free
    found = [score(placed, (n - 1) ** 2), *(score(row) for row in follows)]
    if 2 < n < 34:
        pairs = [(i, j) for i in range(n) for j in range(i)][:: 1 if n < 9 else n]
        together = [np.bincount(tables[:, i] * n + tables[:, j], minlength=n * n) for i, j in pairs]
        found += [score(counts.reshape(n, n)[~np.eye(n, dtype=bool)]) for counts in together]
    return found


@pytest.mark.slow
def test_all_orders_of_a_tiny_range_are_equally_frequent():
    def check(n):
        tables = drawn(n, 40_000)
        index = {order: i for i, order in enumerate(permutations(range(n)))}
        counts = np.bincount([index[tuple(row)] for row in tables.tolist()], minlength=len(index))
        assert score(counts) < 3.5

    each([2, 3, 4, 5], check)


@pytest.mark.parametrize(
    "n", [2, 5, 8, 17, 33, 128, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4, 6, 7, 9, 12, 16, 100, 129))]
)
def test_small_ranges_are_not_told_from_argsort(n):
    num_keys = 100_000 if n < 9 else 30_000 if n < 20 else 8_000
    chance = np.argsort(np.random.default_rng(1).random((num_keys, n)), axis=1)
    assert max(scores(chance)) < 4
    assert max(scores(drawn(n, num_keys))) < 4


@pytest.mark.parametrize(("n", "rounds"), [(5, 12), (6, 12), (16, 6)])
def test_the_check_tells_too_few_rounds(fewer_rounds, n, rounds):
    fewer_rounds(rounds)
    assert max(scores(drawn(n, 100_000))) > 6


@pytest.mark.slow
def test_consecutive_epochs_agree_as_often_as_chance():
    n, num_keys = 1000, 2000
    every = np.arange(n, dtype=np.uint64)
    base = base_key(1, "src", "epochs")
    epochs = np.stack([permute(every, n, subkey(base, j)) for j in range(num_keys)])
    agreements = (epochs[1:] == epochs[:-1]).sum(axis=1)
    fixed = (epochs == every).sum(axis=1)
    for counts in (agreements, fixed):  # Poisson(1)
        assert abs(counts.mean() - 1) < 4 / np.sqrt(num_keys)
        assert abs(counts.var() - 1) < 4 * np.sqrt(3 / num_keys)
    lags = [np.corrcoef(epoch[:-1].astype(float), epoch[1:].astype(float))[0, 1] for epoch in epochs[:300]]
    assert abs(np.mean(lags)) < 4 / np.sqrt(300 * n)


@pytest.mark.parametrize("bits", [21, 40])
def test_every_bit_depends_on_every_bit(bits):
    size = 4000
    values = np.random.default_rng(2).integers(0, 2**bits, size, dtype=np.uint64)
    plain = permute(values, 2**bits, 99)
    for bit in range(bits):
        changed = plain ^ permute(values ^ np.uint64(1 << bit), 2**bits, 99)
        shares = [np.count_nonzero(changed >> np.uint64(out) & np.uint64(1)) / size for out in range(bits)]
        assert max(abs(share - 0.5) for share in shares) < 5 * 0.5 / np.sqrt(size)
