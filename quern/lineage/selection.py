"""Spans of documents that lineage is asked about: whole documents of a data run, or parts of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quern.lineage.index.columns import I64, Bools

if TYPE_CHECKING:
    from quern.lineage.store import IndexedRun

__all__ = ["Selection", "select", "select_parts"]


@dataclass(frozen=True)
class Selection:
    """Spans of one data run, whole documents or parts of them; parallel arrays [m]."""

    lineage: IndexedRun
    numbers: I64
    streams: I64
    starts: I64
    """In the stream, like ``stops``."""
    stops: I64
    heads: Bools
    """Whether the first token is the document's."""
    purged_since: NDArray[np.uint32]
    """The corpus version that purged the document; 0: it is not purged."""
    documents: I64
    """Ascending numbers of the documents that were asked for; those without tokens have no span."""


def select(lineage: IndexedRun, numbers: ArrayLike) -> Selection:
    """The whole of documents ``numbers`` of a data run, each once."""
    unique = np.unique(np.asarray(numbers, np.int64))
    spans = lineage.spans_of(unique)
    return Selection(
        lineage, spans.numbers, spans.streams, spans.starts, spans.starts + spans.lengths,
        np.ones(len(spans.numbers), np.bool_), spans.purged_since, unique,
    )  # fmt: skip


def select_parts(
    lineage: IndexedRun, numbers: ArrayLike, streams: ArrayLike, starts: ArrayLike, stops: ArrayLike
) -> Selection:
    """Token spans [start, stop) of streams, each inside the document ``number``."""
    own, of, begin, end = (np.asarray(column, np.int64) for column in (numbers, streams, starts, stops))
    unique, which = np.unique(own, return_inverse=True)
    spans = lineage.spans_of(unique)  # in the order of the numbers
    if not np.array_equal(spans.numbers, unique):
        raise ValueError("expected parts of documents that have tokens")
    heads, purged_since = begin == spans.starts[which], spans.purged_since[which]
    return Selection(lineage, own, of, begin, end, heads, purged_since, unique)
