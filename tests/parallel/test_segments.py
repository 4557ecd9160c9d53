"""Every query meets every key that it may attend to exactly once, and shards have equal tokens and the least work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.parallel.planning.context import Context
from quern.parallel.planning.segments import (
    Segments,
    deal,
    document_starts,
    gathered_segments,
    pairs_of_shards,
    ring_segments,
    tokens_of,
)

Rows = tuple[int, np.ndarray]
"""Tokens of a row; and where documents begin in the rows laid end to end, and the end of all."""


@st.composite
def rows(draw: st.DrawFn, unit: int) -> Rows:
    length = unit * draw(st.integers(1, 8))
    cuts = [draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=8)) for _ in range(draw(st.integers(1, 3)))]
    starts = [row * length + place for row, own in enumerate(cuts) for place in (0, *sorted(own)) if place < length]
    empty = [len(cuts) * length] * draw(st.integers(1, 3))  # documents of no tokens, as the feed's padding is
    return length, np.array([*starts, *empty], np.int32)


def documents(cu_seqlens: np.ndarray) -> list[int]:
    """The number of each token's document."""
    return [number for number, size in enumerate(np.diff(cu_seqlens)) for _ in range(size)]


def attended(length: int, cu_seqlens: np.ndarray) -> Counter[tuple[int, int]]:
    """Every place of a query with every place of a key that it attends to."""
    of = documents(cu_seqlens)
    return Counter((q, k) for q in range(len(of)) for k in range(q + 1) if of[q] == of[k])


def pairs(by: Segments, queries: np.ndarray, keys: np.ndarray) -> Iterator[tuple[int, int]]:
    """The pairs that a kernel computes, by the places of the queries and keys that it is given."""
    queries = queries if by.queries_T is None else queries[by.queries_T]
    keys = keys[by.keys_U]
    assert (by.cu_queries[-1], by.cu_keys[-1]) == (len(queries), len(keys))
    for s in range(len(by.cu_queries) - 1):
        q_of, k_of = queries[slice(*by.cu_queries[s : s + 2])], keys[slice(*by.cu_keys[s : s + 2])]
        assert len(q_of) > 0
        assert len(k_of) > 0
        for at, q in enumerate(q_of):
            yield from ((int(q), int(k)) for k in k_of[: len(k_of) - len(q_of) + at + 1 if by.causal else None])


def contexts() -> list[Context]:
    sizes = [(2, 1), (3, 1), (4, 1), (6, 2), (8, 2), (4, 2)]
    return [Context("usp" if heads > 1 else "ring", ranks, heads) for ranks, heads in sizes]


@pytest.mark.parametrize("context", contexts(), ids=str)
@settings(max_examples=12)
@given(st.data(), st.sampled_from([1, 2, 128]))
def test_every_query_meets_each_of_its_keys_once(context: Context, data: st.DataObject, smallest: int) -> None:
    length, cu_seqlens = data.draw(rows(context.unit))
    starts = document_starts(cu_seqlens)
    places_ABa = deal(starts, length, context, smallest)
    of = documents(cu_seqlens)
    assert starts.tolist() == [of.index(own) for own in of]
    # every token has one shard and one rank, each with as many of every row, in order
    assert places_ABa.shape == (context.shards, len(of) // length, length // context.shards)
    assert sorted(places_ABa.ravel()) == list(range(len(of)))
    assert (np.diff(places_ABa, axis=2) > 0).all()
    assert (places_ABa // length == np.arange(len(of) // length)[:, None]).all()
    held = [tokens_of(rank, places_ABa, context) for rank in range(context.ranks)]
    assert {own.shape for own in held} == {(len(of) // length, length // context.ranks)}
    for shard in range(context.shards):
        own = np.concatenate(held[shard * context.heads : (shard + 1) * context.heads], axis=1)
        assert np.array_equal(own, places_ABa[shard])
    # and every pair is computed once, whether keys are gathered or go round
    gathered, ring = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for shard in range(context.shards):
        queries = places_ABa[shard].ravel()
        gathered.update(pairs(gathered_segments(places_ABa, starts, shard), queries, places_ABa.ravel()))
        for source in range(context.shards):
            ring.update(pairs(ring_segments(places_ABa, starts, shard, source), queries, places_ABa[source].ravel()))
    expected = attended(length, cu_seqlens)
    assert gathered == expected
    assert ring == expected
    by_shard = [sum(q in own for q, _ in expected.elements()) for own in (set(shard.flat) for shard in places_ABa)]
    assert pairs_of_shards(places_ABa, starts).tolist() == by_shard


def head_tail(length: int, num_rows: int, shards: int) -> np.ndarray:
    """By hand: the i-th and the i-th but last of equal chunks."""
    chunks = np.arange(num_rows * length).reshape(num_rows, 2 * shards, -1)
    return np.stack([np.concatenate([chunks[:, i], chunks[:, -1 - i]], axis=1) for i in range(shards)])


def work(places_ABa: np.ndarray, cu_seqlens: np.ndarray) -> list[int]:
    """Of each shard, by counting back to where each token's document begins."""
    begins = {int(place): int(place) for place in cu_seqlens}
    back, steps = {}, 0
    for place in range(int(cu_seqlens[-1])):
        steps = 1 if place in begins else steps + 1
        back[place] = steps
    return [sum(back[int(place)] for place in shard.flat) for shard in places_ABa]


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_rows_of_one_document_are_dealt_head_tail_with_equal_work(shards: int) -> None:
    length, context = 48 * shards, Context("allgather", shards)
    cu_seqlens = np.array([0, length, 2 * length], np.int32)
    places_ABa = deal(document_starts(cu_seqlens), length, context, smallest=1)
    assert np.array_equal(places_ABa, head_tail(length, 2, shards))
    assert len(set(work(places_ABa, cu_seqlens))) == 1


@settings(max_examples=60)
@given(st.data(), st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 4, 128]))
def test_no_shard_has_more_work_than_head_tail_gives(data: st.DataObject, shards: int, smallest: int) -> None:
    length, cu_seqlens = data.draw(rows(16 * shards))
    places_ABa = deal(document_starts(cu_seqlens), length, Context("ring", shards), smallest)
    plain = head_tail(length, int(cu_seqlens[-1]) // length, shards)
    most, before = max(work(places_ABa, cu_seqlens)), max(work(plain, cu_seqlens))
    assert most < before or np.array_equal(places_ABa, plain)


@pytest.mark.parametrize(
    ("shards", "cuts", "most"), [(2, (1200,), 1.02), (4, (1024, 1100), 1.05), (4, (3000,), 1.05), (8, (512, 3500), 1.1)]
)
def test_documents_that_upset_head_tail_are_dealt_by_their_cost(
    shards: int, cuts: tuple[int, ...], most: float
) -> None:
    """``most``: the largest work over the mean."""
    length = 4096
    cu_seqlens = np.array([0, *cuts, length], np.int32)
    places_ABa = deal(document_starts(cu_seqlens), length, Context("ring", shards), smallest=32)
    by_cost, plain = (work(own, cu_seqlens) for own in (places_ABa, head_tail(length, 1, shards)))
    assert max(plain) > 1.05 * sum(plain) / shards
    assert max(by_cost) < max(plain)
    assert max(by_cost) <= most * sum(by_cost) / shards
