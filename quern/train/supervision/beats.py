"""Tells the launcher in which step each rank of this machine is, by 8 bytes of a file that both have mapped.

Imports no torch.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

__all__ = ["environments_with", "read", "telling"]

_FILE = "QUERN_BEATS"
"""In a rank's environment: the file's path; ``LOCAL_RANK`` says which 8 bytes are its own."""

_STEP = struct.Struct("<q")
_NONE = -1


def environments_with(path: str, environments: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Begin the file anew at ``path``, and name it in the environment of each rank."""
    with open(path, "wb") as file:
        file.write(_STEP.pack(_NONE) * len(environments))
    return [{**environment, _FILE: path} for environment in environments]


def read(descriptor: int) -> list[int | None]:
    """Of each rank the step (from 0) that it has begun last; None: it has not begun one. ``descriptor``: of the file,
    whose name may be gone by then: writes to a mapping do not look new to what tidies temporary folders."""
    size = os.fstat(descriptor).st_size
    return [None if step == _NONE else step for (step,) in _STEP.iter_unpack(os.pread(descriptor, size, 0))]


@contextmanager
def telling() -> Iterator[Callable[[int], None]]:
    """The function by which this rank says that it begins a step. It does nothing without a launcher that listens."""
    path = os.environ.get(_FILE)
    if path is None:
        yield lambda step: None
        return
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as whole:
        place = _STEP.size * int(os.environ.get("LOCAL_RANK", "0"))
        yield lambda step: _STEP.pack_into(whole, place, step)
