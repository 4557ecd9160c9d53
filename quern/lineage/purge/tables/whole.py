"""Checks that a run has all tables that a purge needs, since a partial table would give a partial purge."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.committed import missing_tables, named, read_committed
from quern.data_pipeline.dedup.schemas import DECISIONS
from quern.errors import InputError
from quern.remote.concurrency import in_order

__all__ = ["require_verdicts", "without_texts"]

_WAY_ON = "nothing is purged, since what only this file names would be passed over; put the file back"


def require_verdicts(run: str) -> None:
    """Raise if a committed table of verdicts or of duplicate decisions is missing.

    On a local disk each must have its committed SHA-256, too; from a store they would have to be read twice.

    Raises:
        InputError: naming the first such file.
    """
    committed = read_committed(run)
    if committed.fault is not None:
        raise InputError(f"{storage.join(run, 'commits', 'pages')}: {committed.fault}; nothing is purged")
    needed = [path for path in committed.tables if path.startswith("verdicts/") or path == DECISIONS]
    missing = sorted({*missing_tables(run, ("verdicts", "duplicates"))} & {*needed})
    if missing:
        raise InputError(f"{storage.join(run, named(missing))}: is committed and missing; {_WAY_ON}")
    if not storage.is_local(run):
        return
    sums = {path: told for path in needed if (told := committed.tables[path]) is not None}
    paths = sorted(sums)
    found = in_order(lambda path, stopped: storage.sha256(storage.join(run, path)), paths, os.cpu_count() or 1)
    for path, now in zip(paths, found, strict=True):
        if now != sums[path]:
            raise InputError(f"{storage.join(run, path)}: its SHA-256 is not the committed one; {_WAY_ON}")


def without_texts(run: str, deletion_set: pa.Table) -> list[str]:
    """A line if tables are missing that should hold texts or signatures of ``deletion_set``: nothing can be taken out
    of them, and nothing has to be until somebody puts them back."""
    had = deletion_set.filter(pc.is_valid(deletion_set["post_filter_hash"]))
    own = set(zip(had["source"].to_pylist(), had["partition"].to_pylist(), strict=True))
    missing = [
        path
        for path in missing_tables(run, ("documents", "signatures"))
        if (path.split("/")[1], path.split("/")[2].removesuffix(".parquet")) in own
    ]
    if not missing:
        return []
    return [
        f"{named(missing)}: is committed and missing, so no text is taken out of it; if it is put back, purge again"
    ]
