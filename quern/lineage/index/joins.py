"""Joins more rows than fit in memory: partitions them by key range, then joins one bucket at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quern.lineage.index.columns import I64, ColumnWriter
from quern.lineage.index.hashes import halves, sort_order
from quern.lineage.index.segments import Segment

__all__ = ["BUCKET_ROWS", "Buckets", "Numbers", "Pairs"]

BUCKET_ROWS = 1 << 21
"""Rows joined or sorted at once."""

_WANTED = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])
_FOUND = np.dtype([("row", "<i8"), ("number", "<i8")])
_PAIR = np.dtype([("number", "<i8"), ("value", "<i8")])


class Buckets:
    """Records partitioned into ``count`` buckets: files in ``folder``, or memory if there is only one."""

    def __init__(self, folder: str, name: str, dtype: DTypeLike, count: int) -> None:
        self.count = count
        self._dtype = np.dtype(dtype)
        self._path = os.path.join(folder, name)
        self._parts: list[NDArray[Any]] = []

    def add(self, records: NDArray[Any], bucket_of: I64) -> None:
        """Add records, each to its bucket."""
        if self.count == 1:
            self._parts.append(records)
            return
        order = np.argsort(bucket_of, kind="stable")
        edges = np.searchsorted(bucket_of[order], np.arange(self.count + 1))
        for bucket in np.flatnonzero(np.diff(edges)).tolist():
            with open(self._file(bucket), "ab") as file:
                file.write(records[order[edges[bucket] : edges[bucket + 1]]].tobytes())

    def take(self, bucket: int) -> NDArray[Any]:
        """Remove and return the records of a bucket in the order of arrival."""
        if self.count == 1:
            parts, self._parts = self._parts, []
            return np.concatenate([np.empty(0, self._dtype), *parts])
        path = self._file(bucket)
        if not os.path.exists(path):
            return np.empty(0, self._dtype)
        records = np.fromfile(path, self._dtype)
        os.unlink(path)
        return records

    def _file(self, bucket: int) -> str:
        return f"{self._path}.{bucket}"


def _num_buckets(rows: int) -> int:
    return max(1, -(-rows // BUCKET_ROWS))


class Numbers:
    """Which documents ``rows`` doc_ids are: ids are added in their order, numbers come out in the same."""

    def __init__(self, folder: str, name: str, segments: Sequence[Segment], rows: int) -> None:
        count = _num_buckets(rows)
        self._segments = segments
        self._rows = 0
        self._width = -(-max(rows, 1) // count)
        self._wanted = Buckets(folder, f"{name}.wanted", _WANTED, count)
        self._found = Buckets(folder, f"{name}.found", _FOUND, count)

    def add(self, doc_ids: bytes | memoryview) -> None:
        """Add doc_ids, 16 bytes each."""
        high, low = halves(doc_ids)
        wanted = np.empty(len(high), _WANTED)
        wanted["high"], wanted["low"] = high, low
        wanted["row"] = np.arange(self._rows, self._rows + len(high))
        self._rows += len(high)
        self._wanted.add(wanted, ((high >> np.uint64(32)) * np.uint64(self._wanted.count) >> np.uint64(32)).view("<i8"))

    def chunks(self) -> Iterator[I64]:
        """int64 arrays, one number for each id in the order of the ids: −1 if unknown, −2 if it stands for several."""
        for bucket in range(self._wanted.count):
            wanted = self._wanted.take(bucket)
            wanted = wanted[sort_order(wanted["high"], wanted["low"])]
            found = np.empty(len(wanted), _FOUND)
            found["row"], found["number"] = wanted["row"], self._resolve(wanted)
            self._found.add(found, found["row"] // self._width)
        for bucket in range(self._found.count):
            found = self._found.take(bucket)
            if len(found):
                numbers = np.empty(len(found), np.int64)
                numbers[found["row"] - bucket * self._width] = found["number"]
                yield numbers

    def _resolve(self, wanted: NDArray[Any]) -> I64:
        numbers = np.full(len(wanted), -1, np.int64)
        if len(wanted):
            high, low = np.ascontiguousarray(wanted["high"]), np.ascontiguousarray(wanted["low"])
            for segment in self._segments:
                own = segment.by_doc.resolve(high, low, int(high[0]), int(high[-1]))
                numbers[(numbers >= 0) & (own != -1) | (own == -2)] = -2
                new = (numbers == -1) & (own >= 0)
                numbers[new] = own[new] + segment.base
                segment.by_doc.release()  # no other bucket looks there again
        return numbers


class Pairs:
    """Pairs (document, value) on their way to two sorted columns; about ``rows`` of them."""

    def __init__(self, folder: str, name: str, rows: int, num_documents: int) -> None:
        count = _num_buckets(rows)
        self._width = -(-max(num_documents, 1) // count)
        self._buckets = Buckets(folder, f"{name}.pairs", _PAIR, count)

    def add(self, numbers: I64, values: I64) -> None:
        """Add pairs."""
        records = np.empty(len(numbers), _PAIR)
        records["number"], records["value"] = numbers, values
        self._buckets.add(records, numbers // self._width)

    def write(self, path: str) -> None:
        """Write ``<path>.numbers`` (sorted, with fences) and ``<path>.values`` (sorted for each number)."""
        with (
            ColumnWriter(f"{path}.numbers", "<i8", fences=True) as numbers,
            ColumnWriter(f"{path}.values", "<i8") as values,
        ):
            for bucket in range(self._buckets.count):
                records = self._buckets.take(bucket)
                records = records[sort_order(records["number"], records["value"])]
                numbers.append(records["number"])
                values.append(records["value"])
