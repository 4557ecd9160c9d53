"""Bands of a signature and the pairs of documents they propose. A proposal removes nothing: see ``verify``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["PAIR", "BandStats", "band_keys", "propose"]

#: A proposed pair: ranks in survivor order, ``low`` before ``high``, and the first band in which they met.
PAIR = np.dtype([("low", "<i8"), ("high", "<i8"), ("band", "u1")])


@dataclass(frozen=True)
class BandStats:
    """What a key range saw."""

    shared: int
    """Band values shared by at least two documents."""
    capped: int
    """Of these, those with more than ``max_members`` documents, so that not every pair was proposed."""
    largest: int
    """Documents in the largest of them."""


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """uint64[documents, bands]: one key for the ``rows`` values of each band.

    ``signatures`` are uint32[documents, at least bands · rows]. Each key is salted with its band, so that equal
    values in different bands are different keys. 64 bits, since with 32 a few million documents would share bands
    by chance.
    """
    values = signatures[:, : bands * rows].reshape(len(signatures), bands, rows)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), values.shape[:2]) * np.uint64(0x9E3779B97F4A7C15)
    for row in range(rows):
        keys ^= values[:, :, row]
        keys *= np.uint64(0xFF51AFD7ED558CCD)
        keys ^= keys >> np.uint64(32)
        keys *= np.uint64(0xC4CEB9FE1A85EC53)
        keys ^= keys >> np.uint64(29)
    return keys


def propose(keys: np.ndarray, bands: np.ndarray, ranks: np.ndarray, max_members: int) -> tuple[np.ndarray, BandStats]:
    """The pairs (:data:`PAIR`, each once, sorted by low and high) of documents that share a band key.

    ``keys`` (uint64), ``bands`` (uint8) and ``ranks`` (int64) run in parallel, a row for each document and band. Of
    the documents that share a key each is proposed against the ``max_members`` first in survivor order; with at most
    that many documents these are all pairs.
    """
    order = np.lexsort((ranks, bands, keys))
    keys, bands, ranks = keys[order], bands[order], ranks[order]
    starts = np.ones(len(keys), dtype=bool)
    starts[1:] = (keys[1:] != keys[:-1]) | (bands[1:] != bands[:-1])
    first = np.flatnonzero(starts)
    sizes = np.diff(np.append(first, len(keys)))
    stats = BandStats(
        shared=int((sizes > 1).sum()),
        capped=int((sizes > max_members).sum()),
        largest=int(sizes.max(initial=0)) if (sizes > 1).any() else 0,
    )
    first_of = np.repeat(first, sizes)
    place = np.arange(len(keys)) - first_of
    num_partners = np.minimum(place, max_members)
    high = np.repeat(np.arange(len(keys)), num_partners)
    nth = np.arange(len(high)) - np.repeat(np.cumsum(num_partners) - num_partners, num_partners)
    pairs = np.empty(len(high), dtype=PAIR)
    pairs["low"] = ranks[first_of[high] + nth]
    pairs["high"] = ranks[high]
    pairs["band"] = bands[high]
    return unique_pairs(pairs), stats


def unique_pairs(pairs: np.ndarray) -> np.ndarray:
    """Each pair once, under its first band, sorted by low and high."""
    pairs = pairs[np.lexsort((pairs["band"], pairs["high"], pairs["low"]))]
    new = np.ones(len(pairs), dtype=bool)
    new[1:] = (pairs["low"][1:] != pairs["low"][:-1]) | (pairs["high"][1:] != pairs["high"][:-1])
    return pairs[new]
