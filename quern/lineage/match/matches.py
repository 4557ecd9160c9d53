"""Matches between documents and benchmark items, stored as one Parquet table."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from quern import storage
from quern.errors import InputError, one_line
from quern.lineage.index.columns import I64
from quern.storage.parquet import publish_table, require_columns, table_in

if TYPE_CHECKING:
    from quern.lineage.store import IndexedRun

__all__ = ["Matched", "Matches", "documents_at"]


_METADATA = b"quern.match"
_FORMAT = 1
_KINDS = {
    "doc_id": pa.binary(16), "number": pa.int64(), "source": pa.string(), "url": pa.string(),
    "stream": pa.string(), "identity": pa.string(), "start": pa.int64(), "stop": pa.int64(), "item": pa.int64(),
    "item_id": pa.string(), "grams": pa.int64(), "coverage": pa.float64(),
}  # fmt: skip
#: Attributes of :class:`Matches` that are columns as they stand.
_ARRAYS = {"numbers": "number", "starts": "start", "stops": "stop", "item_index": "item", "grams": "grams",
           "coverage": "coverage"}  # fmt: skip
_LISTS = {"doc_ids": "doc_id", "urls": "url", "sources": "source"}
_SCHEMA = pa.schema([pa.field(name, kind, nullable=name == "url") for name, kind in _KINDS.items()])


@dataclass(frozen=True)
class Matched:
    """One item of the benchmark and how it was searched for."""

    id: str
    line: int
    grams: int
    """Different n-grams; 0: too short, not looked for."""


@dataclass(frozen=True)
class Matches:
    """Parallel arrays, a row a span: by stream, document, item, start.

    ``numbers`` int64: the document's number in the lineage index of this moment (its lasting name is in ``doc_ids``);
    ``streams`` int64: index into ``identities``; ``starts``, ``stops`` int64: stream coordinates of the fewest tokens
    that cover the matched text, merged where they overlap; ``item_index`` int64 into ``items``; ``grams`` int64: how
    many different n-grams of the item the document holds; ``coverage`` float64: their share of the item's n-grams.
    """

    numbers: np.ndarray
    streams: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    item_index: np.ndarray
    grams: np.ndarray
    coverage: np.ndarray
    doc_ids: list[bytes]
    urls: list[str | None]
    sources: list[str]
    items: tuple[Matched, ...]
    identities: tuple[str, ...]
    """Of the streams, ``<run id>/<source>/<since>``."""
    names: tuple[str, ...]
    """Of the streams."""
    run_id: str
    version: int
    """Of the corpus."""
    n: int
    benchmark: str

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def not_looked_for(self) -> list[Matched]:
        """The items that are too short to be told from chance."""
        return [item for item in self.items if item.grams == 0]

    def save(self, path: str) -> None:
        """Write a Parquet table: doc_id, number, source, url, stream, identity, start, stop, item (index), item_id,
        grams, coverage; what else there is to know stands in its metadata.
        """
        streams, items = self.streams.tolist(), self.item_index.tolist()
        columns = {column: getattr(self, name) for name, column in (_ARRAYS | _LISTS).items()} | {
            "stream": [self.names[i] for i in streams],
            "identity": [self.identities[i] for i in streams],
            "item_id": [self.items[i].id for i in items],
        }
        known = {
            "format": _FORMAT,
            "run_id": self.run_id,
            "version": self.version,
            "n": self.n,
            "benchmark": self.benchmark,
            "streams": [list(pair) for pair in zip(self.names, self.identities, strict=True)],
            "items": [[item.id, item.line, item.grams] for item in self.items],
        }
        publish_table(path, pa.table(columns, _SCHEMA.with_metadata({_METADATA: json.dumps(known).encode()})))

    def in_run(self, lineage: IndexedRun, without: Collection[str] = ()) -> tuple[I64, I64, I64, I64]:
        """Numbers, streams, starts and stops of the rows as ``lineage`` has them now, whatever numbers its documents
        had when the matches were found; all of its corpus version's, also of a later one. Rows of streams whose
        identities are in ``without`` are left out.

        Raises:
            InputError: they are of another data run, or a stream of them was rewritten since.
        """
        if self.run_id != lineage.run_id:
            raise InputError(f"{lineage.run}: the matches are of another data run, {self.run_id}")
        place = {stream.identity: index for index, stream in enumerate(lineage.streams)}
        rows = np.flatnonzero([self.identities[index] not in without for index in self.streams.tolist()])
        starts, stops = self.starts[rows], self.stops[rows]
        named = [self.identities[index] for index in np.unique(self.streams[rows])]
        gone = [identity for identity in named if identity not in place]
        if gone:
            raise InputError(
                f"{lineage.run}: has no stream {gone[0]} (any more): its corpus is at version {lineage.version}, the "
                f"matches are of version {self.version}"
            )
        streams = np.array([place.get(identity, -1) for identity in self.identities], np.int64)[self.streams[rows]]
        numbers = documents_at(lineage, streams, starts)
        unique, which = np.unique(numbers, return_inverse=True)
        spans = lineage.spans_of(unique)
        doc_ids = lineage.documents(unique).doc_ids
        same = [doc_ids[index] == self.doc_ids[row] for index, row in zip(which.tolist(), rows.tolist(), strict=True)]
        if not all(same) or (stops > (spans.starts + spans.lengths)[which]).any() or (starts >= stops).any():
            raise InputError(f"{lineage.run}: the matches are of other documents than stand there now")
        return numbers, streams, starts, stops

    @classmethod
    def load(cls, path: str) -> Self:
        """What :meth:`save` wrote.

        Raises:
            InputError: the file is not there, or something else.
        """
        with storage.reading(path):
            data = storage.read_bytes(path)
        try:
            return cls._of_table(table_in(data))
        except (pa.ArrowException, InputError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            why = one_line(error, 120)
            raise InputError(f"{path}: expected a result of quern lineage match --out ({why})") from None

    @staticmethod
    def is_saved(path: str) -> bool:
        """Whether the file is a Parquet table, as :meth:`save` writes.

        Raises:
            InputError: it cannot be read.
        """
        with storage.reading(path), storage.open_read(path) as file:
            return bytes(file.read(4)) == b"PAR1"

    @classmethod
    def _of_table(cls, table: pa.Table) -> Self:
        known = json.loads((table.schema.metadata or {})[_METADATA])
        if known["format"] != _FORMAT:
            raise ValueError(f"its format is {known['format']!r}, expected {_FORMAT}")
        require_columns("the table", table.column_names, _SCHEMA.names)
        table = table.select(_SCHEMA.names).cast(_SCHEMA)
        table.validate(full=True)  # text that is not UTF-8
        names = tuple(str(name) for name, _ in known["streams"])
        identities = tuple(str(identity) for _, identity in known["streams"])
        place = {identity: number for number, identity in enumerate(identities)}
        streams = [place[identity] for identity in table["identity"].to_pylist()]
        found = cls(
            **{name: table[column].to_numpy() for name, column in _ARRAYS.items()},
            **{name: table[column].to_pylist() for name, column in _LISTS.items()},
            streams=np.array(streams, np.int64),
            items=tuple(Matched(str(name), int(line), int(grams)) for name, line, grams in known["items"]),
            identities=identities,
            names=names,
            run_id=str(known["run_id"]),
            version=int(known["version"]),
            n=int(known["n"]),
            benchmark=str(known["benchmark"]),
        )
        if len(found) and not 0 <= int(found.item_index.min()) <= int(found.item_index.max()) < len(found.items):
            raise ValueError("an item it names is not listed")
        return found


def documents_at(lineage: IndexedRun, streams: I64, tokens: I64) -> I64:
    """int64 [m]: the documents that tokens of streams (indices of ``lineage.streams``) are of.

    Raises:
        InputError: a stream has no such token.
    """
    numbers = np.full(len(tokens), -1, np.int64)
    for index in np.unique(streams).tolist():
        mine = np.flatnonzero(streams == index)
        unique, which = np.unique(tokens[mine], return_inverse=True)
        stream = lineage.streams[index]
        if unique[0] < 0 or unique[-1] >= stream.total_tokens:
            raise InputError(f"{stream.path}: has {stream.total_tokens:,} tokens, got token {unique[-1]:,}")
        spans, of = lineage.spans_in(stream, unique, unique + 1)
        known = np.empty(len(unique), np.int64)
        known[of] = spans.numbers
        numbers[mine] = known[which.ravel()]
    return numbers
