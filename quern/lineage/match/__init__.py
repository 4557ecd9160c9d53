"""Finds the documents and token spans of a corpus that contain text of a benchmark.

What counts as the same text is in :mod:`.normalise`, what is looked for in :mod:`.index`, how tokens become words in
:mod:`.pieces`, and how a corpus streams through in :mod:`.scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quern.errors import InputError
from quern.lineage.match.index import AUTO, DEFAULT_N, MIN_WORDS, GramIndex, Item, read_benchmark
from quern.lineage.match.matches import Matched, Matches, documents_at
from quern.lineage.match.scan import scan_streams

if TYPE_CHECKING:
    from quern.lineage.store import IndexedRun

__all__ = [
    "AUTO", "DEFAULT_N", "MIN_WORDS", "GramIndex", "Item", "Matched", "Matches", "match", "read_benchmark",
    "read_index", "scan_streams",
]  # fmt: skip


def read_index(benchmark: str, fields: Sequence[str] = (AUTO,), n: int = DEFAULT_N) -> tuple[list[Item], GramIndex]:
    """The items of a JSON-lines file and the index of their n-grams.

    Raises:
        InputError: the file cannot be read, or no item has words enough.
    """
    if n < 1:
        raise InputError(f"-n: expected a number of words ≥ 1, got {n}")
    items = read_benchmark(benchmark, fields)
    index = GramIndex(items, n)
    if not index.num_grams.any():
        raise InputError(
            f"{benchmark}: none of its {len(items):,} items can be looked for: expected text of {min(n, MIN_WORDS)} "
            f"words or more; the first item is {items[0].id} (line {items[0].line})"
        )
    return items, index


def match(
    run: IndexedRun,
    benchmark: str,
    *,
    fields: Sequence[str] = (AUTO,),
    n: int = DEFAULT_N,
    min_coverage: float = 0.0,
    workers: int = 1,
) -> Matches:
    """Every document of ``run``, training or held out, that shares an n-gram of words with an item of ``benchmark``.

    ``benchmark``: a JSON-lines file; ``fields``: see :func:`read_benchmark`. ``min_coverage``: the least share of an
    item's n-grams that a document must hold to be listed. ``workers``: processes; the result is the same for any.

    Raises:
        InputError: the benchmark or a shard cannot be read, or no item has words enough.
    """
    if not 0 <= min_coverage <= 1:
        raise InputError(f"--min-coverage: expected a share from 0 to 1, got {min_coverage}")
    items, index = read_index(benchmark, fields, n)
    found = scan_streams([stream.path for stream in run.streams], index, workers=workers)
    coverage = found.grams / np.maximum(1, index.num_grams[found.items])
    kept = coverage >= min_coverage
    numbers = documents_at(run, found.streams[kept], found.documents[kept])
    unique, back = np.unique(numbers, return_inverse=True)
    documents = run.documents(unique)
    places = back.ravel().tolist()
    return Matches(
        numbers=numbers,
        streams=found.streams[kept],
        starts=found.starts[kept],
        stops=found.stops[kept],
        item_index=found.items[kept],
        grams=found.grams[kept],
        coverage=coverage[kept],
        doc_ids=[documents.doc_ids[i] for i in places],
        urls=[documents.urls[i] for i in places],
        sources=[documents.sources[i] for i in places],
        items=tuple(
            Matched(item.id, item.line, grams) for item, grams in zip(items, index.num_grams.tolist(), strict=True)
        ),
        identities=tuple(stream.identity for stream in run.streams),
        names=tuple(stream.name for stream in run.streams),
        run_id=run.run_id,
        version=run.version,
        n=n,
        benchmark=benchmark,
    )
