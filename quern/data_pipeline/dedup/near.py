"""The tasks of the near pass: bands by key range, proposals, a plan, the shingles it needs, verified pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.dedup.bands import PAIR, BandStats, band_keys, propose, unique_pairs
from quern.data_pipeline.dedup.clusters import components
from quern.data_pipeline.dedup.equal import present
from quern.data_pipeline.dedup.exact import scoped_keys
from quern.data_pipeline.dedup.exchange import (
    part_of_key,
    read_array,
    read_part,
    read_parts,
    write_array,
    write_run,
)
from quern.data_pipeline.dedup.facts import Ids, Place, Work, id_words, read_ranks, read_rows
from quern.data_pipeline.dedup.verify import could_match, verify
from quern.errors import QuernError

__all__ = ["Plan", "plan_verification", "propose_pairs", "verify_group", "write_bands", "write_shingles"]

_MEMBER = np.dtype([("key", "<u8"), ("rank", "<i8"), ("band", "u1")])
_NEED = np.dtype([("rank", "<i8"), ("group", "<i8")])
_LENGTH = np.dtype([("rank", "<i8"), ("size", "<i8")])
_SHINGLE = np.dtype("<u8")
_SHINGLES_PER_RECORD = 8


@dataclass(frozen=True)
class Plan:
    """What is to be verified."""

    candidate_pairs: int
    """Different pairs that the bands proposed."""
    groups: int
    """Verification tasks, for the pairs whose sizes do not already rule a similarity ≥ threshold out."""


def write_bands(work: Work, place: Place, gone: str | None, parts: int) -> None:
    """Task: one partition's signatures → the band keys of its documents that are still there, by key range.

    Also notes the number of shingles of each document, in the order of the partition's facts.

    Raises:
        QuernError: a kept document has no row, or a signature was made with other settings.
    """
    path = work.table("signatures", place)
    ids, ranks = read_array(work.file("facts", place.index))["id"], read_ranks(work, place)
    index, here = Ids(ids), present(gone, ranks)
    sizes = np.zeros(len(ids), dtype=np.int64)
    seen = np.zeros(len(ids), dtype=bool)
    members = [np.empty(0, dtype=_MEMBER)]
    for batch in read_rows(path, ["doc_id", "signature", "shingles"]):
        rows = index.rows(id_words(batch.column("doc_id"), f"{path}: doc_id"))
        known = rows >= 0
        seen[rows[known]] = True
        lengths = batch.column("shingles").value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        sizes[rows[known]] = lengths[known]
        signed = known & batch.column("signature").is_valid().to_numpy(zero_copy_only=False)
        signed[signed] = here[rows[signed]]
        members.append(_members(work, place, batch.column("signature").filter(pa.array(signed)), ranks[rows[signed]]))
    if not seen.all():
        raise QuernError(f"{path}: has no row for {int((~seen).sum())} of {len(seen)} kept documents")
    records = np.concatenate(members)
    write_array(work.file("sizes", place.index), sizes)
    write_run(work.file("bands", place.index), records, part_of_key(records["key"], parts), parts)


def _members(work: Work, place: Place, column: pa.ListArray, ranks: np.ndarray) -> np.ndarray:
    config = work.config
    if (column.value_lengths().to_numpy(zero_copy_only=False) != config.num_perm).any():
        raise QuernError(
            f"{work.table('signatures', place)}: a signature has not num_perm = {config.num_perm} values; "
            "the pages were made with another config"
        )
    signatures = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, config.num_perm)
    keys = scoped_keys(band_keys(signatures, config.bands, config.rows), work.scope(place))
    members = np.empty(keys.size, dtype=_MEMBER)
    members["key"] = keys.ravel()
    members["rank"] = np.repeat(ranks, config.bands)
    members["band"] = np.tile(np.arange(config.bands, dtype=np.uint8), len(ranks))
    return members


def propose_pairs(work: Work, part: int, parts: int) -> BandStats:
    """Task: one key range of all partitions' bands → the pairs they propose."""
    members = read_parts(work.files("bands"), part, parts, _MEMBER)
    pairs, stats = propose(members["key"], members["band"], members["rank"], work.config.max_band_members)
    write_array(work.file("pairs", part), pairs)
    return stats


def plan_verification(work: Work, parts: int) -> Plan:
    """Task: the proposals of all key ranges → verification groups of bounded size, and what each needs.

    Pairs are sorted by connected component, so that a document's shingles go to as few groups as can be; a component
    too large for one group is cut, which costs reading and changes no result. Takes about 150 bytes a proposal.
    """
    pairs = unique_pairs(np.concatenate([read_array(work.file("pairs", part)) for part in range(parts)]))
    candidate_pairs = len(pairs)
    ranks = np.unique(np.concatenate((pairs["low"], pairs["high"])))
    sizes = _sizes(work, ranks)
    low, high = (sizes[np.searchsorted(ranks, pairs[end])] for end in ("low", "high"))
    possible = could_match(low, high, work.config.threshold)
    pairs, low, high = pairs[possible], low[possible], high[possible]
    if len(pairs) == 0:
        return Plan(candidate_pairs, 0)
    nodes, labels = components(pairs["low"], pairs["high"])
    order = np.lexsort((pairs["high"], pairs["low"], labels[np.searchsorted(nodes, pairs["low"])]))
    pairs, low, high = pairs[order], low[order], high[order]
    new_low = np.ones(len(pairs), dtype=bool)
    new_low[1:] = pairs["low"][1:] != pairs["low"][:-1]
    budget = work.records_per_task * _SHINGLES_PER_RECORD
    cost = np.cumsum(_SHINGLES_PER_RECORD + high + low * new_low)
    group = np.unique((cost - 1) // budget, return_inverse=True)[1]
    groups = int(group[-1]) + 1
    write_run(storage.join(work.scratch, "groups"), pairs, group, groups)
    needs = np.empty(2 * len(pairs), dtype=_NEED)
    needs["rank"] = np.concatenate((pairs["low"], pairs["high"]))
    needs["group"] = np.tile(group, 2)
    needs = np.unique(needs)
    partition = read_array(storage.join(work.scratch, "partitions"))[needs["rank"]].astype(np.int64)
    write_run(storage.join(work.scratch, "needs"), needs, partition, work.num_partitions)
    return Plan(candidate_pairs, groups)


def _sizes(work: Work, ranks: np.ndarray) -> np.ndarray:
    """Number of shingles of each of ``ranks`` (ascending)."""
    sizes = np.zeros(len(ranks), dtype=np.int64)
    for index in range(work.num_partitions):
        own = read_part(storage.join(work.scratch, "ranks"), index, work.num_partitions, np.dtype("<i8"))
        place = np.minimum(np.searchsorted(ranks, own), max(len(ranks) - 1, 0))
        found = ranks[place] == own if len(ranks) else np.zeros(len(own), dtype=bool)
        sizes[place[found]] = read_array(work.file("sizes", index))[found]
    return sizes


def write_shingles(work: Work, place: Place, groups: int) -> None:
    """Task: one partition's shingles, of the documents that are to be verified, by verification group."""
    needs = read_part(storage.join(work.scratch, "needs"), place.index, work.num_partitions, _NEED)
    lengths, part, shingles = [np.empty(0, dtype=_LENGTH)], [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=_SHINGLE)]
    if len(needs):
        path = work.table("signatures", place)
        index, ranks = Ids(read_array(work.file("facts", place.index))["id"]), read_ranks(work, place)
        for batch in read_rows(path, ["doc_id", "shingles"]):
            rows = index.rows(id_words(batch.column("doc_id"), path))
            rank = np.where(rows >= 0, ranks[np.maximum(rows, 0)], -1)
            first = np.searchsorted(needs["rank"], rank, side="left")
            copies = np.searchsorted(needs["rank"], rank, side="right") - first
            row = np.repeat(np.arange(len(rank)), copies)
            nth = np.arange(len(row)) - np.repeat(np.cumsum(copies) - copies, copies)
            taken = batch.column("shingles").take(pa.array(row))
            here = np.empty(len(row), dtype=_LENGTH)
            here["rank"] = rank[row]
            here["size"] = taken.value_lengths().to_numpy(zero_copy_only=False)
            lengths.append(here)
            part.append(needs["group"][first[row] + nth])
            shingles.append(taken.flatten().to_numpy(zero_copy_only=False))
    sizes, groups_of = np.concatenate(lengths), np.concatenate(part)
    write_run(work.file("lengths", place.index), sizes, groups_of, groups)
    write_run(work.file("shingles", place.index), np.concatenate(shingles), np.repeat(groups_of, sizes["size"]), groups)


def verify_group(work: Work, group: int, groups: int) -> int:
    """Task: one group's pairs → those that are similar enough. Returns their number."""
    pairs = read_part(storage.join(work.scratch, "groups"), group, groups, PAIR)
    lengths = read_parts(work.files("lengths"), group, groups, _LENGTH)
    shingles = read_parts(work.files("shingles"), group, groups, _SHINGLE)
    starts = np.cumsum(lengths["size"]) - lengths["size"]
    order = np.argsort(lengths["rank"])
    verified = verify(
        pairs, lengths["rank"][order], starts[order], lengths["size"][order], shingles, work.config.threshold
    )
    write_array(work.file("verified", group), verified)
    return len(verified)
