"""Turns verified pairs into rows of decisions: which document is removed, in favour of which, in which cluster."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quern import storage
from quern.data_pipeline.dedup.bands import PAIR
from quern.data_pipeline.dedup.exchange import Slice, Writer, bucket_of_key, bucket_of_rank, read_records
from quern.data_pipeline.dedup.passes.clusters import EDGE, star_edges
from quern.data_pipeline.dedup.passes.near import LENGTH, SHINGLE, plans
from quern.data_pipeline.dedup.passes.order import read_documents
from quern.data_pipeline.dedup.records import KINDS, REMOVED
from quern.data_pipeline.dedup.rows import key_starts, made_of
from quern.data_pipeline.dedup.verify import VERIFIED, Removed, survivors, survivors_after, verify
from quern.data_pipeline.dedup.work import DedupInputs, Done

__all__ = [
    "CLUSTER",
    "DECISION",
    "find_survivors",
    "identify_members",
    "identify_originals",
    "label_pairs",
    "name_clusters",
    "verified_pairs",
    "verify_group",
]

_MEMBER = np.dtype([("node", "<i8"), ("root", "<i8")])
_NAMED = np.dtype([("root", "<i8"), ("high", "<u8"), ("low", "<u8"), ("count", "<i8")])
#: A removed document, the id and the source of the one it is a duplicate of beside it.
_HALF = np.dtype([*REMOVED.descr, ("by_high", "<u8"), ("by_low", "<u8"), ("by_source", "<i4")])
#: The row of a removed document.
DECISION = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("by_high", "<u8"),
        ("by_low", "<u8"),
        ("similarity", "<f8"),
        ("band", "<i2"),
        ("kind", "u1"),
    ]
)
#: The row of a member of a cluster.
CLUSTER = np.dtype([("high", "<u8"), ("low", "<u8"), ("name_high", "<u8"), ("name_low", "<u8")])
#: Sorting a verified pair takes two records' worth, naming a member three.
_RECORDS_PER_VERIFIED, _RECORDS_PER_NAMED = 2, 3


def verify_group(
    work: DedupInputs, group: int, plan: int, first: int, last: int, parts: tuple[Slice, Slice], buckets: int
) -> Done:
    """Task: one group's pairs (``first`` … ``last`` of a plan) → those similar enough, and the edges between them.

    ``parts`` are the group's lengths and shingles.
    """
    found = verified_pairs(work, "near", plan, first, last, parts, work.config.threshold)
    verified, edges = work.writer("verified", group, buckets, VERIFIED), work.writer("near-edges", group, buckets, EDGE)
    verified.add(found, bucket_of_rank(found["high"], buckets))
    stars = star_edges(found["low"], found["high"])
    edges.add(stars, bucket_of_rank(stars["node"], buckets))
    return Done((len(found),), {"verified": verified.close(), "near-edges": edges.close()})


def verified_pairs(
    work: DedupInputs, kind: str, plan: int, first: int, last: int, parts: tuple[Slice, Slice], threshold: float
) -> np.ndarray:
    """Pairs ``first`` … ``last`` of a pass's plan that are similar enough (``VERIFIED``)."""
    pairs = read_records(work.file(plans(kind), plan), PAIR, first, last)
    lengths, shingles = parts[0].read(LENGTH), parts[1].read(SHINGLE)
    starts = np.cumsum(lengths["size"]) - lengths["size"]
    order = np.argsort(lengths["rank"])
    return verify(pairs, lengths["rank"][order], starts[order], lengths["size"][order], shingles, threshold)


def label_pairs(work: DedupInputs, index: int, stars: Slice, verified: Slice | None, buckets: int) -> Done:
    """Task: one range of nodes → the members of clusters by range of ranks, and the verified pairs by cluster."""
    members = work.writer("members", index, work.ranges, _MEMBER)
    pieces = [np.empty(0, dtype=EDGE)]
    roots = np.empty(0, dtype=np.int64)
    for block in stars.blocks(EDGE, work.max_records):
        leaf = block["other"] < block["node"]
        pieces.append(block[leaf])
        roots = np.union1d(roots, block["node"][~leaf])
    leaves = np.concatenate(pieces)
    leaves = leaves[np.argsort(leaves["node"])]
    for node, root in ((leaves["node"], leaves["other"]), (roots, roots)):
        members.add(made_of(_MEMBER, node=node, root=root), work.range_of(node))
    components = work.writer("components", index, buckets, VERIFIED)
    for block in verified.blocks(VERIFIED, work.max_records) if verified is not None else ():
        root = leaves["other"][np.searchsorted(leaves["node"], block["high"])]  # the later of two is never a root
        components.add(block, bucket_of_rank(root, buckets))
    return Done((), {"members": members.close(), "components": components.close()})


def find_survivors(work: DedupInputs, index: int, part: Slice) -> Done:
    """Task: the verified pairs of some clusters → which document is removed in favour of which.

    Clusters with more pairs than a task can hold are sorted by way of files and decided from the first document on,
    with one bit for each document of the run.
    """
    writer = work.writer("near-removed", index, work.ranges, REMOVED)
    for found in _survivors(work, index, part):
        rows = made_of(REMOVED, found, rank=found["high"], by=found["low"], kind=KINDS.index("near"))
        writer.add(rows, work.range_of(rows["by"]))
    return Done((), {"near-removed": writer.close()})


def _survivors(work: DedupInputs, index: int, part: Slice) -> Iterator[np.ndarray]:
    most = max(work.max_records // _RECORDS_PER_VERIFIED, 1)
    if part.records <= most:
        yield survivors(part.read(VERIFIED))
        return
    num_pieces = 2 * -(-part.records // most)
    stride = max(part.records // (_SAMPLES_PER_PIECE * num_pieces), 1)
    # copies: a view would keep its whole block
    sample = np.sort(np.concatenate([block["high"][::stride].copy() for block in part.blocks(VERIFIED, most)]))
    cuts = sample[np.arange(1, num_pieces) * len(sample) // num_pieces]
    # Its own: a worker that is taken for lost may be at the same pieces, and they are removed here.
    folder = f"sorting-{index:06d}-{uuid.uuid4().hex}"
    writer = work.writer(folder, 0, num_pieces, VERIFIED)
    for block in part.blocks(VERIFIED, most):
        writer.add(block, np.searchsorted(cuts, block["high"], side="right"))
    written = writer.close()
    removed = Removed(work.first_ranks[-1])
    for piece in range(num_pieces):
        own = Slice(work.folder(folder), (written.files,), num_pieces, piece, piece + 1, int(written.counts[piece]))
        yield survivors_after(removed, own.read(VERIFIED))
    storage.remove_tree(work.folder(folder))


def identify_originals(work: DedupInputs, index: int, parts: Sequence[Slice]) -> Done:
    """Task: removals in favour of one range of ranks → with the ids of those, by range of the removed documents."""
    documents = read_documents(work, index, "id", "source")
    writer = work.writer("halves", index, work.ranges, _HALF)
    for part in parts:
        for block in part.blocks(REMOVED, work.max_records // 2 + 1):
            place = block["by"] - work.first_ranks[index]
            high, low = documents["id"][place].T
            rows = made_of(_HALF, block, by_high=high, by_low=low, by_source=documents["source"][place])
            writer.add(rows, work.range_of(rows["rank"]))
    return Done((), {"halves": writer.close()})


def identify_members(work: DedupInputs, index: int, removed: Slice, members: Slice, nodes: int, buckets: int) -> Done:
    """Task: one range of ranks → its removed documents by id, and its members of clusters by cluster.

    Gives back how many were removed: (source, source of the one that is kept, kind, number) of each combination.
    """
    documents = read_documents(work, index, "id", "source")
    first = work.first_ranks[index]
    counts: Counter[tuple[int, ...]] = Counter()
    decisions = work.writer("decisions", index, buckets, DECISION)
    for block in removed.blocks(_HALF, work.max_records // 2 + 1):
        place = block["rank"] - first
        high, low = documents["id"][place].T
        rows = made_of(DECISION, block, high=high, low=low)
        decisions.add(rows, bucket_of_key(rows["high"], buckets))
        of_block = np.stack([documents["source"][place], block["by_source"], block["kind"]], axis=1)
        for key, count in zip(*np.unique(of_block, axis=0, return_counts=True), strict=True):
            counts[tuple(key.tolist())] += int(count)
    named = work.writer("named", index, nodes, _NAMED)
    for block in members.blocks(_MEMBER, work.max_records // 2 + 1):
        high, low = documents["id"][block["node"] - first].T
        rows = made_of(_NAMED, block, high=high, low=low, count=1)
        named.add(rows, bucket_of_rank(rows["root"], nodes))
    numbers = tuple(number for key, count in sorted(counts.items()) for number in (*key, count))
    return Done(numbers, {"decisions": decisions.close(), "named": named.close()})


def name_clusters(work: DedupInputs, index: int, part: Slice, buckets: int) -> Done:
    """Task: the members of some clusters → with the smallest id of each as its name, by id.

    Gives back the number of clusters, and of documents in the largest. Of more members than a task can hold, names
    are found in a first reading; memory is for the clusters and one block.
    """
    most = max(work.max_records // _RECORDS_PER_NAMED, 1)

    def blocks() -> Iterable[np.ndarray]:
        return part.blocks(_NAMED, most)

    names = np.empty(0, dtype=_NAMED)
    for block in blocks():
        names = np.concatenate((names, block))
        names = names[np.lexsort((names["low"], names["high"], names["root"]))]
        starts = np.flatnonzero(key_starts(names["root"]))
        counts = np.add.reduceat(names["count"], starts)
        names = names[starts]
        names["count"] = counts
    writer: Writer = work.writer("clusters", index, buckets, CLUSTER)
    for block in blocks():
        own = names[np.searchsorted(names["root"], block["root"])]
        rows = made_of(CLUSTER, block, name_high=own["high"], name_low=own["low"])
        writer.add(rows, bucket_of_key(rows["high"], buckets))
    return Done((len(names), int(names["count"].max(initial=0))), {"clusters": writer.close()})


#: Verified pairs of a large cluster that are looked at for each piece that it is cut into.
_SAMPLES_PER_PIECE = 1024
