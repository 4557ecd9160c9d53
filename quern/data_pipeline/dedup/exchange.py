"""Shuffles records between tasks through files of a scratch folder, on any store.

An *exchange* has a number of buckets. Every writer leaves files of fixed-size records grouped by bucket, with the
buckets' offsets at their head, each of a bounded size: a writer holds one in memory. A reader takes a range of buckets
and reads those parts of all files, and nothing else of them; the driver, which knows only how many records each bucket
has, cuts the ranges so that each fits a task's memory. Of a bucket too large for that (one key that very many records
share) a reader takes a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quern import storage

__all__ = [
    "MAX_BUCKETS",
    "Exchange",
    "Slice",
    "Writer",
    "WrittenFiles",
    "bucket_of_key",
    "bucket_of_rank",
    "cuts",
    "num_buckets",
    "read_records",
    "record_blocks",
    "regrouped",
]

#: Of buckets by key or rank: it keeps heads small, and 16 bits are sorted in linear time.
MAX_BUCKETS = 1 << 14
_OFFSET = np.dtype("<i8")
#: Records of a file that are read at once, where nothing else asks for fewer.
_BLOCK = 1 << 16
#: Ranges a task is given are cut from this many times as many buckets, so that they come out about equal.
_BUCKETS_PER_TASK = 4
#: The least a writer gathers before it leaves a file, however small the tasks.
_LEAST_RECORDS = 64


@dataclass(frozen=True)
class WrittenFiles:
    """The files of one writer."""

    files: int
    counts: np.ndarray
    """int64[buckets]: records."""


@dataclass(frozen=True)
class Exchange:
    """The files of all writers of a stage."""

    folder: str
    files: tuple[int, ...]
    """Files of each writer."""
    counts: np.ndarray
    """int64[buckets]: records."""

    @property
    def records(self) -> int:
        return int(self.counts.sum())

    def slice(self, first: int, last: int) -> Slice:
        """The buckets from ``first`` up to and without ``last``."""
        return Slice(self.folder, self.files, len(self.counts), first, last, int(self.counts[first:last].sum()))

    def slices(self, max_records: int) -> list[Slice]:
        """All records in slices of at most ``max_records`` each, or of one bucket."""
        return [self.slice(first, last) for first, last in cuts(self.counts, max_records)]


def cuts(counts: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Ranges (first, last) of consecutive ``counts`` with a sum of at most ``most``, or of one; none is empty."""
    sums = np.cumsum(counts)
    ranges = []
    first, before = 0, 0
    while first < len(counts) and before < sums[-1]:
        last = max(int(np.searchsorted(sums, before + most, side="right")), first + 1)
        if sums[last - 1] > before:
            ranges.append((first, last))
        first, before = last, int(sums[last - 1])
    return ranges


@dataclass(frozen=True)
class Slice:
    """A range of an exchange's buckets, for one task."""

    folder: str
    files: tuple[int, ...]
    buckets: int
    first: int
    last: int
    records: int

    def read(self, dtype: np.dtype) -> np.ndarray:
        """All records, in the order of the files."""
        records = np.empty(self.records, dtype=dtype)
        done = 0
        for piece in self._pieces(dtype, max(self.records, 1)):
            records[done : done + len(piece)] = piece
            done += len(piece)
        return records

    def blocks(self, dtype: np.dtype, max_records: int) -> Iterator[np.ndarray]:
        """All records in that order, at most ``max_records`` at a time."""
        return regrouped(self._pieces(dtype, max_records), max_records)

    def _pieces(self, dtype: np.dtype, max_records: int) -> Iterator[np.ndarray]:
        if self.records == 0:
            return
        head = _OFFSET.itemsize * (self.buckets + 1)
        for writer, files in enumerate(self.files):
            for number in range(files):
                path = _path(self.folder, writer, number)
                offsets = storage.read_range(path, _OFFSET.itemsize * self.first, _OFFSET.itemsize * (self.last + 1))
                start, end = np.frombuffer(offsets, dtype=_OFFSET)[[0, -1]].tolist()
                for at in range(start, end, max_records):
                    upto = min(at + max_records, end)
                    data = storage.read_range(path, head + at * dtype.itemsize, head + upto * dtype.itemsize)
                    yield np.frombuffer(data, dtype=dtype)


def regrouped(pieces: Iterable[np.ndarray], rows: int) -> Iterator[np.ndarray]:
    """The rows of some pieces in that order, ``rows`` at a time; the last are what is left."""
    held: list[np.ndarray] = []
    room = rows
    for piece in pieces:
        while len(piece) >= room:
            yield _joined([*held, piece[:room]])
            held, piece, room = [], piece[room:], rows
        if len(piece):
            held.append(piece)
            room -= len(piece)
    if held:
        yield _joined(held)


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class Writer:
    """Writes one task's records of an exchange, ``max_records`` a file."""

    def __init__(self, folder: str, index: int, buckets: int, dtype: np.dtype, max_records: int) -> None:
        self._folder, self._index, self._buckets = folder, index, buckets
        size = max(max_records, _LEAST_RECORDS)
        self._records = np.empty(size, dtype=dtype)  # pages that are not written to take no memory
        # Where buckets are shards, groups or ranges there can be more than 16 bits tell apart.
        self._bucket = np.empty(size, dtype=np.uint16 if buckets <= 1 << 16 else np.uint32)
        self._held = self._files = 0
        self._counts = np.zeros(buckets, dtype=np.int64)

    def add(self, records: np.ndarray, bucket: np.ndarray | int) -> None:
        """``records`` with the bucket of each (int, 0 ≤ bucket < buckets), or one for all."""
        done = 0
        while done < len(records):
            take = min(len(records) - done, len(self._records) - self._held)
            into = slice(self._held, self._held + take)
            self._records[into] = records[done : done + take]
            self._bucket[into] = bucket if isinstance(bucket, int) else bucket[done : done + take]
            self._held += take
            done += take
            if self._held == len(self._records):
                self._flush()

    def _flush(self) -> None:
        bucket, records = self._bucket[: self._held], self._records[: self._held]
        counts = np.bincount(bucket, minlength=self._buckets)
        offsets = np.zeros(self._buckets + 1, dtype=_OFFSET)
        np.cumsum(counts, out=offsets[1:])
        if self._buckets > 1:
            records = records[np.argsort(bucket, kind="stable")]
        with storage.publish(_path(self._folder, self._index, self._files)) as file:
            file.write(offsets.tobytes())
            file.write(records.view(np.uint8).data)
        self._counts += counts
        self._files += 1
        self._held = 0

    def close(self) -> WrittenFiles:
        """Write the remaining records."""
        if self._held:
            self._flush()
        return WrittenFiles(self._files, self._counts)


def _path(folder: str, writer: int, number: int) -> str:
    return storage.join(folder, f"{writer:06d}-{number:04d}")


def num_buckets(records: int, max_records: int) -> int:
    """The number of buckets for ``records``; depends on the data alone, never on the workers."""
    if records <= max_records:
        return 1
    return min(_BUCKETS_PER_TASK * -(-records // max_records), MAX_BUCKETS)


def bucket_of_key(keys: np.ndarray, buckets: int) -> np.ndarray:
    """int64 bucket of each uniformly distributed uint64 key; equal keys share one, a bucket is a range of keys."""
    return ((keys >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)).astype(np.int64)


def bucket_of_rank(ranks: np.ndarray, buckets: int) -> np.ndarray:
    """int64 bucket of each rank, neighbours far apart."""
    mixed = ranks.astype(np.uint64)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return bucket_of_key(mixed, buckets)


def read_records(path: str, dtype: np.dtype, start: int, end: int) -> np.ndarray:
    """The records from ``start`` up to and without ``end`` of a file of nothing but records."""
    return np.frombuffer(storage.read_range(path, start * dtype.itemsize, end * dtype.itemsize), dtype=dtype)


def record_blocks(path: str, dtype: np.dtype, count: int, rows: int = _BLOCK) -> Iterator[tuple[int, np.ndarray]]:
    """The first ``count`` records of such a file, at most ``rows`` at a time, each with the place of its first."""
    for start in range(0, count, rows):
        yield start, read_records(path, dtype, start, min(start + rows, count))
