"""The tasks of the exact and the URL pass, and the record of who is gone after each."""

from __future__ import annotations

import numpy as np

from quern.data_pipeline.dedup.exact import KEYED, find_equal, scoped_keys
from quern.data_pipeline.dedup.exchange import (
    num_parts,
    part_of_key,
    read_array,
    read_parts,
    write_array,
    write_run,
)
from quern.data_pipeline.dedup.facts import Place, Work, read_ranks

__all__ = ["find_removals", "mark_gone", "present", "removals", "write_keys"]


def write_keys(work: Work, place: Place, kind: str, gone: str | None, parts: int) -> None:
    """Task: one partition's facts → the keys of its documents that are still there, by key range.

    ``kind`` is "exact" or "url"; documents without a URL have no key of that kind.
    """
    facts, ranks = read_array(work.file("facts", place.index)), read_ranks(work, place)
    here = present(gone, ranks)
    if kind == "url":
        here &= facts["has_url"]
    facts = facts[here]
    keys = scoped_keys(facts["text" if kind == "exact" else "url"], work.scope(place))
    rows = np.zeros(len(facts), dtype=KEYED)
    rows["high"], rows["low"], rows["rank"] = keys[:, 0], keys[:, 1], ranks[here]
    if kind == "url" and work.config.url_keep == "latest":
        known = facts["fetched"] != np.iinfo(np.int64).max
        rows["order"] = np.where(known, -facts["fetched"], np.iinfo(np.int64).max)
    write_run(work.file(kind, place.index), rows, part_of_key(rows["high"], parts), parts)


def find_removals(work: Work, kind: str, part: int, parts: int) -> int:
    """Task: one key range → the documents that go. Returns their number."""
    removed = find_equal(read_parts(work.files(kind), part, parts, KEYED))
    write_array(work.file(f"{kind}-removed", part), removed)
    return len(removed)


def removals(work: Work, kind: str, documents: int) -> np.ndarray:
    """``exact.REMOVAL`` rows of all key ranges."""
    parts = num_parts(documents, work.records_per_task)
    return np.concatenate([read_array(work.file(f"{kind}-removed", part)) for part in range(parts)])


def mark_gone(work: Work, kind: str, gone: str | None, path: str, documents: int) -> None:
    """Task: publish at ``path`` one bit for each rank, set if the document went in this or an earlier pass."""
    flags = np.zeros(documents, dtype=bool) if gone is None else np.unpackbits(read_array(gone), count=documents) > 0
    flags[removals(work, kind, documents)["rank"]] = True
    write_array(path, np.packbits(flags))


def present(gone: str | None, ranks: np.ndarray) -> np.ndarray:
    """bool for each of ``ranks``: whether the document is still there."""
    if gone is None:
        return np.ones(len(ranks), dtype=bool)
    bits = read_array(gone)
    return (bits[ranks >> 3] >> (7 - (ranks & 7)).astype(np.uint8)) & 1 == 0
