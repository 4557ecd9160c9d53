"""Reads the columns of the verdict tables that the closure needs: identity, URL, text hash, and the failed gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern.data_pipeline.page.url import canonicalize, host
from quern.lineage.purge.tables.row_groups import GONE
from quern.storage.parquet import null_count, open_table

__all__ = ["VerdictRows", "below", "joined", "read_verdicts", "rows_of"]

_COLUMNS = ("doc_id", "url", "canonical_url", "post_filter_hash", "stage")
_BATCH = 1 << 16


@dataclass
class VerdictRows:
    """Rows of verdict tables: columns, and the place of each one's file among the names."""

    doc_ids: pa.Array
    urls: pa.Array
    """Canonical, also where the chain did not come to make it."""
    spelled: list[tuple[int, str]]
    """Row and URL of those that have no canonical form."""
    texts: pa.Array
    stages: pa.Array
    files: np.ndarray


def read_verdicts(path: str) -> Iterator[pa.Table]:
    """Some rows of a verdict table at a time; ``url`` only where there is no canonical one."""
    with open_table(path, _COLUMNS, missing=GONE) as table:
        whole = all(null_count(table, group, "canonical_url") == 0 for group in range(table.num_row_groups))
        for batch in table.iter_batches(_BATCH, columns=[name for name in _COLUMNS if not whole or name != "url"]):
            yield pa.Table.from_batches([batch])


def rows_of(table: pa.Table, place: int) -> VerdictRows:
    """What :func:`read_verdicts` gives, of the file in ``place``."""
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    urls, spelled = columns["canonical_url"], []
    # a page that was quarantined has its URL as the crawl gave it, and no canonical one
    given = columns.get("url")
    bare = np.empty(0, np.int64)
    if given is not None:
        bare = np.flatnonzero(pc.and_(urls.is_null(), given.is_valid()).to_numpy(zero_copy_only=False))
    if given is not None and len(bare):
        texts = given.take(pa.array(bare)).to_pylist()
        made = [canonicalize(url) for url in texts]
        mask = np.zeros(len(urls), np.bool_)
        mask[bare] = True
        urls = pc.replace_with_mask(urls, pa.array(mask), pa.array(made, pa.string()))
        spelled = [(row, url) for row, url, own in zip(bare.tolist(), texts, made, strict=True) if own is None]
    files = np.full(table.num_rows, place, np.int32)
    return VerdictRows(columns["doc_id"], urls, spelled, columns["post_filter_hash"], columns["stage"], files)


def joined(parts: Sequence[VerdictRows]) -> VerdictRows:
    """One after the other."""
    starts = np.cumsum([0, *(len(part.doc_ids) for part in parts)]).tolist()
    return VerdictRows(
        pa.concat_arrays([part.doc_ids for part in parts]),
        pa.concat_arrays([part.urls for part in parts]),
        [(start + row, url) for start, part in zip(starts, parts, strict=False) for row, url in part.spelled],
        pa.concat_arrays([part.texts for part in parts]),
        pa.concat_arrays([part.stages for part in parts]),
        np.concatenate([part.files for part in parts]),
    )


def below(urls: pa.Array, domain: str) -> np.ndarray:
    """bool for each: whether its host is the domain, or below it."""
    holds = np.flatnonzero(pc.match_substring(urls, domain).fill_null(False).to_numpy(zero_copy_only=False))
    hosts = [host(url) for url in urls.take(pa.array(holds)).to_pylist()]
    fits = np.zeros(len(urls), np.bool_)
    below = f".{domain}"
    fits[holds[[name == domain or name.endswith(below) for name in hosts]] if len(hosts) else holds] = True
    return fits
