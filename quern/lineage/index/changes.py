"""The corpus version in which each document was purged, from ``tokens/changes.v<V>.parquet``.

A spans file says whether a document is purged *now*. A training run that read an older version may have read it before:
what it saw is judged by the version it read, and so every span keeps the version that purged it.
"""

from __future__ import annotations

import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from quern import storage
from quern.data_pipeline.page.keys import KEY, column_of, places
from quern.errors import InputError
from quern.storage.parquet import open_table

__all__ = [
    "CHANGES_SCHEMA", "CHANGE_FILE", "PURGED", "RESTORED", "Purges", "changes_file", "of_versions", "purged_at",
    "written_by",
]  # fmt: skip

PURGED, RESTORED = "purged", "restored"
CHANGES_SCHEMA = pa.schema(
    [pa.field("doc_id", pa.binary(16), nullable=False), pa.field("action", pa.string(), nullable=False)]
)

CHANGE_FILE = re.compile(r"(?:changes|decisions)\.v([1-9][0-9]*)\.parquet")
"""Names of files below ``tokens/`` that tell what a version changed: documents, and decisions about duplicates."""
_CHANGES = re.compile(r"changes\.v([1-9][0-9]{0,8})\.parquet")
_WRITTEN = re.compile(r"shard_[0-9]{5,9}(?:\.v([1-9][0-9]{0,8}))?\.spans\.parquet")

U32 = NDArray[np.uint32]


def changes_file(version: int) -> str:
    """Name below ``tokens/`` of what a version changed."""
    return f"changes.v{version}.parquet"


def written_by(spans: str) -> int:
    """The version that wrote a spans file, by its name or path: version 1 has no suffix.

    Raises:
        InputError: it has another name: nobody can say since when what it calls purged is so.
    """
    match = _WRITTEN.fullmatch(os.path.basename(spans))
    if match is None:
        raise InputError(f"{spans}: expected a spans file, shard_00000.spans.parquet or shard_00000.v2.spans.parquet")
    return int(match[1] or 1)


def purged_at(since: ArrayLike, version: ArrayLike) -> NDArray[np.bool_]:
    """Whether spans that are purged since the versions ``since`` (0: never) were so in corpus version ``version``."""
    from_version = np.asarray(since, np.int64)
    return (from_version > 0) & (from_version <= np.asarray(version, np.int64))


class Purges:
    """The documents that versions up to ``version`` of the corpus in ``tokens`` purged and did not restore since.

    A version without a file purged nothing. Memory: 20 bytes a purged document and 20 a restored one, and the table of
    one version while it is read.

    Raises:
        InputError: a file is damaged, or is no table of changes.
    """

    def __init__(self, tokens: str, version: int) -> None:
        self._ids = np.empty(0, KEY)
        self._versions = np.empty(0, np.uint32)
        self._restored, self._restored_by = self._ids, self._versions
        for number, path in of_versions(tokens, _CHANGES, version):
            self._add(path, number)

    def __len__(self) -> int:
        return len(self._ids)

    def _add(self, path: str, version: int) -> None:
        changes = _read(path)
        purged, restored = (
            pc.equal(changes["action"], action.encode()).to_numpy() for action in (PURGED, RESTORED)
        )  # as bytes: what is not UTF-8 is neither
        for row in np.flatnonzero(~(purged | restored))[:1].tolist():
            got = changes["action"][row].as_py().decode(errors="backslashreplace")
            raise InputError(f"{path}: row {row}: action: expected {PURGED} or {RESTORED}, got {got!r:.40}")
        ids = np.array(changes["doc_id"].to_pylist(), KEY)
        kept = ~np.isin(self._ids, ids[restored])
        new = np.setdiff1d(ids[purged], self._ids[kept])  # purged twice: since the first time
        self._ids, self._versions = _joined(self._ids[kept], self._versions[kept], new, version)
        kept = ~np.isin(self._restored, ids[restored])
        self._restored, self._restored_by = _joined(
            self._restored[kept], self._restored_by[kept], np.unique(ids[restored]), version
        )

    def since(self, doc_ids: bytes | memoryview, written: int) -> U32:
        """The version since which each document is purged that a spans file says is; doc_ids: 16 bytes each.

        ``written``: the version that wrote the file (:func:`written_by`). It is the answer too where no changes tell
        of a document: whoever read an earlier one is taken to have seen it.
        """
        known, versions = _look_up(self._ids, self._versions, doc_ids)
        return np.where(known, np.minimum(versions, np.uint32(written)), np.uint32(written))

    def restored_after(self, doc_ids: bytes | memoryview, since: int) -> tuple[bytes, int] | None:
        """The first of the documents that a version later than ``since`` restored, and the last one that did."""
        known, versions = _look_up(self._restored, self._restored_by, doc_ids)
        for row in np.flatnonzero(known & (versions > since))[:1].tolist():
            return bytes(doc_ids[16 * row : 16 * row + 16]), int(versions[row])
        return None

    def purged_ids(self) -> np.ndarray:
        """S16, sorted: the purged documents that were not restored since."""
        return self._ids

    def restored_ids(self) -> np.ndarray:
        """S16, sorted: the restored documents that were not purged since."""
        return np.setdiff1d(self._restored, self._ids, assume_unique=True)

    def last_change(self, doc_id: bytes) -> tuple[str, int] | None:
        """``purged`` or ``restored``, and the version that did it: what holds for a document; None if none did."""
        for action, ids, versions in (
            (PURGED, self._ids, self._versions),
            (RESTORED, self._restored, self._restored_by),
        ):  # what was purged after it was restored is in both
            known, found = _look_up(ids, versions, doc_id)
            if known[0]:
                return action, int(found[0])
        return None

    def table(self) -> pa.Table:
        """doc_id (16 bytes) and version (uint32) of what is purged, by doc_id."""
        return _table(self._ids, self._versions)

    def restored_table(self) -> pa.Table:
        """doc_id (16 bytes) and version (uint32) of what was restored, whether purged since or not, by doc_id."""
        return _table(self._restored, self._restored_by)


def _table(ids: np.ndarray, versions: U32) -> pa.Table:
    return pa.table({"doc_id": column_of(ids.tobytes()), "version": pa.array(versions)})


def of_versions(tokens: str, named: re.Pattern[str], version: int) -> list[tuple[int, str]]:
    """The files of the folder ``tokens``, on any store, whose names tell a version up to ``version``, and these, in
    turn: a later one is of a version that is being written, and the first one has none."""
    if version < 2:
        return []
    if storage.is_local(tokens):
        inner = storage.split(tokens)[1]
        paths = [os.path.join(inner, name) for name in os.listdir(inner)]
    else:
        paths = [own for own in storage.list_files(tokens) if own.count("/") == tokens.rstrip("/").count("/") + 1]
    found = [(int(match[1]), path) for path in paths if (match := named.fullmatch(os.path.basename(path)))]
    return sorted(own for own in found if own[0] <= version)


def _joined(ids: np.ndarray, versions: U32, new: np.ndarray, version: int) -> tuple[np.ndarray, U32]:
    """Both, and ``new`` ids of one version, by id."""
    joined = np.concatenate([ids, new])
    order = np.argsort(joined)
    return joined[order], np.concatenate([versions, np.full(len(new), version, np.uint32)])[order]


def _look_up(ids: np.ndarray, versions: U32, doc_ids: bytes | memoryview) -> tuple[NDArray[np.bool_], U32]:
    """Whether each document is one of ``ids``, and its version (0 if not)."""
    wanted = np.frombuffer(doc_ids, KEY)
    at = places(ids, wanted)
    found = np.zeros(len(wanted), np.uint32)
    found[at >= 0] = versions[at[at >= 0]]
    return at >= 0, found


def _read(path: str) -> pa.Table:
    """Its actions as bytes."""
    schema = pa.schema([CHANGES_SCHEMA.field("doc_id"), pa.field("action", pa.binary(), nullable=False)])
    with open_table(path, schema.names, expected="a table of changes") as table:
        return table.read(schema.names).cast(schema)
