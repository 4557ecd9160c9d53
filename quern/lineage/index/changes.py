"""Since which corpus version a document is purged: ``tokens/changes.v<V>.parquet`` of every later version.

A spans file says whether a document is purged *now*. A training run that read an older version may have read it before:
what it saw is judged by the version it read, and so every span keeps the version that purged it.
"""

from __future__ import annotations

import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from quern.errors import InputError

__all__ = [
    "CHANGES_SCHEMA", "PURGED", "RESTORED", "Purges", "changes_file", "is_changes_file", "purged_at",
    "written_by",
]  # fmt: skip

PURGED, RESTORED = "purged", "restored"
CHANGES_SCHEMA = pa.schema(
    [pa.field("doc_id", pa.binary(16), nullable=False), pa.field("action", pa.string(), nullable=False)]
)

_CHANGES = re.compile(r"changes\.v([1-9][0-9]{0,8})\.parquet")
_WRITTEN = re.compile(r".*\.v([1-9][0-9]{0,8})\.spans\.parquet")
#: A doc_id as NumPy sorts it; equal only where all 16 bytes are.
_ID = np.dtype("S16")

U32 = NDArray[np.uint32]


def changes_file(version: int) -> str:
    """Name below ``tokens/`` of what a version changed."""
    return f"changes.v{version}.parquet"


def is_changes_file(name: str) -> bool:
    """Whether :func:`changes_file` gives this name for some version."""
    return _CHANGES.fullmatch(name) is not None


def written_by(spans: str) -> int:
    """The version that wrote a spans file, by its name: version 1 has no suffix."""
    match = _WRITTEN.fullmatch(spans)
    return int(match[1]) if match else 1


def purged_at(since: ArrayLike, version: ArrayLike) -> NDArray[np.bool_]:
    """Whether spans that are purged since the versions ``since`` (0: never) were so in corpus version ``version``."""
    from_version = np.asarray(since, np.int64)
    return (from_version > 0) & (from_version <= np.asarray(version, np.int64))


class Purges:
    """What the versions up to ``version`` of the corpus in folder ``tokens`` purged, and did not restore since.

    A version without a file purged nothing. Memory: 20 bytes a purged document.

    Raises:
        InputError: a file is damaged, or is no table of changes.
    """

    def __init__(self, tokens: str, version: int) -> None:
        self._ids = np.empty(0, _ID)
        self._versions = np.empty(0, np.uint32)
        names = os.listdir(tokens) if version > 1 else []
        found = [(int(match[1]), name) for name in names if (match := _CHANGES.fullmatch(name))]
        for number, name in sorted(found):
            if number <= version:  # a later one is of a version that is being written
                self._add(os.path.join(tokens, name), number)

    def __len__(self) -> int:
        return len(self._ids)

    def _add(self, path: str, version: int) -> None:
        changes = _read(path)
        actions = changes["action"].to_numpy(zero_copy_only=False)
        for row in np.flatnonzero((actions != PURGED) & (actions != RESTORED))[:1].tolist():
            raise InputError(f"{path}: row {row}: action: expected {PURGED} or {RESTORED}, got {actions[row]!r:.40}")
        ids = np.array(changes["doc_id"].to_pylist(), _ID)
        kept = ~np.isin(self._ids, ids[actions == RESTORED])
        new = np.setdiff1d(ids[actions == PURGED], self._ids[kept])  # purged twice: since the first time
        joined = np.concatenate([self._ids[kept], new])
        versions = np.concatenate([self._versions[kept], np.full(len(new), version, np.uint32)])
        order = np.argsort(joined)
        self._ids, self._versions = joined[order], versions[order]

    def since(self, doc_ids: bytes | memoryview, written: int) -> U32:
        """The version since which each document is purged that a spans file says is; doc_ids: 16 bytes each.

        ``written``: the version that wrote the file (:func:`written_by`). It is the answer too where no changes tell
        of a document: whoever read an earlier one is taken to have seen it.
        """
        wanted = np.frombuffer(doc_ids, _ID)
        found = np.full(len(wanted), written, np.uint32)
        if len(self._ids) and len(wanted):
            places = np.minimum(np.searchsorted(self._ids, wanted), len(self._ids) - 1)
            known = self._ids[places] == wanted
            found[known] = np.minimum(self._versions[places[known]], np.uint32(written))
        return found


def _read(path: str) -> pa.Table:
    try:
        table = pq.ParquetFile(path).read(use_threads=False)
        missing = [name for name in CHANGES_SCHEMA.names if name not in table.column_names]
        if missing:
            raise InputError(f"{path}: has no column {missing[0]!r}")
        found = table.select(CHANGES_SCHEMA.names).cast(CHANGES_SCHEMA)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())[:120]}") from None
    return found
