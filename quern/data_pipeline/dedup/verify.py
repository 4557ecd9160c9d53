"""Decides removals by the exact Jaccard similarity of candidate pairs, in survivor order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from quern.data_pipeline.dedup.bands import ranks_of, sizes_of
from quern.data_pipeline.dedup.rows import key_starts, made_of, repeats

__all__ = ["VERIFIED", "Removed", "could_match", "fitting", "survivors", "survivors_after", "verify"]

#: A pair whose similarity was computed and reached the threshold; ``low`` and ``high`` are ranks.
VERIFIED = np.dtype([("low", "<i8"), ("high", "<i8"), ("similarity", "<f8"), ("band", "u1")])

#: Shingles that are compared at once.
_SHINGLES = 1 << 20
#: Pairs looked at to begin with when they are divided, and the most.
_PAIRS, _MOST_PAIRS = 1 << 12, 1 << 20
#: How many times as large as the other a set of a pair is that is not copied for it.
_FAR = 16
#: Verified pairs that are decided at once.
_BATCH = 1 << 16


def could_match(sizes_a: np.ndarray, sizes_b: np.ndarray, threshold: float) -> np.ndarray:
    """Whether sets of these sizes can have a Jaccard similarity ≥ ``threshold``: it is at most smaller / larger."""
    return np.minimum(sizes_a, sizes_b) / np.maximum(sizes_a, sizes_b) >= threshold


def fitting(low: np.ndarray, high: np.ndarray, budget: int, per_pair: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """``(start, end, documents)``: the pairs in consecutive pieces, and the different documents of each.

    ``low`` and ``high`` are documents as in ``bands.tokens``. The sizes of a piece's documents and ``per_pair`` for
    each of its pairs come to at most ``budget``, or it has one pair.
    """
    start, count, may_grow = 0, _PAIRS, True
    while start < len(low):
        end = min(start + count, len(low))
        docs = np.sort(np.concatenate((low[start:end], high[start:end])))
        docs = docs[key_starts(docs)]
        cost = int(sizes_of(docs).sum()) + per_pair * (end - start)
        if cost > budget and end - start > 1:
            count, may_grow = max((end - start) // 2, 1), False
        elif may_grow and 3 * cost < budget and end < len(low) and count < _MOST_PAIRS:
            count *= 2
        else:
            yield start, end, docs
            start, may_grow = end, True


def verify(
    pairs: np.ndarray, ranks: np.ndarray, starts: np.ndarray, sizes: np.ndarray, shingles: np.ndarray, threshold: float
) -> np.ndarray:
    """The ``pairs`` (``bands.PAIR``) whose similarity is ≥ ``threshold``, with it (:data:`VERIFIED`), in their order.

    A threshold of 0 takes all of them. Of two documents without shingles the similarity is NaN, and no threshold's.

    ``ranks`` (int64, ascending) are the documents at hand; those of ``ranks[i]`` are the ``sizes[i]`` values of
    ``shingles`` (uint64) from ``starts[i]`` on, sorted and unique. Pairs of the same documents should stand together.
    """
    low, high = ranks_of(pairs["low"]), ranks_of(pairs["high"])
    similarity = np.empty(len(pairs))
    for start, end, docs in fitting(pairs["low"], pairs["high"], _SHINGLES, 0):
        at = np.searchsorted(ranks, ranks_of(docs))
        size = sizes[at]
        a, b = (np.searchsorted(docs, pairs[side][start:end]) for side in ("low", "high"))
        common = _common(_sets(starts[at], size, shingles), a, b)
        union = size[a] + size[b] - common
        similarity[start:end] = np.divide(common, union, out=np.full(len(union), np.nan), where=union > 0)
    hit = (similarity >= threshold) | (threshold <= 0)
    return made_of(VERIFIED, pairs[hit], low=low[hit], high=high[hit], similarity=similarity[hit])


def _sets(starts: np.ndarray, sizes: np.ndarray, shingles: np.ndarray) -> Any:
    """A sparse matrix with a row for each set and a column for each shingle that at least two of them have."""
    from scipy.sparse import csr_array  # here: it takes its time to import, and most workers never come by

    ends = np.cumsum(sizes)
    values = shingles[np.arange(int(sizes.sum())) + np.repeat(starts - ends + sizes, sizes)]
    order = np.argsort(values)
    new = key_starts(values[order])
    shared = repeats(new)
    column = np.empty(len(values), dtype=np.int32)
    column[order] = np.cumsum(new & shared) - 1
    kept = np.empty(len(values), dtype=bool)
    kept[order] = shared
    rows = np.concatenate(([0], np.cumsum(kept)))[np.concatenate(([0], ends))]
    columns = column[kept]
    shape = (len(sizes), int((new & shared).sum()) or 1)
    sets = csr_array((np.ones(len(columns), dtype=np.int8), columns, rows.astype(np.int32)), shape=shape)
    sets.has_canonical_format = True  # shingles are sorted and unique, and so are columns
    return sets


def _common(sets: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """int64: how many columns rows ``a[i]`` and ``b[i]`` of ``sets`` have in common."""
    width = np.diff(sets.indptr).astype(np.int64)
    common = np.empty(len(a), dtype=np.int64)
    swapped = width[a] < width[b]
    large, small = np.where(swapped, b, a), np.where(swapped, a, b)
    far = width[large] > _FAR * width[small]
    common[~far] = _multiplied(sets, width, a[~far], b[~far])
    order = np.flatnonzero(far)
    order = order[np.argsort(large[order], kind="stable")]
    starts = np.flatnonzero(np.diff(large[order], prepend=-1))
    marks = np.zeros(sets.shape[1], dtype=bool)
    for start, end in pairwise([*starts.tolist(), len(order)]):  # a large set is looked at once for all its small ones
        pairs = order[start:end]
        columns = sets.indices[slice(*sets.indptr[large[pairs[0]] :][:2])]
        marks[columns] = True
        members = sets[small[pairs]]
        common[pairs] = np.diff(np.concatenate(([0], np.cumsum(marks[members.indices])))[members.indptr])
        marks[columns] = False
    return common


def _multiplied(sets: Any, width: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same for sets of about one size: the rows of each pair are multiplied."""
    cost = np.cumsum(width[a] + width[b] + 1)
    common = np.empty(len(a), dtype=np.int64)
    start = 0
    while start < len(a):
        before = int(cost[start - 1]) if start else 0
        end = max(int(np.searchsorted(cost, before + 4 * _SHINGLES, side="right")), start + 1)
        common[start:end] = np.diff(sets[a[start:end]].multiply(sets[b[start:end]]).indptr)
        start = end
    return common


class Removed:
    """A bit array of which of the documents 0 … n − 1 have been removed so far."""

    def __init__(self, documents: int) -> None:
        self._bits = np.zeros(-(-documents // 8), dtype=np.uint8)

    def of(self, documents: np.ndarray) -> np.ndarray:
        """bool for each of ``documents``."""
        return (self._bits[documents >> 3] >> (documents & 7).astype(np.uint8)) & 1 == 1

    def add(self, documents: np.ndarray) -> None:
        np.bitwise_or.at(self._bits, documents >> 3, (1 << (documents & 7)).astype(np.uint8))


def survivors(verified: np.ndarray) -> np.ndarray:
    """The rows of ``verified`` (:data:`VERIFIED`) by which a document is removed, one for each, sorted by ``high``.

    In survivor order, a document is removed if one before it that is kept is similar to it. Of several such it counts
    as a duplicate of the most similar one, and among equals of the first. Similarity is not passed on: of a chain
    A ~ B ~ C with A and C different, B goes and C stays.
    """
    documents, ends = np.unique(np.concatenate((verified["low"], verified["high"])), return_inverse=True)
    labelled = verified.copy()
    labelled["low"], labelled["high"] = ends[: len(verified)], ends[len(verified) :]
    rows = survivors_after(Removed(len(documents)), labelled)
    rows["low"], rows["high"] = documents[rows["low"]], documents[rows["high"]]
    return rows


def survivors_after(removed: Removed, verified: np.ndarray) -> np.ndarray:
    """Like :func:`survivors` if every document before the first ``high`` is decided; ``removed`` is updated."""
    ordered = verified[np.lexsort((verified["low"], -verified["similarity"], verified["high"]))]
    pieces = [ordered[:0]]
    start = 0
    while start < len(ordered):
        end = int(
            np.searchsorted(ordered["high"], ordered["high"][min(start + _BATCH, len(ordered)) - 1], side="right")
        )
        pieces.append(_decide(removed, ordered[start:end]))
        start = end
    return np.concatenate(pieces)


def _decide(removed: Removed, pairs: np.ndarray) -> np.ndarray:
    low, high = pairs["low"], pairs["high"]
    starts = np.flatnonzero(key_starts(high))
    settled = low < high[0]
    goes = np.logical_or.reduceat(settled & ~removed.of(low), starts)
    removed.add(high[starts][goes])
    # what is left hangs on documents of this very batch, to be decided one after the other
    open_ = np.flatnonzero(~goes & ~np.logical_and.reduceat(settled, starts))
    ends = np.append(starts[1:], len(pairs))
    gone, later = removed.of(low), set[int]()
    for document, first, last in zip(
        high[starts[open_]].tolist(), starts[open_].tolist(), ends[open_].tolist(), strict=True
    ):
        kept_before = low[first:last][~gone[first:last]].tolist()
        if any(other not in later for other in kept_before):
            later.add(document)
    removed.add(np.fromiter(later, dtype=np.int64, count=len(later)))
    kept = np.where(removed.of(low), len(pairs), np.arange(len(pairs)))  # the first of a document's is the best
    first_kept = np.minimum.reduceat(kept, starts)
    return pairs[first_kept[first_kept < ends]]
