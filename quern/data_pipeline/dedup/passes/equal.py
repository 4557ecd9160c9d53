"""The tasks of the exact and the URL pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.dedup.bands import tokens
from quern.data_pipeline.dedup.config import UNLIKE, URL_BINS
from quern.data_pipeline.dedup.exact import KEYED, find_equal, firsts, scope_words
from quern.data_pipeline.dedup.exchange import Slice, WrittenFiles, bucket_of_key, bucket_of_rank
from quern.data_pipeline.dedup.passes.clusters import EDGE, both_ways
from quern.data_pipeline.dedup.passes.decide import verified_pairs
from quern.data_pipeline.dedup.passes.facts import UNKNOWN_TIME, read_rows
from quern.data_pipeline.dedup.passes.near import ANCHORED, NEED, NEEDED
from quern.data_pipeline.dedup.passes.order import document_blocks, gone_mask
from quern.data_pipeline.dedup.records import KINDS, REMOVED
from quern.data_pipeline.dedup.rows import made_of
from quern.data_pipeline.dedup.work import DedupInputs, Done, PartitionGroup
from quern.data_pipeline.page.url import host

__all__ = [
    "HOSTS",
    "count_hosts",
    "find_removals",
    "find_url_pairs",
    "measure_urls",
    "write_keys",
]

#: The files of hosts: name → documents removed for a URL of theirs that serves different texts.
HOSTS = "url-hosts"
#: Hosts of a shard that are remembered, those with most documents.
_MOST_HOSTS = 10_000


def write_keys(work: DedupInputs, index: int, kind: str, gone: Sequence[Slice], buckets: int) -> Done:
    """Task: the keys of one range's remaining documents.

    ``kind`` is "exact" or "url"; documents without a URL have no key of that kind. Where pairs of a URL are to be
    measured, documents are not ranks but ``bands.tokens``, whose sizes are the words: no text has more shingles.
    """
    measured = kind == "url" and work.config.near
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
        if measured:
            ranks = tokens(ranks, np.maximum(documents["words"], 0)).astype(np.int64)
        rows = made_of(KEYED, high=keys[:, 0], low=keys[:, 1], rank=ranks)
        if kind == "url" and work.config.url_keep == "latest":
            known = documents["fetched"] != UNKNOWN_TIME
            rows["order"] = np.where(known, -documents["fetched"], UNKNOWN_TIME)
        writer.add(rows, bucket_of_key(rows["high"], buckets))
    return Done((), {name: writer.close()})


def find_removals(work: DedupInputs, index: int, kind: str, part: Slice, nodes: int) -> Done:
    """Task: one key range → the removed documents, by range of ranks, and the resulting edges."""
    removals = _Removals(work, index, kind, nodes)
    for found in _equal(work, part):
        removals.add(found["rank"], found["by"], 1.0 if kind == "exact" else np.nan)
    return Done((), removals.close())


def _equal(work: DedupInputs, part: Slice) -> Iterator[np.ndarray]:
    """What is equal to a document before it (``exact.REMOVAL``) in one key range, a bounded number at a time.

    Of a range with more documents than a task can hold, the first of each key are found in one reading and the others
    follow in a second. Memory is for the different keys of the range and one block.
    """
    half = work.max_records // 2 + 1  # a key takes two records' worth
    first = np.empty(0, dtype=KEYED)
    if part.records > half:
        for block in part.blocks(KEYED, half):
            first = firsts(np.concatenate((first, block)))
    for block in part.blocks(KEYED, half):
        yield find_equal(block, first)


class _Removals:
    """Writes which documents one task of a pass removes, for which others."""

    def __init__(self, work: DedupInputs, index: int, kind: str, nodes: int) -> None:
        self._work, self._kind, self._nodes = work, kind, nodes
        self._writers = {
            f"{kind}-gone": work.writer(f"{kind}-gone", index, work.ranges, np.dtype("<i8")),
            f"{kind}-removed": work.writer(f"{kind}-removed", index, work.ranges, REMOVED),
            f"{kind}-edges": work.writer(f"{kind}-edges", index, nodes, EDGE),
        }

    def add(self, ranks: np.ndarray, by: np.ndarray, similarity: np.ndarray | float) -> None:
        gone, removed, edges = self._writers.values()
        gone.add(ranks, self._work.range_of(ranks))
        rows = made_of(REMOVED, rank=ranks, by=by, similarity=similarity, band=-1, kind=KINDS.index(self._kind))
        removed.add(rows, self._work.range_of(by))
        joined = both_ways(ranks, by)
        edges.add(joined, bucket_of_rank(joined["node"], self._nodes))

    def close(self) -> dict[str, WrittenFiles]:
        return {name: writer.close() for name, writer in self._writers.items()}


def find_url_pairs(work: DedupInputs, index: int, part: Slice, buckets: int) -> Done:
    """Task: one range of URLs → pairs of each document and the first of its URL, to be compared, by that first one."""
    writer = work.writer("url-pairs", index, buckets, ANCHORED)
    for found in _equal(work, part):
        rows = made_of(ANCHORED, anchor=found["by"], low=found["by"], high=found["rank"])
        writer.add(rows, bucket_of_rank(rows["anchor"], buckets))
    return Done((), {"url-pairs": writer.close()})


def measure_urls(
    work: DedupInputs, group: int, plan: int, first: int, last: int, parts: tuple[Slice, Slice], nodes: int
) -> Done:
    """Task: one group's pairs of a URL → the removed documents, with their similarity to the kept one.

    Gives back how many went, by :data:`URL_BINS`, then of unknown similarity, and how many pairs there were. Those
    with different texts are written once more, by range of ranks: their hosts are looked up.
    """
    found = verified_pairs(work, "url", plan, first, last, parts, work.config.url_threshold)
    removals = _Removals(work, group, "url", nodes)
    removals.add(found["high"], found["low"], found["similarity"])
    known = found["similarity"][~np.isnan(found["similarity"])]
    unlike = found["high"][found["similarity"] < UNLIKE]
    writer = work.writer("host-needs", group, work.ranges, NEED)
    writer.add(made_of(NEED, rank=unlike), work.range_of(unlike))
    bins = np.bincount(np.searchsorted(URL_BINS, known, side="right"), minlength=len(URL_BINS) + 1).tolist()
    return Done((*bins, len(found) - len(known), last - first), {**removals.close(), "host-needs": writer.close()})


def count_hosts(work: DedupInputs, shard: PartitionGroup, needed: Slice) -> Done:
    """Task: one shard's documents of ``needed`` → a JSON file with the number of documents per host."""
    wanted = np.sort(needed.read(NEEDED)["row"].astype(np.int64))
    counts: Counter[str] = Counter()
    row = 0
    for place, documents in zip(shard.places, shard.documents, strict=True):
        if np.searchsorted(wanted, row) < np.searchsorted(wanted, row + documents):
            at = row
            for batch in read_rows(work.table("verdicts", place), ["canonical_url", "stage"], 1 << 13):
                urls = batch.column("canonical_url").filter(pc.is_null(batch.column("stage")))
                ends = np.searchsorted(wanted, [at, at + len(urls)])
                own = urls.take(pa.array(wanted[ends[0] : ends[1]] - at))
                counts.update(host(url) for url in own.to_pylist())
                at += len(urls)
        row += documents
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_MOST_HOSTS]
    storage.write_json(work.file(HOSTS, shard.index), dict(most))
    return Done((counts.total(),))
