"""Registers the training runs that read a data run: ``consumers.jsonl``, one line per start.

A purge must know which runs have read a document, and it starts from the data run. Only rank 0 writes, once a line of
the ledger has opened the attempt and before a token is read. The line goes in with one append: trainers of several runs
may start at once, and one that dies in the middle leaves a torn line, which is ignored. On NFS, ``O_APPEND`` is not
atomic between machines: of two that start in the same moment, one line may be lost or torn.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quern import storage
from quern.errors import QuernError

__all__ = ["CONSUMERS_FILE", "Consumer", "announce", "read_consumers"]

CONSUMERS_FILE = "consumers.jsonl"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Consumer:
    """A start of a training run that reads from a data run."""

    time: str
    """ISO 8601, UTC."""
    train_run: str
    """Absolute path, on the machine that trained."""
    order: str
    """Hash of the order it reads."""
    identities: tuple[str, ...]
    """Of the sources it opened, ``<run id>/<source>/<since>``."""


def announce(train_run: str, order: str, paths: Mapping[str, str]) -> None:
    """Register ``train_run`` in every data run that it reads; a failure is logged.

    ``paths``: identity of a source → its folder ``RUN/tokens/<source>``.
    """
    runs: dict[str, list[str]] = {}
    for identity, path in paths.items():
        runs.setdefault(os.path.dirname(os.path.dirname(os.path.abspath(path))), []).append(identity)
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    for run, identities in runs.items():
        line = {"time": time, "train_run": os.path.abspath(train_run), "order": order, "identities": identities}
        file = os.path.join(run, CONSUMERS_FILE)
        try:
            _append(file, json.dumps(line).encode() + b"\n")
        except OSError as error:
            log.warning(
                "%s: cannot be written (%s); the data run does not know that %s reads from it",
                file, error.strerror or error, train_run,
            )  # fmt: skip


def read_consumers(run: str) -> list[Consumer]:
    """The starts that ``consumers.jsonl`` of the data run tells of, oldest first; lines that are not whole are none.

    Raises:
        QuernError: the file is there and cannot be read.
    """
    path = os.path.join(run, CONSUMERS_FILE)
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise QuernError(f"{path}: cannot be read ({error.strerror})") from None
    return list(_consumers(lines))


def _consumers(lines: Iterable[bytes]) -> Iterable[Consumer]:
    for line in lines:
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict):
            continue
        time, train_run, order, identities = (row.get(name) for name in ("time", "train_run", "order", "identities"))
        if not (isinstance(time, str) and isinstance(train_run, str) and isinstance(order, str)):
            continue
        if any("\ud800" <= character <= "\udfff" for character in train_run):
            continue  # half of a character: no path that was written here
        if isinstance(identities, list) and all(isinstance(identity, str) for identity in identities):
            yield Consumer(time, train_run, order, tuple(identities))


def _append(path: str, line: bytes) -> None:
    """Add a line with one write, synced; a torn line before it stays one of its own."""
    descriptor = storage.open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = b"\n" + line if torn else line
        if os.write(descriptor, data) != len(data):
            raise OSError(None, "the disk took only a part of the line")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
