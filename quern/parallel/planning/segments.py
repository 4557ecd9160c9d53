"""Deals the tokens of rows out over the shards of context parallelism, and finds the keys that queries attend to.

See :mod:`quern.parallel.planning.context`.

Shape legend: B rows of a micro-batch, L tokens a row, A shards, a = L/A tokens of a shard, l tokens of a rank, S
stretches of queries, T queries, U keys. A token's *place* counts through the rows of a micro-batch: row · L + position.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quern.parallel.planning.context import Context

__all__ = [
    "Segments", "deal", "document_starts", "gathered_segments", "pairs_of_shards", "ranges", "ring_segments",
    "tokens_of",
]  # fmt: skip

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

SMALLEST = 128
"""Tokens of a chunk, at least, where documents ask for more chunks than head-tail has: a kernel works on so many
queries at a time."""
MOST_CHUNKS = 16
"""Of a shard, at most."""
TOLERATED = 1.05
"""Largest work of a shard, relative to the mean, up to which head-tail is kept: each further chunk costs copies."""


@dataclass(frozen=True)
class Segments:
    """Stretches of queries that are neighbours in a document, each with the keys that they attend to, in order."""

    queries_T: I64 | None
    """Rows of the shard's queries, B·a of them; None = all in order."""
    cu_queries: I32
    """[S + 1]: where each stretch begins, and T."""
    keys_U: I64
    """Rows of the keys that are there: of one shard, or of all, end to end."""
    cu_keys: I32
    """[S + 1], likewise. No stretch is without keys."""
    causal: bool
    """The last query of a stretch attends to all of its keys, the one before to all but the last, and so on; else every
    query to all."""


def document_starts(cu_seqlens: NDArray[np.integer]) -> I64:
    """[B·L]: the place at which each token's document begins. ``cu_seqlens``: where documents begin in the rows laid
    end to end, then B·L; every row begins one, and documents of no tokens may stand at the end."""
    return np.repeat(cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens))


def deal(starts: I64, seq_len: int, context: Context, smallest: int = SMALLEST) -> I64:
    """int64 [A, B, a]: the places of each shard's tokens, ascending. ``starts``: of :func:`document_starts`."""
    shards, rows = context.shards, len(starts) // seq_len
    places_BL = np.arange(rows * seq_len).reshape(rows, seq_len)
    if shards == 1:
        return places_BL[None]
    head_tail = _dealt(places_BL, np.tile(np.minimum(np.arange(2 * shards), np.arange(2 * shards)[::-1]), (rows, 1)))
    pairs_A = pairs_of_shards(head_tail, starts)
    chunks = MOST_CHUNKS * shards
    while chunks > 2 * shards and (seq_len % chunks or seq_len // chunks < smallest):
        chunks //= 2
    if chunks % shards or chunks <= 2 * shards or pairs_A.max() <= TOLERATED * pairs_A.mean():
        return head_tail
    costs_BC = (places_BL.reshape(-1) - starts + 1).reshape(rows, chunks, -1).sum(2)
    by_cost = _dealt(places_BL, _balanced(costs_BC, shards))
    return by_cost if pairs_of_shards(by_cost, starts).max() < pairs_A.max() else head_tail


def tokens_of(rank: int, places_ABa: I64, context: Context) -> I64:
    """[B, l]: of :func:`deal`'s places those that a rank of ``cp`` computes."""
    shard, part = divmod(rank, context.heads)
    size = places_ABa.shape[2] // context.heads
    return places_ABa[shard, :, part * size : (part + 1) * size]


def _balanced(costs_BC: I64, shards: int) -> I64:
    """[B, C]: the shard of each chunk, as many to each. Of each next ``shards`` chunks by falling cost the costliest
    goes to the shard that has least (LPT: Graham 1969, with equal counts); loads go on from row to row."""
    loads_A = np.zeros(shards, np.int64)
    owners_BC = np.empty_like(costs_BC)
    for costs_C, owners_C in zip(costs_BC, owners_BC, strict=True):
        for chosen in np.argsort(-costs_C, kind="stable").reshape(-1, shards):
            lightest = np.argsort(loads_A, kind="stable")
            owners_C[chosen] = lightest
            loads_A[lightest] += costs_C[chosen]
    return owners_BC


def _dealt(places_BL: I64, owners_BC: I64) -> I64:
    """[A, B, a] from the shard of each of C equal chunks of a row."""
    rows, chunks = owners_BC.shape
    order_BC = np.argsort(owners_BC, axis=1, kind="stable")
    parts = np.take_along_axis(places_BL.reshape(rows, chunks, -1), order_BC[:, :, None], axis=1)
    shards = int(owners_BC.max()) + 1
    return np.ascontiguousarray(parts.reshape(rows, shards, -1).transpose(1, 0, 2))


def pairs_of_shards(places_ABa: I64, starts: I64) -> I64:
    """[A]: the pairs of a query and a key that each shard's queries attend to."""
    return (places_ABa - starts[places_ABa] + 1).sum(axis=(1, 2))


def gathered_segments(places_ABa: I64, starts: I64, shard: int) -> Segments:
    """Of a shard's queries, with the keys of all shards end to end, A·B·a of them."""
    slots = np.empty(places_ABa.size, np.int64)
    slots[places_ABa.reshape(-1)] = np.arange(places_ABa.size)
    first_S, begins_S, ends_S = _stretches(places_ABa[shard].reshape(-1), starts)
    lengths_S = ends_S - begins_S
    return Segments(
        None, _offsets(np.diff(first_S)), slots[ranges(begins_S, lengths_S)], _offsets(lengths_S), causal=True
    )


def ring_segments(places_ABa: I64, starts: I64, shard: int, source: int) -> Segments:
    """Of a shard's queries, with the keys of the shard ``source``; causal where it is the same."""
    first_S, begins_S, ends_S = _stretches(places_ABa[shard].reshape(-1), starts)
    counts_S = np.diff(first_S)
    there = places_ABa[source].reshape(-1)
    low_S = np.searchsorted(there, begins_S)
    high_S = np.searchsorted(there, ends_S if source == shard else ends_S - counts_S)
    known = high_S > low_S
    queries_T = None if known.all() else ranges(first_S[:-1][known], counts_S[known])
    lengths_S = (high_S - low_S)[known]
    return Segments(
        queries_T, _offsets(counts_S[known]), ranges(low_S[known], lengths_S), _offsets(lengths_S),
        causal=source == shard,
    )  # fmt: skip


def _stretches(places: I64, starts: I64) -> tuple[I64, I64, I64]:
    """Of ascending places: where each stretch of neighbours in a document begins among them, [S + 1]; and of each, [S],
    the place where its document begins and the place after its last."""
    document = starts[places]
    cut = (np.diff(places) != 1) | (np.diff(document) != 0)
    first = np.concatenate([[0], np.flatnonzero(cut) + 1, [len(places)]])
    return first, document[first[:-1]], places[first[1:] - 1] + 1


def _offsets(lengths_S: I64) -> I32:
    return np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)


def ranges(starts: I64, lengths: I64) -> I64:
    """The numbers ``start … start + length - 1`` of every pair, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
