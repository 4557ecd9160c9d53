"""Attention over tokens that are dealt out: every method against a dense mask in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quern.parallel.planning.context import Context, Method
from support.distributed.context_case import Example, shared_attention, worst

Ranks = Callable[..., list[Any]]
METHODS: list[tuple[Method, int, int]] = [
    ("ulysses", 2, 2), ("ulysses", 3, 3), ("ulysses", 4, 4), ("allgather", 2, 1), ("allgather", 3, 1),
    ("allgather", 4, 1), ("ring", 2, 1), ("ring", 3, 1), ("ring", 4, 1), ("usp", 4, 2),
]  # fmt: skip
ON_EIGHT: list[tuple[Method, int, int]] = [
    ("ulysses", 8, 8), ("allgather", 8, 1), ("ring", 8, 1), ("usp", 8, 4), ("usp", 8, 2),
]  # fmt: skip


def check(ranks: Ranks, example: Example) -> None:
    found = worst(example, ranks(shared_attention, example.ranks, example))
    assert all(off <= 1e-12 for off in found.values()), found


@st.composite
def examples(draw: st.DrawFn, methods: list[tuple[Method, int, int]], chunks: int, rows: int) -> Example:
    """Rows of up to ``chunks`` of what a row is a multiple of."""
    method, ranks, exchange = draw(st.sampled_from(methods))
    length = draw(st.integers(1, chunks)) * Context(method, ranks, exchange).unit
    cuts = st.frozensets(st.integers(1, max(length - 1, 1)), max_size=9).map(sorted).map(tuple)
    documents = draw(st.lists(cuts, min_size=1, max_size=rows)) if length > 1 else [()]
    # key heads a multiple or a divisor of the ranks that exchange them
    keys = draw(st.sampled_from([own for own in (exchange, 2 * exchange, exchange // 2, 1) if own]))
    heads = max(keys, exchange) * draw(st.integers(1, 3))
    return Example(
        method, ranks, exchange, length, tuple(documents), heads, keys, draw(st.sampled_from([2, 4])),
        draw(st.sampled_from([2, 5, 1024])), draw(st.sampled_from([1, 2, 128])), draw(st.integers(0, 9)),
    )  # fmt: skip


@pytest.mark.parametrize(("method", "cp", "exchange"), METHODS)
def test_every_method_is_dense_attention(kept_ranks: Ranks, method: Method, cp: int, exchange: int) -> None:
    heads, keys = (12, 4) if cp != 3 else (12, 6)
    check(kept_ranks, Example(method, cp, exchange, 24, ((2, 11, 12, 17), (1, 9)), heads, keys, block=5, seed=1))


@pytest.mark.parametrize(("method", "exchange"), [("ulysses", 4), ("usp", 2)])
def test_a_key_head_goes_to_several_ranks(kept_ranks: Ranks, method: Method, exchange: int) -> None:
    check(kept_ranks, Example(method, 4, exchange, 16, ((5,),), 8, exchange // 2, seed=2))


OFTEN = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@pytest.mark.slow
@settings(OFTEN, max_examples=12)
@given(examples(METHODS, chunks=6, rows=3))
def test_random_documents_and_heads(kept_ranks: Ranks, example: Example) -> None:
    check(kept_ranks, example)


@pytest.mark.long
@settings(OFTEN, max_examples=50)
@given(examples([*METHODS, *ON_EIGHT], chunks=16, rows=4))
def test_more_random_documents_and_heads(kept_ranks: Ranks, example: Example) -> None:
    check(kept_ranks, example)


@pytest.mark.long
@pytest.mark.parametrize(("method", "cp", "exchange"), [("allgather", 4, 1), ("ring", 8, 1), ("usp", 8, 2)])
def test_long_rows_of_which_documents_are_dealt_by_their_cost(
    kept_ranks: Ranks, method: Method, cp: int, exchange: int
) -> None:
    cuts = (1, 130, 700, 2049, 2050, 2600, 4095)
    check(kept_ranks, Example(method, cp, exchange, 4096, (cuts,), exchange, 1, 2, block=384))
