"""Finds documents with an equal key: the same text or the same URL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from quern.data_pipeline.dedup.rows import key_starts, made_of

__all__ = ["KEYED", "REMOVAL", "find_equal", "firsts", "scope_words", "url_keys"]

#: A document under a 128-bit key. Of those with an equal key the one with the least ``(order, rank)`` stays.
KEYED = np.dtype([("high", "<u8"), ("low", "<u8"), ("order", "<i8"), ("rank", "<i8")])

#: A removed document and the one it is a duplicate of, both as ranks in survivor order.
REMOVAL = np.dtype([("rank", "<i8"), ("by", "<i8")])


def find_equal(documents: np.ndarray, known: np.ndarray) -> np.ndarray:
    """:data:`REMOVAL` rows: every one of ``documents`` (:data:`KEYED`) but the first of each key.

    ``known`` (:data:`KEYED`) are documents that stand before others elsewhere; of a key that they have, the first is
    found among both, and rows are given for ``documents`` alone.
    """
    every, starts = _by_key(np.concatenate((known, documents)))
    survivor = every["rank"][np.maximum.accumulate(np.where(starts, np.arange(len(every)), 0))]
    away = every["rank"] != survivor
    return made_of(REMOVAL, rank=every["rank"][away], by=survivor[away])


def firsts(documents: np.ndarray) -> np.ndarray:
    """The first of ``documents`` (:data:`KEYED`) of each key."""
    ordered, starts = _by_key(documents)
    return ordered[starts]


def _by_key(documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents by key, the first of each in front, and where keys begin."""
    ordered = documents[np.lexsort((documents["rank"], documents["order"], documents["low"], documents["high"]))]
    return ordered, key_starts(ordered["high"], ordered["low"])


def url_keys(urls: list[str]) -> np.ndarray:
    """uint64[urls, 2]: xxh3-128 of each canonical URL."""
    digests = b"".join(xxhash.xxh3_128_digest(url.encode("utf-8", "surrogatepass")) for url in urls)
    return np.frombuffer(digests, dtype=">u8").reshape(-1, 2).astype(np.uint64)


def scope_words(sources: Sequence[str], scope: str) -> np.ndarray:
    """uint64[sources]: what keys are combined with (exclusive or) so that they are equal only inside ``scope``."""
    words = [xxhash.xxh3_64_intdigest(source.encode()) if scope == "source" else 0 for source in sources]
    return np.array(words, dtype=np.uint64)
