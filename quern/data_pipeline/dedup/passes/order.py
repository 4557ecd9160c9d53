"""Sorts all documents in survivor order and assigns their ranks.

A document's *rank* is its place in survivor order over the whole run, 0 the first to be kept: the priority of its
source, then more words (the longer of two copies is more often the whole one), then earlier fetched (unknown last),
then the smallest ``doc_id``. From here on documents are ranks; their ids come back when the decisions are written.

The order is made by a sort in ranges: a sample says where to cut, each range is sorted by a task of its own and stays
in a file, its documents in order, for everything that has to be looked up by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from quern import storage
from quern.data_pipeline.dedup.exchange import Slice, Writer, bucket_of_key, record_blocks
from quern.data_pipeline.dedup.passes.facts import FACTS, fact_blocks
from quern.data_pipeline.dedup.rows import made_of
from quern.data_pipeline.dedup.work import DedupInputs, Done, PartitionGroup
from quern.errors import QuernError

__all__ = [
    "DOCUMENT",
    "DOCUMENTS",
    "NUMBERED",
    "check_ids",
    "choose_cuts",
    "document_blocks",
    "gone_mask",
    "num_ranges",
    "number_documents",
    "read_documents",
    "sample_order",
    "sort_range",
    "split_documents",
]

#: A document in order: its facts, and where it came from.
DOCUMENT = np.dtype([*FACTS.descr, ("source", "<u4"), ("shard", "<u4"), ("row", "<u4")])
#: The files of documents in order, a range of ranks each.
DOCUMENTS = "documents"
#: A document's row in its shard, and its rank; −1 for one that is gone.
NUMBERED = np.dtype([("row", "<u4"), ("rank", "<i8")])
_ID = np.dtype([("high", "<u8"), ("low", "<u8")])
_KEY = np.dtype("<i8")
_KEY_FIELDS = 5
#: A document is four records' worth of memory.
_RECORDS_PER_DOCUMENT = 4
_SAMPLES_PER_RANGE = 64
_BLOCK = 1 << 16


def num_ranges(documents: int, max_records: int) -> int:
    """The number of ranges of ranks, one per task."""
    return max(1, -(-documents * _RECORDS_PER_DOCUMENT // max_records))


def _survivor_keys(work: DedupInputs, source: int, facts: np.ndarray) -> np.ndarray:
    """int64[5, documents]: what survivor order compares, the most significant first; ids keep their order as int64."""
    sign = np.uint64(1 << 63)
    ids = (facts["id"] ^ sign).view(np.int64)
    priority = np.full(len(facts), -work.priorities[source])
    return np.stack([priority, -facts["words"], facts["fetched"], ids[:, 0], ids[:, 1]])


def sample_order(work: DedupInputs, shard: PartitionGroup, documents: int, ranges: int) -> Done:
    """Task: the keys of a sample of one shard's documents, chosen by id: about 64 a range over the run."""
    share = min(1.0, _SAMPLES_PER_RANGE * ranges / documents)
    below = np.uint64(share * (2**64 - 2**11))
    pieces = [np.empty((_KEY_FIELDS, 0), dtype=_KEY)]
    for place, _, facts in fact_blocks(work, shard):
        mixed = facts["id"][:, 1] * np.uint64(0x9E3779B97F4A7C15)
        pieces.append(_survivor_keys(work, place.source, facts[mixed <= below]))
    keys = np.concatenate(pieces, axis=1)
    storage.publish_bytes(work.file("sample", shard.index), keys.T.astype(_KEY).tobytes())
    return Done((keys.shape[1],))


def choose_cuts(work: DedupInputs, sizes: Sequence[int], ranges: int) -> Done:
    """Task: all shards' samples → the keys between the ranges."""
    row = _KEY_FIELDS * _KEY.itemsize
    data = b"".join(storage.read_range(work.file("sample", index), 0, size * row) for index, size in enumerate(sizes))
    sample = np.frombuffer(data, dtype=_KEY).reshape(-1, _KEY_FIELDS)
    sample = sample[np.lexsort(sample.T[::-1])]
    at = np.arange(1, ranges) * len(sample) // ranges if len(sample) else np.empty(0, dtype=np.int64)
    storage.publish_bytes(work.file("cuts", 0), sample[at].tobytes())
    return Done((len(at),))


def split_documents(work: DedupInputs, shard: PartitionGroup, num_cuts: int, buckets: int) -> Done:
    """Task: one shard's documents by the range they belong to, and their ids by range of ids."""
    cuts = np.empty((_KEY_FIELDS, 0), dtype=_KEY)
    if num_cuts:
        data = storage.read_range(work.file("cuts", 0), 0, num_cuts * _KEY_FIELDS * _KEY.itemsize)
        cuts = np.frombuffer(data, dtype=_KEY).reshape(-1, _KEY_FIELDS).T
    ordered = work.writer("ordered", shard.index, num_cuts + 1, DOCUMENT)
    ids = work.writer("ids", shard.index, buckets, _ID)
    for place, row, facts in fact_blocks(work, shard):
        rows = np.arange(row, row + len(facts))
        documents = made_of(DOCUMENT, facts, source=place.source, shard=shard.index, row=rows)
        ordered.add(documents, _range_of_keys(_survivor_keys(work, place.source, facts), cuts))
        high, low = facts["id"].T
        ids.add(made_of(_ID, high=high, low=low), bucket_of_key(high, buckets))
    return Done((), {"ordered": ordered.close(), "ids": ids.close()})


def _range_of_keys(keys: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """How many of ``cuts`` each of ``keys`` is not less than."""
    num_cuts = cuts.shape[1]
    if num_cuts == 0:
        return np.zeros(keys.shape[1], dtype=np.int64)
    order = np.lexsort(np.concatenate((cuts, keys), axis=1)[::-1])  # stable: a cut comes before a key that equals it
    passed = np.cumsum(order < num_cuts)
    found = np.empty(len(order), dtype=np.int64)
    found[order] = passed
    return found[num_cuts:]


def check_ids(work: DedupInputs, part: Slice) -> Done:
    """Task: checks one range of ids for duplicates.

    Raises:
        QuernError: two documents have the same id.
    """
    ids = part.read(_ID)
    ids = ids[np.lexsort((ids["low"], ids["high"]))]
    same = np.flatnonzero(ids[1:] == ids[:-1])
    if len(same):
        high, low = ids[same[0]].tolist()
        raise QuernError(f"two documents have the same id {high:016x}{low:016x}")
    return Done()


def sort_range(work: DedupInputs, index: int, part: Slice) -> Done:
    """Task: one range's documents in order. Gives back their number."""
    documents = part.read(DOCUMENT)
    priority = -np.array(work.priorities, dtype=np.int64)[documents["source"]]
    ids = documents["id"]
    order = np.lexsort((ids[:, 1], ids[:, 0], documents["fetched"], -documents["words"], priority))
    with storage.publish(work.file(DOCUMENTS, index)) as file:
        for start in range(0, len(order), _BLOCK):
            file.write(documents[order[start : start + _BLOCK]].tobytes())
    return Done((len(documents),))


def document_blocks(work: DedupInputs, index: int) -> Iterator[tuple[int, np.ndarray]]:
    """``(rank of the first, documents)`` of one range, a bounded number at a time."""
    first, last = work.first_ranks[index : index + 2]
    for start, documents in record_blocks(work.file(DOCUMENTS, index), DOCUMENT, last - first):
        yield first + start, documents


def read_documents(work: DedupInputs, index: int, *fields: str) -> dict[str, np.ndarray]:
    """Some fields of all documents of one range, by name."""
    pieces: dict[str, list[np.ndarray]] = {field: [] for field in fields}
    for _, documents in document_blocks(work, index):
        for field in fields:
            pieces[field].append(documents[field].copy())
    empty = np.empty(0, dtype=DOCUMENT)
    return {field: np.concatenate([empty[field], *pieces[field]]) for field in fields}


def gone_mask(work: DedupInputs, index: int, gone: Sequence[Slice]) -> np.ndarray:
    """bool for each document of one range: whether an earlier pass removed it."""
    first, last = work.first_ranks[index : index + 2]
    mask = np.zeros(last - first, dtype=bool)
    for part in gone:
        for ranks in part.blocks(np.dtype("<i8"), work.max_records):
            mask[ranks - first] = True
    return mask


def number_documents(work: DedupInputs, index: int, gone: Sequence[Slice], shards: int) -> Done:
    """Task: sends the ranks of one range's documents back to the shards that they came from."""
    mask = gone_mask(work, index, gone)
    writer: Writer = work.writer("numbered", index, shards, NUMBERED)
    first = work.first_ranks[index]
    for start, documents in document_blocks(work, index):
        ranks = np.arange(start, start + len(documents))
        rows = made_of(NUMBERED, row=documents["row"], rank=np.where(mask[ranks - first], -1, ranks))
        writer.add(rows, documents["shard"])
    return Done((), {"numbered": writer.close()})
