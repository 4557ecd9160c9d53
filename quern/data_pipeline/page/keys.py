"""Look-ups in sorted arrays of keys, most of them of 16 bytes: doc_ids and hashes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["KEY", "bytes_of", "column_of", "contains", "key_set", "keys_of", "places"]

#: A 16-byte key as NumPy sorts it; equal only where all 16 bytes are.
KEY = np.dtype("S16")


def bytes_of(column: pa.Array) -> memoryview:
    """The values of a column of 16-byte keys without nulls, one after the other."""
    if not len(column):
        return memoryview(b"")
    return memoryview(column.buffers()[1])[16 * column.offset : 16 * (column.offset + len(column))]


def column_of(keys: bytes) -> pa.Array:
    """A column of 16-byte keys, which are given one after the other."""
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(keys) // 16, [None, pa.py_buffer(keys)])


def keys_of(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """S16[n] of a column of 16-byte keys; its nulls are left out."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.empty(0, KEY)]
    for chunk in chunks:
        own = chunk.drop_null() if chunk.null_count else chunk
        parts.append(np.frombuffer(bytes_of(own), KEY))
    return np.concatenate(parts)


def key_set(parts: Iterable[np.ndarray]) -> np.ndarray:
    """S16[m]: all keys once, sorted."""
    return np.unique(np.concatenate([np.empty(0, KEY), *parts]))


def places(keys: np.ndarray, wanted: np.ndarray) -> NDArray[np.int64]:
    """int64[n]: where each wanted key stands in the sorted ``keys``; −1 where it is not there."""
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, at, -1)


def contains(keys: np.ndarray, wanted: np.ndarray) -> NDArray[np.bool_]:
    """bool[n]: which wanted keys stand in the sorted ``keys``."""
    return places(keys, wanted) >= 0
