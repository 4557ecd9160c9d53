"""Finds where documents are in the token streams, and which document a token belongs to.

A stream has three columns, one item a span: where it starts in the stream (and at last where the stream ends), which
document it is, since which corpus version it is purged (0: it is not). Each segment has one: for each of its documents
``stream << 48 | span``, or −1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quern.data_pipeline.page.keys import bytes_of
from quern.errors import InputError
from quern.lineage.index.changes import U32, Purges, changes_file, purged_at, written_by
from quern.lineage.index.columns import I64, Column, ColumnWriter, write_column
from quern.lineage.index.joins import Buckets, Numbers
from quern.lineage.index.records import Opened
from quern.lineage.index.segments import Segment
from quern.tokenize.shard_format import SPANS_SCHEMA
from quern.tokenize.shards import ShardReader

__all__ = ["SpanColumns", "Spans", "write_spans"]

_ROWS = 1 << 16
_SHIFT = 48
_CODE = np.dtype([("number", "<i8"), ("code", "<i8")])


@dataclass(frozen=True)
class Spans:
    """Spans of documents in the token streams, as parallel arrays [m]."""

    numbers: I64
    streams: I64
    """Index of the stream in ``IndexedRun.streams``."""
    starts: I64
    """In the stream's tokens."""
    lengths: I64
    """EOT included."""
    purged_since: U32
    """The corpus version that purged them; 0: they are not purged."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def purged(self) -> NDArray[np.bool_]:
        """Whether each is purged in the corpus version that is opened."""
        return self.purged_since > 0

    def purged_at(self, version: ArrayLike) -> NDArray[np.bool_]:
        """Whether each was purged already in corpus version ``version`` (one, or one a span)."""
        return purged_at(self.purged_since, version)


def write_spans(
    folder: str, scratch: str, readers: Sequence[ShardReader], since: Sequence[int], segments: Sequence[Segment]
) -> None:
    """Write the spans of all streams to ``folder``, which is empty. ``since``: the corpus version since which the
    tokens of each stream stand where they do.

    Raises:
        InputError: a spans file is damaged, or names a document that has no verdict, or a document has two spans; or
            one that is purged was restored meanwhile, where it stands: a restoration makes another stream, and no one
            version could tell who saw it.
    """
    codes = Buckets(scratch, "codes", _CODE, len(segments))
    bases = np.array([segment.base for segment in segments], np.int64)
    purges = Purges(readers[0].root, readers[0].version) if readers else Purges(folder, 0)
    for stream, reader in enumerate(readers):
        path = f"{folder}/stream_{stream:03d}"
        numbers = Numbers(scratch, f"stream_{stream:03d}", segments, reader.num_documents)
        with (
            ColumnWriter(f"{path}.starts", "<i8", fences=True) as starts,
            ColumnWriter(f"{path}.purged", "<u4") as purged,
        ):
            for own_starts, own_purged, doc_ids in _read_stream(reader, purges, since[stream]):
                starts.append(own_starts)
                purged.append(own_purged)
                numbers.add(doc_ids)
            starts.append(np.array([reader.total_tokens]))
        first = 0
        with ColumnWriter(f"{path}.numbers", "<i8") as column:
            for chunk in numbers.chunks():
                _known(chunk, first, reader)
                column.append(chunk)
                records = np.empty(len(chunk), _CODE)
                records["number"], records["code"] = chunk, np.arange(first, first + len(chunk)) + (stream << _SHIFT)
                codes.add(records, np.searchsorted(bases, chunk, "right") - 1)
                first += len(chunk)
    for index, segment in enumerate(segments):
        records = codes.take(index)
        spans = np.full(segment.documents, -1, np.int64)
        spans[records["number"] - segment.base] = records["code"]
        if np.count_nonzero(spans >= 0) != len(records):
            twice = np.flatnonzero(np.bincount(records["number"] - segment.base) > 1)[0]
            doc_id = segment.doc_ids.take(np.array([twice])).tobytes().hex()
            raise InputError(f"{readers[0].root}: document {doc_id} has two spans, expected one at most")
        write_column(f"{folder}/of.{index:05d}", "<i8", spans)


def _known(numbers: I64, first: int, reader: ShardReader) -> None:
    """Refuse spans of documents that have no verdict, or two."""
    wrong = np.flatnonzero(numbers < 0)
    if not len(wrong):
        return
    ends = np.cumsum([shard.documents for shard in reader.shards])
    shard = int(np.searchsorted(ends, first + wrong[0], "right"))
    row = int(first + wrong[0] - ends[shard] + reader.shards[shard].documents)
    span = reader.span(shard, row)
    path = os.path.join(reader.path, reader.shards[shard].spans)
    found = "none" if numbers[wrong[0]] == -1 else "two"
    raise InputError(f"{path}: row {row}: expected document {span.doc_id.hex()} to have one verdict row, got {found}")


def _read_stream(reader: ShardReader, purges: Purges, stands: int) -> Iterator[tuple[I64, U32, memoryview]]:
    """Starts (in the stream), since when they are purged, and doc_ids (16 bytes each) of a stream's spans, some at a
    time."""
    for shard, info in enumerate(reader.shards):
        written = written_by(os.path.join(reader.path, info.spans))
        for spans in reader.read_spans(shard, SPANS_SCHEMA.names, _ROWS):
            starts, purged = spans["start"].to_numpy(), spans["purged"].to_numpy(zero_copy_only=False)
            doc_ids = bytes_of(spans["doc_id"])
            since = np.zeros(len(starts), np.uint32)
            gone = np.frombuffer(doc_ids, "V16")[purged].tobytes()
            since[purged] = purges.since(gone, written)
            restored = purges.restored_after(gone, stands)
            if restored is not None:
                doc_id, version = restored
                raise InputError(
                    f"{os.path.join(reader.root, changes_file(version))}: restored document {doc_id.hex()}, but "
                    f"{reader.source} stands since version {stands}: a version that restores writes the source anew"
                )
            yield starts + int(reader.offsets[shard]), since, doc_ids


class _Stream:
    """The columns of one stream."""

    def __init__(self, path: str) -> None:
        self.numbers = Column(f"{path}.numbers", "<i8")
        self.count = len(self.numbers)
        self.starts = Column(f"{path}.starts", "<i8").sized(self.count + 1)
        self.purged = Column(f"{path}.purged", "<u4").sized(self.count)


class SpanColumns:
    """Reads what :func:`write_spans` wrote. ``bases``: the number of each segment's first document."""

    def __init__(self, folder: str, num_streams: int, bases: Sequence[int], opened: Opened | None = None) -> None:
        self._folder, self._num_streams = folder, num_streams
        self._bases = np.array(bases, np.int64)
        self._opened = opened or Opened()

    def _stream(self, stream: int) -> _Stream:
        return self._opened.get(f"{self._folder}/stream_{stream:03d}", _Stream)

    def check(self) -> None:
        """Compare every checksum."""
        for index in range(self._num_streams):
            stream = self._stream(index)
            for column in (stream.starts, stream.numbers, stream.purged):
                column.check()
        for index in range(len(self._bases)):
            self._segment(index).check()

    def _segment(self, index: int) -> Column:
        return self._opened.get(f"{self._folder}/of.{index:05d}", Column, "<i8")

    def of(self, numbers: I64) -> Spans:
        """The spans of the documents that have one, in the order given."""
        codes = np.full(len(numbers), -1, np.int64)
        index_of = np.searchsorted(self._bases, numbers, "right") - 1
        for index in np.unique(index_of).tolist():
            mine = index_of == index
            codes[mine] = self._segment(index).take(numbers[mine] - self._bases[index])
        codes = codes[codes >= 0]
        return self._read(codes >> _SHIFT, codes & ((1 << _SHIFT) - 1))

    def _read(self, streams: I64, places: I64) -> Spans:
        numbers, starts, lengths = (np.empty(len(streams), np.int64) for _ in range(3))
        purged = np.empty(len(streams), np.uint32)
        for index in np.unique(streams).tolist():
            mine, columns = streams == index, self._stream(index)
            own = places[mine]
            numbers[mine] = columns.numbers.take(own)
            starts[mine] = columns.starts.take(own)
            lengths[mine] = columns.starts.take(own + 1) - starts[mine]
            purged[mine] = columns.purged.take(own)
        return Spans(numbers, streams, starts, lengths, purged)

    def between(self, stream: int, starts: ArrayLike, stops: ArrayLike) -> tuple[Spans, I64]:
        """Every span that overlaps [start, stop) of the stream, range by range, and which range each is of."""
        lows, highs = np.broadcast_arrays(np.asarray(starts, np.int64), np.asarray(stops, np.int64))
        lows, highs = lows.ravel(), highs.ravel()
        columns = self._stream(stream)
        first = np.maximum(columns.starts.search(lows, "right") - 1, 0)
        end = np.minimum(columns.starts.search(highs, "left"), columns.count)
        counts = np.where(lows < highs, np.maximum(end - first, 0), 0)
        ranges = np.repeat(np.arange(len(lows)), counts)
        places = np.arange(len(ranges)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return self._read(np.full(len(places), stream, np.int64), places), ranges
