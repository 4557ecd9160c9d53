"""Finds the documents whose duplicates must be decided again after a purge.

A decision depends only on the documents of its component (``duplicates/clusters.parquet``), since all similar pairs lie
inside it. So the components with a document to delete are decided again. There is one exception: a band that
more documents share than ``duplicates.max_band_members`` proposes each of them against the first ones only, and which
are first changes with every removed document. Where a document to delete or one of its components has such a
band, the whole corpus is decided again.

Both hold because equal texts and equal URLs are in the deletion set together: then no decision of the exact and the URL
pass changes, and what takes part in the near pass is what took part, without the deletion set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.dedup.bands import band_keys
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.exact import scope_words
from quern.data_pipeline.dedup.schemas import CLUSTERS, DECISIONS
from quern.data_pipeline.execution.commits import commit_path
from quern.data_pipeline.page.keys import contains, key_set, keys_of, places
from quern.errors import InputError, QuernError
from quern.lineage.purge.tables.row_groups import tables_in
from quern.lineage.purge.tables.rows import batches, matching

__all__ = ["affected", "capped_bands", "check_closed", "signatures_of"]

#: Rows of bands that are looked at one by one, 24 bytes each, before the whole corpus is decided again instead.
_MOST_SHARING = 4_000_000


def check_closed(run: str, deletion_set: np.ndarray) -> None:
    """Refuse documents to delete (S16, sorted) whose equal texts or URLs are not in the deletion set with
    them.

    Raises:
        QuernError: one is not; it is named.
    """
    for batch in batches(storage.join(run, DECISIONS), ["doc_id", "kind", "duplicate_of"]):
        equal = batch.filter(pc.is_in(batch.column("kind"), pa.array(["exact", "url"])))
        removed, survivors = keys_of(equal.column("doc_id")), keys_of(equal.column("duplicate_of"))
        left = np.flatnonzero(contains(deletion_set, survivors) & ~contains(deletion_set, removed))
        for row in left[:1].tolist():
            doc_id, by = (equal.column(name)[row].as_py().hex() for name in ("doc_id", "duplicate_of"))
            kind = {"exact": "text", "url": "URL"}[equal.column("kind")[row].as_py()]
            raise QuernError(f"{run}: document {by} is condemned and {doc_id}, which has the same {kind}, is not")


def affected(run: str, deletion_set: np.ndarray, config: DuplicatesConfig, purged_before: bool) -> np.ndarray | None:
    """S16: the documents to decide again, sorted, without the deletion set (S16, sorted); None for the whole corpus.

    ``purged_before``: other documents of the run have been purged. Memory: 16 bytes a document of the components, and
    8 for each of its bands.
    """
    members = _components(run, deletion_set)
    left = members[~contains(deletion_set, members)]
    if not config.near or capped_bands(run) == 0:
        return left
    if purged_before:  # may have made pairs that no component of the run holds
        return None
    return None if _share_full_band(run, key_set([members, deletion_set]), config) else left


def _components(run: str, deletion_set: np.ndarray) -> np.ndarray:
    """S16, sorted: every member of the components that have a document to delete."""

    def those(name: str, other: str, known: np.ndarray) -> np.ndarray:
        """The values of a column in the rows in which another has a known one."""
        rows = batches(storage.join(run, CLUSTERS), ["doc_id", "cluster_id"])
        return key_set([keys_of(own[name])[contains(known, keys_of(own[other]))] for own in rows])

    names = those("cluster_id", "doc_id", deletion_set)
    return those("doc_id", "cluster_id", names) if len(names) else names


def capped_bands(run: str) -> int | None:
    """How many bands more documents of the run share than are compared with each other; None if it does not say. Where
    there are any, a run without the deletion set may compare pairs that were never compared, and decide otherwise."""
    path = commit_path(run, "duplicates", "all", "decisions")
    if not storage.is_file(path):
        return None
    entry: Any = storage.read_json(path)
    counts = entry.get("counts") if isinstance(entry, dict) else None
    capped = counts.get("capped_bands") if isinstance(counts, dict) else None
    return capped if isinstance(capped, int) else None


def signatures_of(run: str, source: str, partition: str) -> str:
    """The table of a partition's signatures.

    Raises:
        InputError: it is not there.
    """
    path = storage.join(run, "signatures", source, f"{partition}.parquet")
    if not storage.is_file(path):
        raise InputError(f"{path}: is missing; --duplicates restore needs it, --duplicates purge does not")
    return path


def _share_full_band(run: str, doc_ids: np.ndarray, config: DuplicatesConfig) -> bool:
    """Whether one of the documents (S16, sorted) has a band that more than ``max_band_members`` documents share."""
    partitions = tables_in(run, "verdicts")

    def rows(wanted: Callable[[np.ndarray], np.ndarray] | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Doc_ids, and the band keys of each: uint64[documents, bands]."""
        for source, partition, _ in partitions:
            path = signatures_of(run, source, partition)
            scope = scope_words([source], config.scope)[0]
            columns = ["doc_id", "signature"]
            for batch in batches(path, columns, rows=1024) if wanted is None else matching(path, columns, wanted):
                signed = batch.filter(batch.column("signature").is_valid())
                values = signed.column("signature").flatten().to_numpy(zero_copy_only=False)
                if len(values) != signed.num_rows * config.num_perm:
                    raise QuernError(f"{path}: a signature has not num_perm = {config.num_perm} values")
                found = band_keys(values.reshape(-1, config.num_perm), config.bands, config.rows) ^ scope
                yield keys_of(signed.column("doc_id")), found

    own = [np.unique(found) for _, found in rows(lambda ids: contains(doc_ids, ids))]
    mine = np.unique(np.concatenate([np.empty(0, np.uint64), *own]))
    counts = np.zeros(len(mine), np.int64)
    for _, found in rows(None):
        at = places(mine, found.ravel())
        counts += np.bincount(at[at >= 0], minlength=len(mine))
    full = mine[counts > config.max_band_members]
    if not len(full):
        return False
    if counts[counts > config.max_band_members].sum() > _MOST_SHARING:
        return True
    return _full_without_equal(run, full, rows(None), config.max_band_members)


def _full_without_equal(run: str, full: np.ndarray, rows: Iterator[tuple[np.ndarray, np.ndarray]], most: int) -> bool:
    """Whether a band is still full without what the exact and the URL pass removed: copies have every band alike."""
    sharing_ids, sharing_keys = [np.empty(0, "S16")], [np.empty(0, np.int64)]
    for ids, found in rows:
        at = places(full, found.ravel())
        sharing_ids.append(np.repeat(ids, found.shape[1])[at >= 0])
        sharing_keys.append(at[at >= 0])
    doc_ids, key = np.concatenate(sharing_ids), np.concatenate(sharing_keys)
    different = np.unique(doc_ids)
    removed = []
    for batch in batches(storage.join(run, DECISIONS), ["doc_id", "kind"]):
        equal = keys_of(batch.filter(pc.is_in(batch.column("kind"), pa.array(["exact", "url"]))).column("doc_id"))
        removed.append(equal[contains(different, equal)])
    stays = ~contains(key_set(removed), doc_ids)
    return bool((np.bincount(key[stays], minlength=len(full)) > most).any())
