"""Overlays decisions about duplicates by those of later corpus versions (``tokens/decisions.v<V>.parquet``).

``duplicates/decisions.parquet`` is what the run decided, and stays. A version that restores documents writes the rows
that hold from then on instead (the same columns): of documents that leave the corpus as duplicates of restored ones,
and of those that are removed in favour of another than before. A restored document (``changes.v<V>.parquet``) has no
decision any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from quern import storage
from quern.data_pipeline.dedup.schemas import DECISION_SCHEMA
from quern.lineage.index.changes import Purges, of_versions
from quern.storage.parquet import open_table
from quern.tokenize.corpus_version import fields

__all__ = ["REDECIDED_SCHEMA", "Redecided", "decisions_file", "redecided"]

_DECISIONS = re.compile(r"decisions\.v([1-9][0-9]{0,8})\.parquet")
#: As :meth:`Redecided.table` has them: ``kind`` and what follows are null where the document is kept now.
REDECIDED_SCHEMA = pa.schema(
    [
        DECISION_SCHEMA.field("doc_id"),
        *(field.with_nullable(True) for field in list(DECISION_SCHEMA)[1:]),
        pa.field("version", pa.uint32(), nullable=False),
    ]
)


def decisions_file(version: int) -> str:
    """Name below ``tokens/`` of the decisions that hold since a version."""
    return f"decisions.v{version}.parquet"


class Redecided:
    """New decisions about duplicates by versions up to ``version`` of the corpus in ``tokens``; local or on a store.

    Memory: about 500 bytes a document of which they did.

    Raises:
        InputError: a file is damaged, or is no table of decisions.
    """

    def __init__(self, tokens: str, version: int) -> None:
        self._rows: dict[bytes, dict[str, Any]] = {}
        for number, path in of_versions(tokens, _DECISIONS, version):
            for row in _read(path):
                self._rows[row["doc_id"]] = {**row, "version": number}
        for row in Purges(tokens, version).restored_table().to_pylist():
            known = self._rows.get(row["doc_id"])
            if known is None or known["version"] < row["version"]:
                self._rows[row["doc_id"]] = dict.fromkeys(REDECIDED_SCHEMA.names) | row
        self._removed_for: dict[bytes, list[bytes]] = {}
        for doc_id, row in self._rows.items():
            if row["duplicate_of"] is not None:
                self._removed_for.setdefault(row["duplicate_of"], []).append(doc_id)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, doc_id: bytes) -> bool:
        """Whether the document's row of ``duplicates/decisions.parquet``, or that it has none, holds no longer."""
        return doc_id in self._rows

    def decision(self, doc_id: bytes) -> dict[str, Any] | None:
        """The decision (``DECISION_SCHEMA``) that removes a document that is ``in`` this; None: it is kept."""
        row = self._rows[doc_id]
        return None if row["kind"] is None else {name: row[name] for name in DECISION_SCHEMA.names}

    def removed_for(self, doc_id: bytes) -> list[bytes]:
        """Those of which these versions say that they are duplicates of this document, ascending."""
        return sorted(self._removed_for.get(doc_id, ()))

    def table(self) -> pa.Table:
        """:data:`REDECIDED_SCHEMA`, by doc_id."""
        return pa.Table.from_pylist([self._rows[doc_id] for doc_id in sorted(self._rows)], REDECIDED_SCHEMA)


def redecided(run: str) -> pa.Table:
    """:meth:`Redecided.table` of a run's present version; empty where it has no tokens yet."""
    tokens = storage.join(run, "tokens")
    path = storage.join(tokens, "VERSION.json")
    record = storage.read_json(path) if storage.is_file(path) else {"version": 0}
    return Redecided(tokens, fields(path, record, {"version": int})["version"]).table()


def _read(path: str) -> Iterator[dict[str, Any]]:
    with open_table(path, DECISION_SCHEMA.names, expected="a table of decisions") as table:
        for batch in table.iter_batches(1 << 14, columns=DECISION_SCHEMA.names):
            yield from pa.Table.from_batches([batch]).cast(DECISION_SCHEMA).to_pylist()
