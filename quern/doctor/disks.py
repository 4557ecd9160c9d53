"""Measures disks, memory and an object store with small, bounded files that are gone afterwards, also of a process that
is killed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from quern import storage
from quern.errors import QuernError, one_line

__all__ = ["host_speeds", "measure_disk", "try_store"]

_WRITE_BYTES = 32 << 20
_CHUNK = 4 << 20
_STORE_BYTES = 1 << 20


def _nearest(path: str) -> str:
    """The nearest folder that is there, of a path that may not be."""
    above = os.path.abspath(path)
    while not os.path.isdir(above) and above != os.path.dirname(above):
        above = os.path.dirname(above)
    return above


def measure_disk(path: str, repeats: int) -> dict[str, Any]:
    """``speeds`` (bytes a second of a written and synced file; syncs of 4 KiB a second), ``disks`` (size and free),
    ``problems``. Three files at most, each of 32 MiB and without a name, so that none can stay."""
    folder = _nearest(path)
    try:
        usage = shutil.disk_usage(folder)
        disk = {"path": path, "total": usage.total, "free": usage.free}
        if usage.free < 4 * _WRITE_BYTES:
            return {"disks": [disk]}
        writes, syncs, chunk = [], [], os.urandom(_CHUNK)  # a file system may compress
        for _ in range(min(3, repeats)):
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                writes.append(_WRITE_BYTES / _seconds(partial(_write, file.fileno(), chunk)))
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            syncs = [1 / _seconds(lambda: _sync(file.fileno())) for _ in range(repeats)]
    except OSError as error:
        return {"problems": [{"code": "disk", "text": f"{path}: {error.strerror or error}"}]}
    return {"disks": [disk], "speeds": {f"disk write {path}": writes, f"disk sync {path}": syncs}}


def _write(file: int, chunk: bytes) -> None:
    for _ in range(_WRITE_BYTES // _CHUNK):
        os.write(file, chunk)
    os.fsync(file)


def _sync(file: int) -> None:
    os.pwrite(file, os.urandom(4096), 0)
    os.fsync(file)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(time.perf_counter() - began, 1e-9)


def try_store(folder: str) -> dict[str, Any]:
    """Write, read and remove one object of 1 MiB below ``folder``, a path or a store's URL: ``shown``, ``problems``."""
    path, data = storage.join(folder, f"quern-doctor-{uuid.uuid4().hex}"), os.urandom(_STORE_BYTES)
    marks, step = [time.perf_counter()], "write"
    try:
        storage.publish_bytes(path, data)
        marks, step = [*marks, time.perf_counter()], "read"
        if storage.read_bytes(path) != data:
            raise QuernError("other bytes than were written")
        marks, step = [*marks, time.perf_counter()], "delete"
        storage.remove(path)
        marks.append(time.perf_counter())
        if storage.is_file(path):
            raise QuernError("it is still there")
    except Exception as error:  # of any store's library
        with suppress(Exception):
            storage.remove(path)
        return {"problems": [{"code": "store", "text": f"{folder}: {step}: {one_line(error)}"}]}
    took = zip(("write", "read", "delete"), pairwise(marks), strict=True)
    return {"shown": {f"store {folder}": ", ".join(f"{name} {(b - a) * 1e3:.0f} ms" for name, (a, b) in took)}}


def host_speeds(repeats: int) -> dict[str, Any]:
    """Copies inside the host's memory, bytes a second read and written; SHA-256 by one core, bytes a second."""
    source, text = np.ones(64 << 20, np.uint8), bytes(8 << 20)
    target = np.empty_like(source)
    np.copyto(target, source)
    copies = [2 * source.nbytes / _seconds(lambda: np.copyto(target, source)) for _ in range(repeats)]
    hashes = [len(text) / _seconds(lambda: hashlib.sha256(text).digest()) for _ in range(repeats)]
    return {"speeds": {"memory copy": copies, "cpu sha256": hashes}}
