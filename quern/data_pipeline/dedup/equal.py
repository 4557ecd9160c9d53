"""The tasks of the exact and the URL pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quern.data_pipeline.dedup.clusters import EDGE, both_ways
from quern.data_pipeline.dedup.exact import KEYED, find_equal, firsts, scope_words
from quern.data_pipeline.dedup.exchange import Slice, bucket_of_key, bucket_of_rank
from quern.data_pipeline.dedup.facts import UNKNOWN_TIME
from quern.data_pipeline.dedup.order import document_blocks, gone_mask
from quern.data_pipeline.dedup.records import REMOVED, kind_code
from quern.data_pipeline.dedup.work import Done, Work

__all__ = ["find_removals", "write_keys"]


def write_keys(work: Work, index: int, kind: str, gone: Sequence[Slice], buckets: int) -> Done:
    """Task: the keys of one range's documents that are still there.

    ``kind`` is "exact" or "url"; documents without a URL have no key of that kind.
    """
    mask = gone_mask(work, index, gone)
    first = work.first_ranks[index]
    name = f"{kind}-keys"
    writer = work.writer(name, index, buckets, KEYED)
    scopes = scope_words(work.sources, work.config.scope)
    for start, documents in document_blocks(work, index):
        here = ~mask[start - first : start - first + len(documents)]
        if kind == "url":
            here &= documents["has_url"]
        ranks, documents = np.flatnonzero(here) + start, documents[here]
        keys = documents["text" if kind == "exact" else "url"] ^ scopes[documents["source"]][:, None]
        rows = np.zeros(len(documents), dtype=KEYED)
        rows["high"], rows["low"], rows["rank"] = keys[:, 0], keys[:, 1], ranks
        if kind == "url" and work.config.url_keep == "latest":
            known = documents["fetched"] != UNKNOWN_TIME
            rows["order"] = np.where(known, -documents["fetched"], UNKNOWN_TIME)
        writer.add(rows, bucket_of_key(rows["high"], buckets))
    return Done((), {name: writer.close()})


def find_removals(work: Work, index: int, kind: str, part: Slice, nodes: int) -> Done:
    """Task: one key range → the documents that go, by range of ranks, and the edges that this makes.

    Of a range with more documents than a task can hold, the first of each key are found in one reading and the others
    follow in a second. Memory is for the different keys of the range and one block.
    """
    half = work.max_records // 2 + 1  # a key takes two records' worth
    first = np.empty(0, dtype=KEYED)
    if part.records > half:
        for block in part.blocks(KEYED, half):
            first = firsts(np.concatenate((first, block)))
    gone = work.writer(f"{kind}-gone", index, work.ranges, np.dtype("<i8"))
    removed = work.writer(f"{kind}-removed", index, work.ranges, REMOVED)
    edges = work.writer(f"{kind}-edges", index, nodes, EDGE)
    for block in part.blocks(KEYED, half):
        found: np.ndarray = find_equal(block, first)
        gone.add(found["rank"], work.range_of(found["rank"]))
        rows = np.zeros(len(found), dtype=REMOVED)
        rows["rank"], rows["by"], rows["band"], rows["kind"] = found["rank"], found["by"], -1, kind_code(kind)
        rows["similarity"] = 1.0 if kind == "exact" else np.nan
        removed.add(rows, work.range_of(found["by"]))
        joined = both_ways(found["rank"], found["by"])
        edges.add(joined, bucket_of_rank(joined["node"], nodes))
    return Done((), {f"{kind}-gone": gone.close(), f"{kind}-removed": removed.close(), f"{kind}-edges": edges.close()})
