"""Tells the launcher in which step each rank of this machine is, by 16 bytes of a file that both have mapped.

Imports no torch.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

__all__ = ["environments_with", "first_ended", "read", "telling"]

_FILE = "QUERN_BEATS"
"""In a rank's environment: the file's path; ``LOCAL_RANK`` says which 16 bytes are its own."""

_STEPS = struct.Struct("<2q")
"""The first step that it has begun, and the last."""
_NONE = -1


def environments_with(path: str, environments: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Begin the file anew at ``path``, and name it in the environment of each rank."""
    with open(path, "wb") as file:
        file.write(_STEPS.pack(_NONE, _NONE) * len(environments))
    return [{**environment, _FILE: path} for environment in environments]


def read(descriptor: int) -> list[int | None]:
    """Of each rank the step (from 0) that it has begun last; None: it has not begun one. ``descriptor``: of the file,
    whose name may be gone by then: writes to a mapping do not look new to what tidies temporary folders."""
    return [None if last == _NONE else last for _, last in _read(descriptor)]


def first_ended(descriptor: int) -> bool:
    """Whether every rank has begun a second step."""
    return all(first != last for first, last in _read(descriptor))


def _read(descriptor: int) -> Iterator[tuple[int, int]]:
    return _STEPS.iter_unpack(os.pread(descriptor, os.fstat(descriptor).st_size, 0))


@contextmanager
def telling() -> Iterator[Callable[[int], None]]:
    """The function by which this rank says that it begins a step. It does nothing without a launcher that listens."""
    path = os.environ.get(_FILE)
    if path is None:
        yield lambda step: None
        return
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as whole:
        place, first = _STEPS.size * int(os.environ.get("LOCAL_RANK", "0")), _NONE

        def tell(step: int) -> None:
            nonlocal first
            first = step if first == _NONE else first
            _STEPS.pack_into(whole, place, first, step)

        yield tell
