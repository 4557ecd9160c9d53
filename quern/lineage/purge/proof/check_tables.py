"""Checks a run's tables for purged documents: texts, and what was computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.page.document import content_hash
from quern.data_pipeline.page.keys import KEY, contains, key_set, keys_of, places
from quern.data_pipeline.page.url import url_key
from quern.errors import InputError
from quern.lineage.purge.proof.check_audit import Purged
from quern.lineage.purge.proof.findings import Check
from quern.lineage.purge.tables.row_groups import opened, tables_in
from quern.storage.parquet import Table

__all__ = ["check_documents", "check_signatures", "find_relatives"]

_TEXTS = ("text", "extracted")
_SHARED = ("post_filter_hash", "canonical_url")


def find_relatives(run: str, purged: Purged) -> tuple[np.ndarray, Check]:
    """Documents with the text or the canonical URL of a purged one that are not purged themselves (S16[n], sorted),
    from all verdicts; and whether all purged documents have one."""
    check = Check("verdicts", "every purged document is known by its verdict; its relatives are looked for below")
    parts, seen = list[np.ndarray](), np.zeros(len(purged.ids), bool)

    def look(name: str, first: int, ids: np.ndarray, table: Table, group: int) -> None:
        at = places(purged.ids, ids)
        own = at >= 0
        seen[at[own]] = True
        parts.append(ids[_related(table.read_row_group(group, _SHARED), purged) & ~own])

    _look_through(run, check, "verdicts", _SHARED, look, rows="verdicts")
    relatives = key_set(parts)
    check.counts["relatives"] = len(relatives)
    check.found_each("verdicts", "has no verdict of a purged document", ~seen, purged.ids, None)
    return relatives, check


def _related(rows: pa.Table, purged: Purged) -> np.ndarray:
    hashes = rows["post_filter_hash"].combine_chunks()
    there = hashes.is_valid().to_numpy(zero_copy_only=False)
    found = np.zeros(len(rows), bool)
    found[there] = contains(purged.texts, keys_of(hashes))
    if len(purged.urls):
        urls = rows["canonical_url"].to_pylist()
        keys = np.array([b"" if url is None else url_key(url) for url in urls], KEY)
        known = np.array([url is not None for url in urls], bool)
        found |= known & contains(purged.urls, keys)
    return found


def check_documents(run: str, purged: Purged, relatives: np.ndarray, *, deep: bool) -> Check:
    """Check that ``documents/`` has no text of a purged document. ``deep``: hash every text that is there, too."""
    check = Check("documents", "documents/ has no text of a purged document, nor of one with its text or URL")

    def look(name: str, first: int, ids: np.ndarray, table: Table, group: int) -> None:
        own, related = contains(purged.ids, ids), contains(relatives, ids)
        if deep or own.any() or related.any():
            rows = table.read_row_group(group, _TEXTS)
            check.counts["purged rows"] += int(own.sum())
            _judge(check, name, first, ids, rows, own, related, purged if deep else None)

    _look_through(run, check, "documents", _TEXTS, look)
    return check


def _look_through(
    run: str, check: Check, folder: str, columns: Sequence[str], look: Callable[..., None], rows: str = "rows"
) -> None:
    """Have ``look`` take name, first row, doc_ids, table and number of every row group below ``folder``; ``rows``: what
    they are counted as."""
    for _, _, name in tables_in(run, folder):
        first = 0
        try:
            with opened(storage.join(run, name), ("doc_id", *columns)) as table:
                for group in range(table.num_row_groups):
                    ids = keys_of(table.read_row_group(group, ("doc_id",))["doc_id"])
                    check.counts[rows] += len(ids)
                    look(name, first, ids, table, group)
                    first += len(ids)
        except InputError as error:
            check.found(name, str(error))


def _judge(
    check: Check,
    name: str,
    first: int,
    ids: np.ndarray,
    rows: pa.Table,
    own: np.ndarray,
    related: np.ndarray,
    purged: Purged | None,
) -> None:
    for column in _TEXTS:
        there = rows[column].is_valid().to_numpy()
        for mask, what in (
            (own & there, f"{column}: is of a purged document"),
            (related & there, f"{column}: is of a document with the text or the URL of a purged one"),
            (_same_text(check, rows[column], purged), f"{column}: is the very text of a purged document"),
        ):
            check.found_each(name, what, mask, ids, first)


def _same_text(check: Check, texts: pa.ChunkedArray, purged: Purged | None) -> np.ndarray:
    found = np.zeros(len(texts), bool)
    if purged is not None:
        for row, text in enumerate(texts):
            if text.is_valid:
                check.counts["texts compared"] += 1
                found[row] = contains(purged.texts, np.array([content_hash(text.as_py())], KEY))[0]
    return found


def check_signatures(run: str, purged: Purged) -> Check:
    """Check that ``signatures/`` has no rows of purged documents."""
    check = Check("signatures", "signatures/ has no row of a purged document")

    def look(name: str, first: int, ids: np.ndarray, table: Table, group: int) -> None:
        check.found_each(name, "is of a purged document", contains(purged.ids, ids), ids, first)

    _look_through(run, check, "signatures", (), look)
    return check
