"""The decision: exact Jaccard similarity of proposed pairs, and who survives it."""

from __future__ import annotations

import numpy as np

__all__ = ["VERIFIED", "could_match", "jaccard", "survivors", "verify"]

#: A pair whose similarity was computed and reached the threshold.
VERIFIED = np.dtype([("low", "<i8"), ("high", "<i8"), ("similarity", "<f8"), ("band", "u1")])

_BATCH = 1 << 16


def could_match(sizes_a: np.ndarray, sizes_b: np.ndarray, threshold: float) -> np.ndarray:
    """Whether sets of these sizes can have a Jaccard similarity ≥ ``threshold``: it is at most smaller / larger."""
    return np.minimum(sizes_a, sizes_b) / np.maximum(sizes_a, sizes_b) >= threshold


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|A ∩ B| / |A ∪ B| of two sorted arrays of unique uint64; 0 if both are empty."""
    both = np.concatenate((a, b))
    both.sort(kind="stable")  # merges the two sorted runs
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    union = len(both) - common
    return common / union if union else 0.0


def verify(
    pairs: np.ndarray, ranks: np.ndarray, starts: np.ndarray, sizes: np.ndarray, shingles: np.ndarray, threshold: float
) -> np.ndarray:
    """The ``pairs`` (``bands.PAIR``) whose similarity is ≥ ``threshold``, with it (:data:`VERIFIED`), in their order.

    ``ranks`` (int64, ascending) are the documents at hand; those of ``ranks[i]`` are the ``sizes[i]`` values of
    ``shingles`` (uint64) from ``starts[i]`` on, sorted and unique.
    """
    sets = [shingles[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    low, high = np.searchsorted(ranks, pairs["low"]), np.searchsorted(ranks, pairs["high"])
    similarity = np.empty(len(pairs))
    for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        similarity[i] = jaccard(sets[a], sets[b])
    hit = similarity >= threshold
    verified = np.empty(int(hit.sum()), dtype=VERIFIED)
    verified["low"], verified["high"], verified["band"] = pairs["low"][hit], pairs["high"][hit], pairs["band"][hit]
    verified["similarity"] = similarity[hit]
    return verified


def survivors(verified: np.ndarray) -> np.ndarray:
    """The rows of ``verified`` (:data:`VERIFIED`) by which a document is removed, one for each, sorted by ``high``.

    In survivor order, a document is removed if one before it that is kept is similar to it. Of several such it counts
    as a duplicate of the most similar one, and among equals of the first. Similarity is not passed on: of a chain
    A ~ B ~ C with A and C different, B goes and C stays.
    """
    ordered = verified[np.lexsort((verified["low"], -verified["similarity"], verified["high"]))]
    removed: set[int] = set()
    rows: list[int] = []
    for start in range(0, len(ordered), _BATCH):
        block = ordered[start : start + _BATCH]
        for i, (low, high) in enumerate(zip(block["low"].tolist(), block["high"].tolist(), strict=True), start):
            if high not in removed and low not in removed:
                removed.add(high)
                rows.append(i)
    return ordered[np.array(rows, dtype=np.int64)]
