"""Arrays on their way from task to task: files of a scratch folder, on any store.

A *run* is one file of fixed-size records grouped by part, with the parts' offsets at its head: a task writes one run,
whatever the number of parts, and a reader of one part reads only that part of every run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quern import storage

__all__ = ["num_parts", "part_of_key", "read_array", "read_part", "read_parts", "write_array", "write_run"]


def num_parts(records: int, records_per_task: int) -> int:
    """How many tasks share ``records``: a function of the data alone, never of the workers."""
    return max(1, -(-records // records_per_task))


def part_of_key(keys: np.ndarray, parts: int) -> np.ndarray:
    """int64 part of each uniformly distributed uint64 key; equal keys share a part, a part is a range of keys."""
    return ((keys >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int64)


def write_array(path: str, array: np.ndarray) -> None:
    """Publish a one-dimensional array, whole or not at all."""
    with storage.publish(path) as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def read_array(path: str) -> np.ndarray:
    """What :func:`write_array` wrote."""
    with storage.open_read(path) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array


def write_run(path: str, records: np.ndarray, part: np.ndarray, parts: int) -> None:
    """Publish ``records`` (any dtype without objects) grouped by ``part`` (int, 0 ≤ part < parts), in their order."""
    offsets = np.zeros(parts + 1, dtype="<i8")
    np.cumsum(np.bincount(part, minlength=parts), out=offsets[1:])
    if parts > 1:
        records = records[np.argsort(part, kind="stable")]
    with storage.publish(path) as file:
        file.write(offsets.tobytes())
        file.write(np.ascontiguousarray(records).tobytes())


def read_part(path: str, part: int, parts: int, dtype: np.dtype) -> np.ndarray:
    """The records of one part of a run."""
    with storage.open_read(path) as file:
        file.seek(8 * part)
        first, last = np.frombuffer(file.read(16), dtype="<i8").tolist()
        file.seek(8 * (parts + 1) + first * dtype.itemsize)
        return np.frombuffer(file.read((last - first) * dtype.itemsize), dtype=dtype)


def read_parts(paths: Iterable[str], part: int, parts: int, dtype: np.dtype) -> np.ndarray:
    """The records of one part of many runs, in the order of ``paths``."""
    pieces = [read_part(path, part, parts, dtype) for path in paths]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
