"""Maps 128-bit hashes to documents of a segment by sorted columns: two for the hash, one for the number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.lineage.index.columns import I64, Column, write_column

__all__ = ["U64", "Hashes", "halves", "sort_order", "write_hashes"]

U64 = NDArray[np.uint64]


def halves(data: bytes | memoryview) -> tuple[U64, U64]:
    """uint64[n] each: the first and the second eight bytes of 16-byte hashes, as numbers that sort like the bytes."""
    words = np.frombuffer(data, ">u8").astype(np.uint64)
    return words[0::2], words[1::2]


def sort_order(*keys: NDArray[Any]) -> I64:
    """int64[n] that sorts by the first key, then the next ones: ``np.lexsort`` the other way round, and faster where
    the first key seldom repeats."""
    order = np.argsort(keys[0])
    ordered = keys[0][order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    tied = np.union1d(same, same + 1)
    rows = np.sort(order[tied])
    order[tied] = rows[np.lexsort([key[rows] for key in reversed(keys)])]
    return order


def write_hashes(path: str, high: U64, low: U64, numbers: NDArray[np.uint32]) -> None:
    """Write ``<path>.high``, ``.low`` and ``.numbers``, sorted by hash, then number."""
    order = sort_order(high, low, numbers)
    write_column(f"{path}.high", "<u8", high[order], fences=True)
    write_column(f"{path}.low", "<u8", low[order])
    write_column(f"{path}.numbers", "<u4", numbers[order])


class Hashes:
    """The columns that :func:`write_hashes` wrote."""

    def __init__(self, path: str) -> None:
        self.high = Column(f"{path}.high", "<u8")
        self._low = Column(f"{path}.low", "<u8").sized(len(self.high))
        self._numbers = Column(f"{path}.numbers", "<u4").sized(len(self.high))

    def check(self) -> None:
        """Compare every checksum."""
        for column in (self.high, self._low, self._numbers):
            column.check()

    def release(self) -> None:
        """Take what was read out of this process's memory."""
        for column in (self.high, self._low, self._numbers):
            column.release()

    def find(self, value: bytes) -> I64:
        """The documents with this hash, ascending."""
        high, low = (int(half[0]) for half in halves(value))
        start, stop = self.high.range(high)
        same = self._low.slice(start, stop) == np.uint64(low)
        return self._numbers.slice(start, stop)[same].astype(np.int64)

    def find_all(self, values: bytes | memoryview) -> I64:
        """The documents that have one of these hashes, 16 bytes each; ascending for each hash."""
        high, low = halves(values)
        starts, stops = self.high.search(high), self.high.search(high, "right")
        counts = stops - starts
        before = np.cumsum(counts) - counts
        rows = np.arange(counts.sum()) + np.repeat(starts - before, counts)
        same = self._low.take(rows) == np.repeat(low, counts)
        return self._numbers.take(rows[same]).astype(np.int64)

    def resolve(self, high: U64, low: U64, first: int, last: int) -> I64:
        """int64[n]: the document of each hash (sorted, all with first ≤ high ≤ last), or −1; −2 if it has several."""
        found = np.full(len(high), -1, np.int64)
        start, stop = int(self.high.search([first])[0]), int(self.high.search([last], "right")[0])
        if start == stop:
            return found
        own_high, own_low = self.high.slice(start, stop), self._low.slice(start, stop)
        numbers = self._numbers.slice(start, stop)
        runs = np.diff(np.flatnonzero(own_high[1:] != own_high[:-1]), prepend=-1, append=len(own_high) - 1)
        place = np.searchsorted(own_high, high)
        for _ in range(int(runs.max())):  # once, unless first halves repeat
            inside = np.minimum(place, len(own_high) - 1)
            same = (own_high[inside] == high) & (own_low[inside] == low) & (place < len(own_high))
            found[same] = np.where(found[same] == -1, numbers[inside[same]].astype(np.int64), -2)
            place += 1
        return found
