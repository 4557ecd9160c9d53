"""Builds and reads a segment: the documents of some verdict files, numbered in the order of their SURTs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern.data_pipeline.page import url as urls
from quern.data_pipeline.page.keys import bytes_of
from quern.errors import InputError, one_line
from quern.lineage.index.columns import I64, Column, DamagedIndexError, write_column
from quern.lineage.index.hashes import Hashes, halves, sort_order, write_hashes
from quern.lineage.index.records import Opened, read_sealed
from quern.lineage.index.urls import Urls, write_urls
from quern.storage.parquet import Table, open_table

__all__ = ["RECORD", "SEGMENT_DOCUMENTS", "Segment", "VerdictSlice", "plan_segments", "write_segment"]

SEGMENT_DOCUMENTS = 1 << 21
"""At most, unless one row group has more. Building one takes about 100 bytes a document and its texts one and a half
times: 450 MB for 1.4 million documents with 150 bytes of SURT, URL and host each."""
_SEGMENT_URL_BYTES = 192 << 20
_HASHES = ("doc_id", "pre_filter_hash", "post_filter_hash")
_TEXTS = ("surt", "url", "host")
#: The record of a part of the index, in its folder.
RECORD = "record.json"


@dataclass(frozen=True)
class VerdictSlice:
    """Row groups [first_group, end_group) of a verdict file: rows [first_row, first_row + rows)."""

    file: str
    """Below ``verdicts/``: ``<source>/<partition>.parquet``."""
    first_group: int
    end_group: int
    first_row: int
    rows: int
    num_groups: int
    """Of the whole file."""


def plan_segments(
    verdicts: str, ranges: Sequence[tuple[str, int, int | None]], documents: int = SEGMENT_DOCUMENTS
) -> Iterator[list[VerdictSlice]]:
    """The pieces of one segment after the other.

    ``ranges``: files below ``verdicts``, each with its first row group and the one to stop at (None: the file's end).

    Raises:
        InputError: a file is not Parquet, or has not the columns of a verdict table.
    """
    pieces: list[VerdictSlice] = []
    have = have_bytes = 0
    for file, first, end in ranges:
        with _open(os.path.join(verdicts, file)) as table:
            metadata = table.metadata
        total = metadata.num_row_groups
        # not by metadata.schema: that and the metadata hold each other, and footers of a thousand files would pile up
        columns = [i for i in range(metadata.num_columns if total else 0)
                   if metadata.row_group(0).column(i).path_in_schema in _TEXTS]  # fmt: skip
        row = sum(metadata.row_group(group).num_rows for group in range(min(first, total)))
        start_group, start_row = first, row
        end = total if end is None else min(end, total)
        for group in range(first, end):
            stored = metadata.row_group(group)
            size = sum(stored.column(i).total_uncompressed_size for i in columns)
            if have and (have + stored.num_rows > documents or have_bytes + size > _SEGMENT_URL_BYTES):
                if row > start_row:
                    pieces.append(VerdictSlice(file, start_group, group, start_row, row - start_row, total))
                yield pieces
                pieces, have, have_bytes, start_group, start_row = [], 0, 0, group, row
            have, have_bytes, row = have + stored.num_rows, have_bytes + size, row + stored.num_rows
        pieces.append(VerdictSlice(file, start_group, end, start_row, row - start_row, total))
    if pieces:
        yield pieces


def _open(path: str) -> AbstractContextManager[Table]:
    missing = "is gone; the run is being written to"
    return open_table(path, sorted((*_HASHES, *_TEXTS)), expected="a verdict table", missing=missing)


def write_segment(folder: str, verdicts: str, pieces: Sequence[VerdictSlice]) -> dict[str, Any]:
    """Write a segment to ``folder``, which is empty; return its record for the index.

    Raises:
        InputError: a verdict file cannot be read.
    """
    table = pa.concat_tables([_read(verdicts, piece) for piece in pieces])
    count = table.num_rows
    columns = {}
    for name in table.column_names:  # a table in chunks and the same in one piece never stand side by side
        columns[name] = table[name].combine_chunks()
        table = table.drop_columns([name])
    ids = bytes_of(columns["doc_id"])
    texts = [columns.pop(name) for name in _TEXTS]
    texts[0], texts[2] = _fill(*texts)
    high, low = halves(ids)
    order = sort_order(_ranks(texts[0], texts[1]), high, low)
    place = np.empty(count, np.uint32)
    place[order] = np.arange(count, dtype=np.uint32)

    write_column(f"{folder}/doc_ids", "V16", np.frombuffer(ids, "V16")[order])
    piece_of = np.repeat(np.arange(len(pieces), dtype=np.uint32), [piece.rows for piece in pieces])
    write_column(f"{folder}/pieces", "<u4", piece_of[order])
    rows = [np.arange(piece.first_row, piece.first_row + piece.rows, dtype=np.uint32) for piece in pieces]
    write_column(f"{folder}/rows", "<u4", np.concatenate(rows)[order])
    write_hashes(f"{folder}/by_doc", high, low, place)
    for name, column in (("by_pre", _HASHES[1]), ("by_post", _HASHES[2])):
        hashes = columns[column]
        valid = hashes.is_valid().to_numpy(zero_copy_only=False)
        write_hashes(f"{folder}/{name}", *halves(bytes_of(hashes.drop_null())), place[valid])
    write_urls(folder, (texts[0], texts[1], texts[2]), order)
    without = texts[0].is_null().to_numpy(zero_copy_only=False) & texts[1].is_null().to_numpy(zero_copy_only=False)
    return {
        "pieces": [list(astuple(piece)) for piece in pieces],
        "documents": count,
        "with_surt": count - texts[0].null_count,
        "with_url": count - int(without.sum()),
        "plain_hosts": not pc.any(pc.match_substring_regex(texts[2], r"[,)\[]")).as_py(),
    }


def _read(verdicts: str, piece: VerdictSlice) -> pa.Table:
    path = os.path.join(verdicts, piece.file)
    with _open(path) as table:
        if piece.end_group > table.num_row_groups:
            raise InputError(f"{path}: has changed while the index was built; try again")
        rows = table.read_row_groups(range(piece.first_group, piece.end_group), [*_HASHES, *_TEXTS])
        columns = [_cast(path, rows, name, pa.binary(16)) for name in _HASHES]
        # by way of bytes: text that is not UTF-8 is refused here, and not where it is read
        columns += [_cast(path, rows, name, pa.large_binary(), pa.large_string()) for name in _TEXTS]
        found = pa.table([_compact(column) for column in columns], [*_HASHES, *_TEXTS])
    if found.num_rows != piece.rows:
        raise InputError(f"{path}: has changed while the index was built; try again")
    if found["doc_id"].null_count:
        raise InputError(f"{path}: doc_id: expected 16 bytes in every row, got null")
    return found


def _cast(path: str, rows: pa.Table, name: str, *kinds: pa.DataType) -> pa.ChunkedArray:
    """A column as ``kinds``, one after the other."""
    column = rows[name]
    try:
        for kind in kinds:
            column = column.cast(kind)
    except pa.ArrowException as error:
        why = one_line(error, 120)
        raise InputError(f"{path}: {name}: expected {kinds[-1]}, got {rows[name].type} ({why})") from None
    return column


def _compact(column: pa.ChunkedArray) -> pa.Array:
    """A copy in buffers of just its size: those of the reader are up to twice as large."""
    return pa.concat_arrays([*column.chunks, pa.nulls(0, column.type)])


def _fill(surts: pa.Array, given: pa.Array, hosts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """SURTs and hosts, also for URLs that the chain never came to look at (quarantined pages)."""
    rows = np.flatnonzero(pc.and_(surts.is_null(), given.is_valid()).to_numpy(zero_copy_only=False))
    found = [urls.canonicalize(text) for text in given.take(pa.array(rows)).to_pylist()]
    known = [(row, canonical) for row, canonical in zip(rows, found, strict=True) if canonical is not None]
    if not known:
        return surts, hosts
    mask = np.zeros(len(surts), bool)
    mask[[row for row, _ in known]] = True
    own = pa.array([urls.surt(canonical) for _, canonical in known], pa.large_string())
    names = pa.array([urls.host(canonical) for _, canonical in known], pa.large_string())
    return pc.replace_with_mask(surts, mask, own), pc.replace_with_mask(hosts, mask, names)


def _ranks(surts: pa.Array, given: pa.Array) -> I64:
    """int64[n] that sort like (SURT), then (URL) where there is no SURT, then nothing at all."""
    ranks = _rank(surts)
    rows = np.flatnonzero(surts.is_null().to_numpy(zero_copy_only=False))
    ranks[rows] = len(surts) + _rank(given.take(pa.array(rows)))
    return ranks


def _rank(texts: pa.Array) -> I64:
    """int64[n]: dense ranks, nulls last."""
    if not len(texts):
        return np.empty(0, np.int64)
    return pc.rank(texts, "ascending", tiebreaker="dense").to_numpy().astype(np.int64)


class Segment:
    """A segment for reading; files are opened when they are needed. ``base``: the number of its first document."""

    def __init__(self, folder: str, base: int, record: dict[str, Any], opened: Opened | None = None) -> None:
        self.folder, self.base = folder, base
        self.documents: int = record["documents"]
        self._record = record
        self._opened = opened or Opened()

    @classmethod
    def of_index(cls, folder: str, records: Iterable[dict[str, Any]], opened: Opened) -> list[Self]:
        """The segments of the index in a folder, numbered one after the other."""
        found: list[Self] = []
        for record in records:
            base = found[-1].base + found[-1].documents if found else 0
            found.append(cls(os.path.join(folder, record["name"]), base, record, opened))
        return found

    def check(self) -> None:
        """Compare every checksum."""
        for part in (self.doc_ids, self.rows, self._piece_of, self.by_doc, self.by_pre, self.by_post, self.urls):
            part.check()
        _ = self._files

    @cached_property
    def _files(self) -> list[str]:
        """The verdict file of each piece."""
        path = f"{self.folder}/{RECORD}"
        record = read_sealed(path)
        if record is None:
            raise DamagedIndexError(path, "is missing or damaged")
        return [VerdictSlice(*piece).file for piece in record["pieces"]]

    @cached_property
    def _sources(self) -> list[str]:
        return [file.partition("/")[0] for file in self._files]

    @property
    def doc_ids(self) -> Column:
        """V16[documents]."""
        return self._column("doc_ids", "V16")

    @property
    def _piece_of(self) -> Column:
        return self._column("pieces", "<u4")

    @property
    def rows(self) -> Column:
        """uint32[documents]: the row in its verdict file."""
        return self._column("rows", "<u4")

    def _column(self, name: str, dtype: str) -> Column:
        return self._opened.get(f"{self.folder}/{name}", Column, dtype).sized(self.documents)

    @property
    def by_doc(self) -> Hashes:
        """By doc_id."""
        return self._opened.get(f"{self.folder}/by_doc", Hashes)

    @property
    def by_pre(self) -> Hashes:
        """By pre-filter hash."""
        return self._opened.get(f"{self.folder}/by_pre", Hashes)

    @property
    def by_post(self) -> Hashes:
        """By post-filter hash."""
        return self._opened.get(f"{self.folder}/by_post", Hashes)

    @property
    def urls(self) -> Urls:
        """SURTs, URLs and hosts."""
        facts = (self._record[name] for name in ("with_surt", "with_url", "plain_hosts"))
        return self._opened.get(self.folder, Urls, self.documents, *facts)

    def files_of(self, numbers: I64) -> list[str]:
        """The verdict file, below ``verdicts/``, of each document (numbers within the segment)."""
        return [self._files[index] for index in self._piece_of.take(numbers).tolist()]

    def sources_of(self, numbers: I64) -> list[str]:
        """The source of each document (numbers within the segment): the folder of its verdict file."""
        return [self._sources[index] for index in self._piece_of.take(numbers).tolist()]
