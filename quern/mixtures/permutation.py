"""A keyed permutation of ``range(n)`` in both directions, for any n, without a table.

An unbalanced Feistel network on the smallest power of two that holds n, with cycle walking: a value that leaves the
range is permuted again until it returns (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The two
halves are XORed in turn by a hash of each other. The walk takes at most two steps a value on average. The rounds are
those at which small domains stop being told from ``argsort`` of random keys; below 9 values the halves are a bit or
two wide and mix slowly.

All arithmetic is modulo 2^64.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["CONSTANTS", "base_key", "mix", "permute", "subkey", "unpermute"]

U64 = NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
C1 = 0xBF58476D1CE4E5B9
C2 = 0x94D049BB133111EB
MASK = 2**64 - 1
ROUNDS = ((8, 24), (128, 12), (MASK, 8))
"""(Largest n, rounds)."""

CONSTANTS = {"golden": GOLDEN, "c1": C1, "c2": C2, "rounds": [list(pair) for pair in ROUNDS]}
"""What a recorded order must name besides its own numbers: another value is another order."""

SLICE = 16384
"""Values a pass: its four buffers stay in the second-level cache."""

_C1, _C2, _GOLDEN = np.uint64(C1), np.uint64(C2), np.uint64(GOLDEN)
_27, _30, _31, _32, _ONE = (np.uint64(value) for value in (27, 30, 31, 32, 1))


class _Domain(NamedTuple):
    """How ``range(n)`` is cut into two halves, n > 1."""

    rounds: int
    low_bits: np.uint64
    low_mask: np.uint64
    high_mask: np.uint64
    full: bool
    """n is a power of two: no value leaves the range."""


def base_key(seed: int, tag: str, ident: str) -> int:
    """Key of a purpose: BLAKE2b-64, little-endian, of seed (in decimal), tag and ident in UTF-8, joined by NUL."""
    text = "\0".join((str(seed), tag, ident)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


@overload
def mix(z: int) -> int: ...
@overload
def mix(z: U64) -> U64: ...
def mix(z: int | U64) -> int | U64:
    """Finaliser of SplitMix64 (Steele, Lea & Flood 2014), a bijection of 64-bit integers."""
    if isinstance(z, np.ndarray):
        z = (z ^ (z >> _30)) * _C1
        z = (z ^ (z >> _27)) * _C2
        return z ^ (z >> _31)
    z &= MASK
    z = (z ^ (z >> 30)) * C1 & MASK
    z = (z ^ (z >> 27)) * C2 & MASK
    return z ^ (z >> 31)


@overload
def subkey(base: int, j: int) -> int: ...
@overload
def subkey(base: int, j: U64) -> U64: ...
@overload
def subkey(base: U64, j: int) -> U64: ...
def subkey(base: int | U64, j: int | U64) -> int | U64:
    """Key number j ≥ 0 under ``base``: draw j of SplitMix64. One of the two may be a uint64 array."""
    if isinstance(j, np.ndarray):
        assert isinstance(base, int)
        return mix((j + _ONE) * _GOLDEN + np.uint64(base))
    step = (j + 1) * GOLDEN & MASK
    if isinstance(base, np.ndarray):
        return mix(base + np.uint64(step))
    return mix(base + step)


def permute(values: U64, n: int, key: int | U64) -> U64:
    """Where the permutation of ``range(n)`` under ``key`` takes each value.

    ``values``: uint64 [m], each below n (not checked). ``key``: one for all, or uint64 [m], one for each.
    """
    return _walk(values, n, key, inverse=False)


def unpermute(values: U64, n: int, key: int | U64) -> U64:
    """The inverse of :func:`permute`, with the same arguments."""
    return _walk(values, n, key, inverse=True)


@lru_cache(maxsize=4096)
def _domain(n: int) -> _Domain:
    bits = (n - 1).bit_length()
    low_bits = (bits + 1) // 2
    return _Domain(
        rounds=next(rounds for largest, rounds in ROUNDS if n <= largest),
        low_bits=np.uint64(low_bits),
        low_mask=np.uint64((1 << low_bits) - 1),
        high_mask=np.uint64((1 << (bits - low_bits)) - 1),
        full=n == 1 << bits,
    )


def _walk(values: U64, n: int, key: int | U64, *, inverse: bool) -> U64:
    """The network, again and again on the values it takes out of ``range(n)``."""
    if n == 1:
        return np.zeros_like(values)
    domain = _domain(n)
    round_keys = [np.uint64(subkey(key, r)) for r in range(domain.rounds)] if isinstance(key, int) else key
    out = _network(values, domain, round_keys, inverse)
    if domain.full:
        return out
    limit = np.uint64(n)
    outside = np.flatnonzero(out >= limit)
    while outside.size:
        if isinstance(round_keys, np.ndarray):
            assert isinstance(key, np.ndarray)
            round_keys = key[outside]
        again = _network(out[outside], domain, round_keys, inverse)
        out[outside] = again
        outside = outside[again >= limit]
    return out


def _network(values: U64, domain: _Domain, round_keys: list[np.uint64] | U64, inverse: bool) -> U64:
    """One pass over ``values`` [m]. ``round_keys``: those of all values, or uint64 [m], the key of each."""
    out = np.empty_like(values)
    turns = range(domain.rounds)
    for start in range(0, values.size, SLICE):
        part = values[start : start + SLICE]
        own = round_keys[start : start + SLICE] if isinstance(round_keys, np.ndarray) else None
        low = part & domain.low_mask
        high = part >> domain.low_bits
        z, shifted = np.empty_like(part), np.empty_like(part)
        for r in reversed(turns) if inverse else turns:
            source, target, mask = (high, low, domain.low_mask) if r % 2 else (low, high, domain.high_mask)
            np.bitwise_xor(source, round_keys[r] if own is None else subkey(own, r), out=z)
            np.multiply(z, _C1, out=z)
            np.right_shift(z, _32, out=shifted)
            np.bitwise_xor(z, shifted, out=z)
            np.multiply(z, _C2, out=z)
            np.right_shift(z, _32, out=z)
            np.bitwise_and(z, mask, out=z)
            np.bitwise_xor(target, z, out=target)
        np.left_shift(high, domain.low_bits, out=high)
        np.bitwise_or(high, low, out=out[start : start + SLICE])
    return out
