"""LSH bands of a signature, and the candidate pairs they propose. Only ``verify`` decides a removal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from quern.data_pipeline.dedup.rows import key_starts, made_of, repeats

__all__ = [
    "MAX_SIZE",
    "MEMBER",
    "PAIR",
    "BandStats",
    "band_keys",
    "propose",
    "ranks_of",
    "repeated",
    "sizes_of",
    "tokens",
    "unique_pairs",
]

#: A document under the key of one of its bands.
MEMBER = np.dtype([("key", "<u8"), ("doc", "<u8"), ("band", "u1")])
#: A proposed pair of documents, ``low`` before ``high`` in survivor order, and the first band in which they met.
PAIR = np.dtype([("low", "<u8"), ("high", "<u8"), ("band", "u1")])

#: Here a document is its rank and, in the low 24 bits, how many shingles it has, as far as they can say.
_SIZE_BITS = np.uint64(24)
MAX_SIZE = (1 << 24) - 1


def tokens(ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """uint64: documents of these ranks (below 2^40) and numbers of shingles, in the order of the ranks."""
    return (ranks.astype(np.uint64) << _SIZE_BITS) | np.minimum(sizes, MAX_SIZE).astype(np.uint64)


def ranks_of(docs: np.ndarray) -> np.ndarray:
    """int64: the ranks in :func:`tokens`."""
    return (docs >> _SIZE_BITS).astype(np.int64)


def sizes_of(docs: np.ndarray) -> np.ndarray:
    """int64: the numbers of shingles in :func:`tokens`; one of :data:`MAX_SIZE` may be more."""
    return (docs & np.uint64(MAX_SIZE)).astype(np.int64)


@dataclass(frozen=True)
class BandStats:
    """Counts of one key range."""

    shared: int
    """Band values shared by at least two documents."""
    capped: int
    """Of these, those with more than ``max_members`` documents, so that not every pair was proposed."""
    largest: int
    """Documents in the largest of them; 0 without any."""


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


def repeated(members: np.ndarray) -> np.ndarray:
    """The rows (:data:`MEMBER`) whose key occurs more than once."""
    keys = np.ascontiguousarray(members["key"])
    order = np.argsort(keys)
    return members[order[repeats(key_starts(keys[order]))]]


def propose(
    blocks: Callable[[], Iterable[np.ndarray]], max_members: int, max_pairs: int, write: Callable[[np.ndarray], None]
) -> BandStats:
    """Write the pairs (:data:`PAIR`) of documents that share a band key, at most about ``max_pairs`` at a time.

    ``blocks`` gives the rows (:data:`MEMBER`), one for each document and band; it is called twice. Of the documents
    that share a key each is proposed against the ``max_members`` first in survivor order; with at most that many
    documents these are all pairs. A pair is given once for each band in which it meets. Memory is for a block,
    ``max_pairs`` pairs, and at most ``max_members`` rows of each different key.
    """
    table = np.empty(0, dtype=MEMBER)
    for block in blocks():
        table = _first_members(np.concatenate((table, block)), max_members)
    sizes = np.zeros(int(_starts(table).sum()), dtype=np.int64)
    for block in blocks():
        for pairs in _propose_block(table, block, max_pairs, sizes):
            write(pairs)
    return BandStats(int((sizes > 1).sum()), int((sizes > max_members).sum()), int(sizes[sizes > 1].max(initial=0)))


def _starts(members: np.ndarray) -> np.ndarray:
    """Where keys begin in sorted rows. Equal keys of different bands are a freak of their hash, and different."""
    return key_starts(members["key"], members["band"])


def _first_members(members: np.ndarray, most: int) -> np.ndarray:
    """The ``most`` first of each key in survivor order, sorted."""
    members = members[np.lexsort((members["doc"], members["band"], members["key"]))]
    first = np.flatnonzero(_starts(members))
    place = np.arange(len(members)) - np.repeat(first, np.diff(np.append(first, len(members))))
    return members[place < most]


def _propose_block(table: np.ndarray, block: np.ndarray, max_pairs: int, sizes: np.ndarray) -> Iterable[np.ndarray]:
    """The pairs of ``block``'s rows with those of ``table`` before them; counts the rows of each key."""
    every = np.concatenate((table, block))
    given = np.arange(len(every)) >= len(table)
    order = np.lexsort((given, every["doc"], every["band"], every["key"]))  # a row of the table before itself
    every, given = every[order], given[order]
    starts = _starts(every)  # every key begins with a row of the table
    key = np.cumsum(starts) - 1
    sizes += np.bincount(key[given], minlength=len(sizes))
    last = np.cumsum(~given) - 1  # the row of the table at or before each
    first = last[starts][key]
    itself = table["doc"][last] == every["doc"]
    partners = np.where(given, last - first + 1 - itself, 0)
    rows = np.flatnonzero(partners)
    partners, first, high, band = partners[rows], first[rows], every["doc"][rows], every["band"][rows]
    sums = np.cumsum(partners)
    done = 0
    while done < len(rows):
        before = int(sums[done - 1]) if done else 0
        end = max(int(np.searchsorted(sums, before + max_pairs, side="right")), done + 1)
        count = partners[done:end]
        nth = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        low = table["doc"][np.repeat(first[done:end], count) + nth]
        yield made_of(PAIR, low=low, high=np.repeat(high[done:end], count), band=np.repeat(band[done:end], count))
        done = end


def unique_pairs(pairs: np.ndarray) -> np.ndarray:
    """Each pair once, under its first band, sorted by high and low."""
    if len(pairs) == 0:
        return pairs
    low, high = np.ascontiguousarray(pairs["low"]), np.ascontiguousarray(pairs["high"])
    order = np.lexsort((low, high))
    low, high = low[order], high[order]
    starts = np.flatnonzero(key_starts(low, high))
    return made_of(PAIR, low=low[starts], high=high[starts], band=np.minimum.reduceat(pairs["band"][order], starts))
