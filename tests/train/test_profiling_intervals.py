"""Every instant has one owner: held against counting on a grid."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.train.profiling.intervals import assign, clipped, covered, nest

END = 24
SPANS = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))
LISTS = st.lists(SPANS, max_size=6)
WINDOWS = st.sets(st.integers(0, END), max_size=6).map(
    lambda edges: [(a, b) for a, b in zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False)]
)


class Span(NamedTuple):
    start: int
    stop: int


def inside(spans: list[tuple[int, int]], instant: int) -> bool:
    return any(start <= instant < stop for start, stop in spans)


@pytest.mark.slow
@given(st.fixed_dictionaries({"first": LISTS, "second": LISTS, "third": LISTS}), WINDOWS)
def test_each_instant_is_the_first_layers_that_covers_it(layers, windows):
    expected = dict.fromkeys([*layers, None], 0)
    for instant in range(END):
        if inside(windows, instant):
            expected[next((name for name in layers if inside(layers[name], instant)), None)] += 1
    assert assign(layers, windows) == expected


@given(LISTS, WINDOWS)
def test_what_is_covered_counts_once(spans, windows):
    assert covered(spans, windows) == sum(inside(spans, n) and inside(windows, n) for n in range(END))


@given(SPANS, WINDOWS)
def test_an_interval_is_clipped_to_the_windows(span, windows):
    assert clipped(span, windows) == sum(inside([span], n) and inside(windows, n) for n in range(END))


@pytest.mark.slow
@given(LISTS)
def test_the_innermost_is_the_last_to_begin_that_has_not_ended(spans):
    events = sorted((Span(*span) for span in spans), key=lambda span: (span.start, -span.stop))
    parents, pieces = nest(events)
    owners: list[int | None] = [None] * END
    for start, stop, number in pieces:
        for instant in range(start, stop):
            assert owners[instant] is None
            owners[instant] = number
    active = [[n for n, span in enumerate(events) if span.start <= instant < span.stop] for instant in range(END)]
    assert owners == [max(each, default=None) for each in active]
    for number, (span, parent) in enumerate(zip(events, parents, strict=True)):
        around = [n for n in range(number) if events[n].start <= span.start < events[n].stop]
        assert parent == max(around, default=None)


def test_nothing_is_nothing():
    assert nest([]) == ([], [])
    assert assign({}, []) == {None: 0}
    assert assign({"a": [(3, 3)]}, [(0, 5)]) == {"a": 0, None: 5}
