"""A memory-mapped column: a raw little-endian array with a checksum for every 4 KiB.

File: the items; one XXH3-64 a block; for a sorted column the first item of each block (*fences*); a footer. A look-up
reads the fences and the one block they point to, and nothing is answered from a block whose checksum is wrong.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from typing import Any, Literal, Self

import numpy as np
import xxhash
from numpy.typing import ArrayLike, DTypeLike, NDArray

from quern.errors import QuernError

__all__ = ["BLOCK_BYTES", "I64", "Bools", "Column", "ColumnWriter", "DamagedIndexError", "not_opened", "write_column"]

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

BLOCK_BYTES = 1 << 12
_MAGIC = b"quernco1"
#: Blocks that a whole check maps at once: 16 MiB.
_MAPPED_BLOCKS = 1 << 12
#: Magic, bytes an item, whether there are fences, items, digest of all before it but the items.
_FOOTER = struct.Struct("<8sIIQQ")


class DamagedIndexError(QuernError):
    """A file of the index is missing or differs from what was written."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")


def not_opened(path: str, error: OSError) -> QuernError:
    """The error for a file of the index that cannot be opened; a missing one is damage."""
    if isinstance(error, FileNotFoundError):
        return DamagedIndexError(path, "is missing")
    advice = "; allow more (ulimit -n)" if error.errno == errno.EMFILE else ""
    return QuernError(f"{path}: cannot be opened ({error.strerror or error}{advice})")


def _digest(path: str, data: memoryview) -> int:
    """XXH3-64 of the data and of the names of file and folder: a column put in another's place is not taken for it."""
    state = xxhash.xxh3_64("/".join(path.split("/")[-2:]).encode())
    state.update(data)
    return state.intdigest()


class ColumnWriter:
    """Writes a column piece by piece. ``fences``: the items ascend."""

    def __init__(self, path: str, dtype: DTypeLike, *, fences: bool = False) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        if BLOCK_BYTES % self.dtype.itemsize:
            raise ValueError(f"expected items that divide {BLOCK_BYTES} bytes, got {self.dtype}")
        self.count = 0
        self._file = open(path, "xb")  # noqa: SIM115 (closed by close)
        self._fenced = fences
        self._sums: list[int] = []
        self._fences: list[bytes] = []
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        self._file.close()

    def append(self, items: NDArray[Any] | bytes) -> None:
        """Add items: an array that is of the dtype or fits it, or their bytes."""
        data = items if isinstance(items, bytes) else np.ascontiguousarray(items, self.dtype).tobytes()
        self.count += len(data) // self.dtype.itemsize
        data = self._rest + data
        whole = len(data) - len(data) % BLOCK_BYTES
        self._write(memoryview(data)[:whole])
        self._rest = data[whole:]

    def _write(self, data: memoryview) -> None:
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            self._sums.append(xxhash.xxh3_64_intdigest(block))
            if self._fenced:
                self._fences.append(bytes(block[: self.dtype.itemsize]))
        self._file.write(data)

    def close(self) -> None:
        """Write the remaining items, the checksums and the footer."""
        self._write(memoryview(self._rest))
        guide = np.array(self._sums, "<u8").tobytes() + b"".join(self._fences)
        head = _FOOTER.pack(_MAGIC, self.dtype.itemsize, self._fenced, self.count, 0)[:-8]
        self._file.write(guide + head + struct.pack("<Q", _digest(self.path, memoryview(guide + head))))
        self._file.close()


def write_column(path: str, dtype: DTypeLike, items: NDArray[Any], *, fences: bool = False) -> None:
    """Write a whole column at once."""
    with ColumnWriter(path, dtype, fences=fences) as writer:
        writer.append(items)


class Column:
    """A column for reading, of ``len(column)`` items.

    Raises (here and in every reading method):
        DamagedIndexError: the file is missing or cut short, or a block that is read is not what was written.
    """

    def __init__(self, path: str, dtype: DTypeLike) -> None:
        self.path = path
        dtype = np.dtype(dtype)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _FOOTER.size:
                    raise DamagedIndexError(path, f"has {size} bytes, expected more")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise not_opened(path, error) from None
        magic, itemsize, fenced, count, digest = _FOOTER.unpack_from(self._map, size - _FOOTER.size)
        blocks = -(-count * itemsize // BLOCK_BYTES)
        end = count * itemsize
        if (
            magic != _MAGIC
            or itemsize != dtype.itemsize
            or size != end + blocks * (8 + itemsize * bool(fenced)) + _FOOTER.size
            or _digest(path, memoryview(self._map)[end : size - 8]) != digest
        ):
            raise DamagedIndexError(path, "is damaged: its checksum is wrong")
        self.items: NDArray[Any] = np.frombuffer(self._map, dtype, count)
        """All items; only those of checked blocks may be read."""
        self._sums = np.frombuffer(self._map, "<u8", blocks, end)
        self._fences = np.frombuffer(self._map, dtype, blocks, end + 8 * blocks) if fenced else None
        self._checked = np.zeros(blocks, bool)
        self._per_block = BLOCK_BYTES // itemsize

    def __len__(self) -> int:
        return len(self.items)

    def sized(self, count: int) -> Self:
        """This column, which must have so many items."""
        if len(self) != count:
            raise DamagedIndexError(self.path, f"has {len(self)} items, expected {count}")
        return self

    def check(self) -> None:
        """Compare every checksum. What was mapped for it is given back on the way."""
        for first in range(0, len(self._sums), _MAPPED_BLOCKS):
            self._check(np.arange(first, min(first + _MAPPED_BLOCKS, len(self._sums))))
            self.release()

    def release(self) -> None:
        """Take the pages that were read out of this process's memory; they stay in the page cache, and a block of them
        that was compared with its checksum is not compared again."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _check(self, blocks: I64) -> None:
        for block in blocks[~self._checked[blocks]].tolist():
            end = min((block + 1) * BLOCK_BYTES, self.items.nbytes)
            with memoryview(self._map) as view:
                if xxhash.xxh3_64_intdigest(view[block * BLOCK_BYTES : end]) != self._sums[block]:
                    raise DamagedIndexError(self.path, f"is damaged: block {block} has a wrong checksum")
            self._checked[block] = True

    def slice(self, start: int, stop: int) -> NDArray[Any]:
        """Items [start, stop), as a view."""
        first, last = start // self._per_block, (stop - 1) // self._per_block
        if start < stop and not (first == last and self._checked[first]):
            self._check(np.arange(first, last + 1))
        return self.items[start:stop]

    def take(self, indices: I64) -> NDArray[Any]:
        """The items at ``indices``."""
        blocks = indices // self._per_block
        if len(blocks) and not self._checked[blocks].all():
            self._check(np.unique(blocks))
        return self.items[indices]

    def search(self, values: ArrayLike, side: Literal["left", "right"] = "left") -> I64:
        """``np.searchsorted`` of a sorted column, reading one block a value at most."""
        assert self._fences is not None, self.path
        values = np.asarray(values, self.items.dtype)
        if not len(self.items):
            return np.zeros(values.shape, np.int64)
        block = np.maximum(np.searchsorted(self._fences, values, side) - 1, 0)
        self._check(np.unique(block))
        low = block * self._per_block
        high = np.minimum(low + self._per_block, len(self.items))
        last = len(self.items) - 1
        for _ in range(self._per_block.bit_length()):
            middle = np.minimum((low + high) >> 1, last)
            found = self.items[middle]
            before = (found < values if side == "left" else found <= values) & (low < high)
            low, high = np.where(before, middle + 1, low), np.where(before, high, np.minimum(middle, high))
        return low

    def range(self, value: Any) -> tuple[int, int]:
        """Where the items of a sorted column equal ``value``: [start, stop)."""
        return int(self.search([value])[0]), int(self.search([value], "right")[0])
