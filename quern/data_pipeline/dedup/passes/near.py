"""Tasks of the near-duplicate pass up to its candidates: bands, candidate pairs, and the data to verify them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.dedup.bands import (
    MAX_SIZE,
    MEMBER,
    PAIR,
    band_keys,
    propose,
    ranks_of,
    repeated,
    sizes_of,
    tokens,
    unique_pairs,
)
from quern.data_pipeline.dedup.exact import scope_words
from quern.data_pipeline.dedup.exchange import Slice, bucket_of_key, bucket_of_rank
from quern.data_pipeline.dedup.passes.order import NUMBERED, read_documents
from quern.data_pipeline.dedup.passes.signature_table import signature_batches
from quern.data_pipeline.dedup.rows import key_starts, made_of
from quern.data_pipeline.dedup.verify import could_match, fitting
from quern.data_pipeline.dedup.work import DedupInputs, Done, PartitionGroup, PartitionPlace
from quern.errors import QuernError

__all__ = [
    "ANCHORED",
    "LENGTH",
    "NEED",
    "NEEDED",
    "SHINGLE",
    "locate_documents",
    "plan_verification",
    "plans",
    "propose_pairs",
    "select_candidates",
    "write_bands",
    "write_shingles",
]

#: A candidate beside its anchor: the first of all documents that its later one was proposed against.
ANCHORED = np.dtype([("anchor", "<u8"), *PAIR.descr])
#: A document that a group of a plan needs.
NEED = np.dtype([("rank", "<i8"), ("plan", "<u4"), ("group", "<u4")])
#: The same, found.
NEEDED = np.dtype([("rank", "<i8"), ("row", "<u4"), ("group", "<u4")])
LENGTH = np.dtype([("rank", "<i8"), ("size", "<i8")])
SHINGLE = np.dtype("<u8")
_SHINGLES_PER_RECORD = 4
_SHINGLES_PER_PAIR = 8
#: A pair to verify is three records' worth of memory.
_RECORDS_PER_PAIR = 3


def plans(kind: str) -> str:
    """The files of planned pairs of a pass ("url", "near"), whose exchanges have its name in front too."""
    return f"{kind}-plans"


def _ranks_of_rows(work: DedupInputs, shard: PartitionGroup, numbered: Slice) -> np.ndarray:
    """int64: the rank of each of a shard's documents, −1 for those that are gone."""
    ranks = np.empty(sum(shard.documents), dtype=np.int64)
    for block in numbered.blocks(NUMBERED, work.max_records):
        ranks[block["row"]] = block["rank"]
    return ranks


def write_bands(work: DedupInputs, shard: PartitionGroup, numbered: Slice, buckets: int) -> Done:
    """Task: one shard's signatures → the band keys of its remaining documents, by key range.

    Raises:
        QuernError: a kept document has no row, or two, or a signature was made with other settings.
    """
    ranks = _ranks_of_rows(work, shard, numbered)
    scopes = scope_words(work.sources, work.config.scope)
    writer = work.writer("bands", shard.index, buckets, MEMBER)
    before = 0
    for place, documents in zip(shard.places, shard.documents, strict=True):
        own = ranks[before : before + documents]
        seen = np.zeros(documents, dtype=bool)
        for rows, batch in signature_batches(work, place, documents, ["signature", "shingles"]):
            known = rows >= 0
            once = rows[known]
            if seen[once].any() or len(np.unique(once)) < len(once):
                raise QuernError(f"{work.table('signatures', place)}: has two rows for a document")
            seen[once] = True
            here = known & batch.column("signature").is_valid().to_numpy(zero_copy_only=False)
            here[here] = own[rows[here]] >= 0
            kept = batch.filter(pa.array(here))
            sizes = kept.column("shingles").value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
            docs = tokens(own[rows[here]], sizes)
            members = _members(work, place, kept.column("signature"), docs, scopes[place.source])
            writer.add(members, bucket_of_key(members["key"], buckets))
        if not seen.all():
            path = work.table("signatures", place)
            raise QuernError(f"{path}: has no row for {int((~seen).sum())} of {len(seen)} kept documents")
        before += documents
    return Done((), {"bands": writer.close()})


def _members(
    work: DedupInputs, place: PartitionPlace, column: pa.ListArray, docs: np.ndarray, scope: np.uint64
) -> np.ndarray:
    config = work.config
    if (column.value_lengths().to_numpy(zero_copy_only=False) != config.num_perm).any():
        raise QuernError(
            f"{work.table('signatures', place)}: a signature has not num_perm = {config.num_perm} values; "
            "the pages were made with another config"
        )
    signatures = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, config.num_perm)
    keys = band_keys(signatures, config.bands, config.rows) ^ scope
    band = np.tile(np.arange(config.bands, dtype=np.uint8), len(docs))
    return made_of(MEMBER, key=keys.ravel(), doc=np.repeat(docs, config.bands), band=band)


def propose_pairs(work: DedupInputs, index: int, part: Slice, buckets: int) -> Done:
    """Task: one key range of all bands → the pairs they propose, by their later document.

    Gives back :class:`BandStats`' numbers. Of a range with more rows than a task can hold, the first of each key are
    found in one reading, and the pairs follow in a second.
    """
    writer = work.writer("pairs", index, buckets, PAIR)

    def blocks() -> Iterable[np.ndarray]:
        return [whole] if whole is not None else part.blocks(MEMBER, work.max_records)

    whole = repeated(part.read(MEMBER)) if part.records <= work.max_records else None

    def write(pairs: np.ndarray) -> None:
        writer.add(pairs, bucket_of_rank(pairs["high"], buckets))

    stats = propose(blocks, work.config.max_band_members, work.max_records, write)
    return Done((stats.shared, stats.capped, stats.largest), {"pairs": writer.close()})


def select_candidates(work: DedupInputs, index: int, part: Slice, buckets: int) -> Done:
    """Task: the proposals of one range of later documents → different pairs that sizes do not rule out, by anchor.

    Gives back the number of different pairs. Similar documents have the same anchor, mostly, so that their shingles
    go to one place. A range with more pairs than a task can hold is read as many times as it is too large.
    """
    writer = work.writer("candidates", index, buckets, ANCHORED)
    different = 0
    for pairs in _by_later(work, part):
        pairs = unique_pairs(pairs)
        different += len(pairs)
        low, high = sizes_of(pairs["low"]), sizes_of(pairs["high"])
        unknown = (low == MAX_SIZE) | (high == MAX_SIZE)
        starts = key_starts(pairs["high"])
        anchor = pairs["low"][starts][np.cumsum(starts) - 1]
        possible = could_match(low, high, work.config.threshold) | unknown
        rows = made_of(ANCHORED, pairs[possible], anchor=anchor[possible])
        writer.add(rows, bucket_of_rank(rows["anchor"], buckets))
    return Done((different,), {"candidates": writer.close()})


def _by_later(work: DedupInputs, part: Slice) -> Iterator[np.ndarray]:
    """The pairs of a range, all of one later document at once."""
    times = max(1, -(-part.records // work.max_records))
    if times == 1:
        yield part.read(PAIR)
        return
    for time in range(times):
        pieces = [np.empty(0, dtype=PAIR)]
        for block in part.blocks(PAIR, work.max_records):
            pieces.append(block[bucket_of_rank(block["high"] ^ np.uint64(0x5851F42D4C957F2D), times) == time])
        yield np.concatenate(pieces)


def plan_verification(work: DedupInputs, index: int, kind: str, part: Slice) -> Done:
    """Task: one range of anchors' candidates → groups whose shingles fit a task, and the documents that each needs.

    Gives back the number of pairs of each group. A set of similar documents too large for one group is cut, and the
    documents of its anchor's neighbourhood then go to each of them.
    """
    writer = work.writer(f"{kind}-needs", index, work.ranges, NEED)
    budget = work.max_records * _SHINGLES_PER_RECORD
    groups: list[int] = []
    with storage.publish(work.file(plans(kind), index)) as file:
        for rows in part.blocks(ANCHORED, max(work.max_records // _RECORDS_PER_PAIR, 1)):
            rows = rows[np.lexsort((rows["low"], rows["high"], rows["anchor"]))]
            for start, end, docs in fitting(rows["low"], rows["high"], budget, _SHINGLES_PER_PAIR):
                file.write(made_of(PAIR, rows[start:end]).tobytes())
                needs = made_of(NEED, rank=ranks_of(docs), plan=index, group=len(groups))
                writer.add(needs, work.range_of(needs["rank"]))
                groups.append(end - start)
    return Done(tuple(groups), {f"{kind}-needs": writer.close()})


def locate_documents(
    work: DedupInputs, index: int, kind: str, part: Slice, first_groups: Sequence[int], shards: int
) -> Done:
    """Task: the documents of one range of ranks that groups need → by their shard. ``first_groups`` is of each plan."""
    documents = read_documents(work, index, "shard", "row")
    writer = work.writer(f"{kind}-needed", index, shards, NEEDED)
    first = np.array(first_groups)
    for needs in part.blocks(NEED, work.max_records):
        place = needs["rank"] - work.first_ranks[index]
        group = first[needs["plan"]] + needs["group"]
        rows = made_of(NEEDED, rank=needs["rank"], row=documents["row"][place], group=group)
        writer.add(rows, documents["shard"][place])
    return Done((), {f"{kind}-needed": writer.close()})


def write_shingles(work: DedupInputs, shard: PartitionGroup, kind: str, needed: Slice, groups: int) -> Done:
    """Task: one shard's shingles of the documents to verify, by verification group."""
    needs = needed.read(NEEDED)
    needs = needs[np.lexsort((needs["group"], needs["row"]))]
    needed_rows = needs["row"].astype(np.int64)
    lengths = work.writer(f"{kind}-lengths", shard.index, groups, LENGTH)
    shingles = work.writer(f"{kind}-shingles", shard.index, groups, SHINGLE)
    before = 0
    for place, documents in zip(shard.places, shard.documents, strict=True):
        first, last = np.searchsorted(needed_rows, [before, before + documents])
        own, rows_of = needs[first:last], needed_rows[first:last] - before
        before += documents
        if not len(own):
            continue
        for rows, batch in signature_batches(work, place, documents, ["shingles"]):
            start = np.searchsorted(rows_of, rows, side="left")
            copies = np.searchsorted(rows_of, rows, side="right") - start
            row = np.repeat(np.arange(len(rows)), copies)
            if not len(row):
                continue
            nth = np.arange(len(row)) - np.repeat(np.cumsum(copies) - copies, copies)
            wanted = own[start[row] + nth]
            taken = batch.column("shingles").take(pa.array(row))
            size = taken.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
            lengths.add(made_of(LENGTH, rank=wanted["rank"], size=size), wanted["group"])
            shingles.add(taken.flatten().to_numpy(zero_copy_only=False), np.repeat(wanted["group"], size))
    return Done((), {f"{kind}-lengths": lengths.close(), f"{kind}-shingles": shingles.close()})
