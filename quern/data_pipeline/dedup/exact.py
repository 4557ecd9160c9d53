"""Documents with an equal key: the same text, the same URL."""

from __future__ import annotations

import numpy as np
import xxhash

__all__ = ["KEYED", "REMOVAL", "find_equal", "scoped_keys", "url_keys"]

#: A document under a 128-bit key. Of those with an equal key the one with the least ``(order, rank)`` stays.
KEYED = np.dtype([("high", "<u8"), ("low", "<u8"), ("order", "<i8"), ("rank", "<i8")])

#: A removed document and the one it is a duplicate of, both as ranks in survivor order.
REMOVAL = np.dtype([("rank", "<i8"), ("by", "<i8")])


def find_equal(documents: np.ndarray) -> np.ndarray:
    """:data:`REMOVAL` rows by rank: every one of ``documents`` (:data:`KEYED`) but the first of each key."""
    ordered = documents[np.lexsort((documents["rank"], documents["order"], documents["low"], documents["high"]))]
    starts = np.ones(len(ordered), dtype=bool)
    starts[1:] = (ordered["high"][1:] != ordered["high"][:-1]) | (ordered["low"][1:] != ordered["low"][:-1])
    survivor = ordered["rank"][np.maximum.accumulate(np.where(starts, np.arange(len(ordered)), 0))]
    removed = np.empty(int((~starts).sum()), dtype=REMOVAL)
    removed["rank"], removed["by"] = ordered["rank"][~starts], survivor[~starts]
    return removed[np.argsort(removed["rank"])]


def url_keys(urls: list[str]) -> np.ndarray:
    """uint64[urls, 2]: xxh3-128 of each canonical URL."""
    digests = b"".join(xxhash.xxh3_128_digest(url.encode("utf-8", "surrogatepass")) for url in urls)
    return np.frombuffer(digests, dtype=">u8").reshape(-1, 2).astype(np.uint64)


def scoped_keys(keys: np.ndarray, source: str | None) -> np.ndarray:
    """``keys`` (uint64, any shape), changed one to one by the name of a source; as they are without one."""
    if source is None:
        return keys
    return keys ^ np.uint64(xxhash.xxh3_64_intdigest(source.encode()))
