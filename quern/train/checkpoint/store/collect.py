"""Collects a checkpoint in one folder, each file from the first location that has it complete.

Places are the checkpoint's own folder, the folders of nodes that ``places.json`` names
(:mod:`quern.train.checkpoint.format.file_locations`) as far as this machine has them, and the run's store. Every file
is hashed while it streams: bytes with another SHA-256 than the manifest's never count. Memory is bounded by some MiB.
Imports no torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quern import storage
from quern.errors import InputError, QuernError
from quern.remote.retry import StoreError
from quern.train.checkpoint.format.file_locations import Place, in_order, read_places
from quern.train.checkpoint.format.folder import HashedFile, check_free, new_folder, write_file
from quern.train.checkpoint.format.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    check_file,
    checkpoint_name,
    step_of,
)
from quern.train.checkpoint.store.sources import Source, find_source

__all__ = ["Collected", "NotWholeError", "Origin", "check_target", "collect"]

Tier = Literal["checkpoint", "node", "store"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Origin:
    """The origin of a file."""

    name: str
    size: int
    """Bytes."""
    tier: Tier
    path: str
    """Of the file, or its address in the store."""
    host: str | None = None
    """The node whose disk it was on, by name."""


@dataclass(frozen=True)
class Collected:
    """The result of :func:`collect`."""

    source: str
    folder: str
    step: int
    files: tuple[Origin, ...]
    """In the order of their names; the manifest besides."""
    notes: tuple[str, ...]
    """What was damaged, out of reach or passed over."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self) | {"bytes": sum(origin.size for origin in self.files)}


class NotWholeError(QuernError):
    """Some files of a checkpoint have no complete copy."""

    def __init__(self, checkpoint: str, missing: Mapping[str, tuple[str, ...]], count: int) -> None:
        self.missing = missing
        """By file: what each place said."""
        name, said = next(iter(missing.items()))
        super().__init__(
            f"{checkpoint}: {len(missing)} of {count} files are nowhere whole, nothing was written; "
            f"{name}: {'; '.join(said)}"
        )


def collect(source: str, out: str, *, step: int | None = None) -> Collected:
    """Write the checkpoint at ``source`` to the folder ``out``, whole or not at all.

    ``source``: a checkpoint; a training run; a store's address, or that of a checkpoint in it. Of a run and of a store
    the newest checkpoint is taken that is whole and, as far as there is a ledger to tell, of the branch the run is on;
    or that of ``step``. In a store the newest is the one that was saved last.

    Raises:
        InputError: there is no such checkpoint, or ``out`` is taken.
        NotWholeError: a file is nowhere whole.
        QuernError: ``out`` cannot be written.
    """
    out = check_target(out)
    found = find_source(source, step)
    passed: list[str] = []
    failure: NotWholeError | None = None
    for number, manifest in found.candidates(passed):
        folder = found.folders.get(number)
        check_target(out, number, folder)
        gathering = _Gathering(found, number, folder, manifest)
        try:
            files = gathering.write(out)
        except NotWholeError as error:
            if found.step is not None or (found.store and found.store.trouble):
                raise
            failure = failure or error
            passed.append(f"passed over: {error}")
        else:
            notes = [*passed, *gathering.notes]
            if found.store and found.store.trouble and found.store.trouble not in notes:
                notes.append(found.store.trouble)
            return Collected(source, out, number, files, tuple(notes))
    if failure is not None:
        raise failure
    raise QuernError(f"{source}: no checkpoint can be taken; {'; '.join(passed) or 'there is none'}")


def check_target(out: str, step: int | None = None, source: str | None = None) -> str:
    """The absolute path of the new checkpoint ``out``. Refuses one that is not on a file system, that is taken, that
    bears the name of another step than ``step``, or that lies in the checkpoint ``source``."""
    if not storage.is_local(out):
        raise InputError(f"{out}: expected a folder on a file system")
    out = os.path.abspath(out)
    check_free(out)
    if source is not None and os.path.realpath(out).startswith(os.path.join(os.path.realpath(source), "")):
        raise InputError(f"{out}: lies in the checkpoint that is read; expected a path outside")
    name = os.path.basename(out)
    if step is not None and step_of(name) is not None and name != checkpoint_name(step):
        raise InputError(f"{out}: is the name of another step; expected {checkpoint_name(step)}, or another name")
    return out


class _UnusableError(Exception):
    """Why a file cannot be taken from somewhere."""


class _Gathering:
    """The files of one checkpoint, and where they may be."""

    def __init__(self, found: Source, step: int, folder: str | None, manifest: Manifest) -> None:
        self.step, self.folder, self.manifest, self.store = step, folder, manifest, found.store
        self.label = folder or f"{found.name}: {checkpoint_name(step)}"
        self.notes: list[str] = []
        self._asked = False
        self._in_store: Manifest | None = None
        self.places: tuple[Place, ...] = ()
        if folder is not None:
            try:
                self.places = read_places(folder) or ()
            except InputError as error:
                self.notes.append(str(error))

    def write(self, out: str) -> tuple[Origin, ...]:
        """Write the checkpoint to ``out``; nothing is read before every file has been seen somewhere."""
        files = self.manifest.files
        seen = {name: self._look(name, record) for name, record in sorted(files.items())}
        self._check(seen)
        origins = []
        try:
            with new_folder(out) as staged:
                needed, free = sum(record.size for record in files.values()), shutil.disk_usage(staged).free
                if needed > free:
                    raise QuernError(f"{out}: {needed} bytes do not fit on the disk, which has {free} left")
                for name, (origins_seen, said) in seen.items():
                    origins.append(self._take(name, files[name], origins_seen, said, staged))
                write_file(os.path.join(staged, MANIFEST_FILE), self.manifest.to_bytes())
        except OSError as error:
            raise QuernError(f"{out}: not written: {error.strerror or error}") from error
        return tuple(origins)

    def _check(self, seen: Mapping[str, tuple[list[Origin], list[str]]]) -> None:
        missing = {name: tuple(said) for name, (origins, said) in seen.items() if not origins}
        if missing:
            raise NotWholeError(self.label, missing, len(seen))

    def _look(self, name: str, record: FileRecord) -> tuple[list[Origin], list[str]]:
        """Where a file of this name and size is, and what the other places say."""
        origins, said = [], []
        if self.folder is not None:
            if problem := check_file(self.folder, name, record, hashes=False):
                said.append(str(problem))
            else:
                origins.append(Origin(name, record.size, "checkpoint", os.path.join(self.folder, name)))
        for place in in_order(self.places, name):
            if not os.path.isdir(place.folder):
                if name in place.files:
                    said.append(f"not on this machine (node {place.host}, {place.folder})")
            elif problem := check_file(place.folder, name, record, hashes=False):
                said += [str(problem)] if name in place.files or problem.what != "missing" else []
            else:
                path = os.path.join(place.folder, name)
                origins.append(Origin(name, record.size, "node", path, place.host))
        if not origins:
            origins += self._look_in_store(name, record, said)
        return origins, said

    def _look_in_store(self, name: str, record: FileRecord, said: list[str]) -> list[Origin]:
        if self.store is None:
            said.append("the run has no store that can be asked")
            return []
        address = self.store.store.address(self.step, name)
        try:
            known = self._stored()
            there = known is not None and known.files.get(name) == record
            if there or self.store.ask(lambda store: store.has(self.step, name, record)):
                return [Origin(name, record.size, "store", address)]
            said.append(f"{address}: not there")
        except StoreError as error:
            said.append(str(error))
        return []

    def _stored(self) -> Manifest | None:
        """The store's manifest of the step; None where there is none, or none yet: then each file is asked for."""
        if not self._asked and self.store is not None:
            with suppress(InputError):
                self._in_store = self.store.ask(lambda store: store.manifest(self.step))
            self._asked = True
        return self._in_store

    def _take(self, name: str, record: FileRecord, origins: list[Origin], said: list[str], staged: str) -> Origin:
        waiting = list(origins)
        while waiting:
            origin = waiting.pop(0)
            try:
                self._bring(origin, record, staged)
            except (StoreError, _UnusableError) as error:
                said.append(str(error))
                self.notes.append(str(error))
            else:
                return origin
            if not waiting and origin.tier != "store":
                waiting = self._look_in_store(name, record, said)
        raise NotWholeError(self.label, {name: tuple(said)}, len(self.manifest.files))

    def _bring(self, origin: Origin, record: FileRecord, staged: str) -> None:
        if origin.tier == "store":
            assert self.store is not None
            self.store.ask(lambda store: store.fetch(self.step, origin.name, record, staged))
        else:
            _copy(origin.path, os.path.join(staged, origin.name), record)


def _copy(source: str, target: str, record: FileRecord) -> None:
    """Copy and sync a file.

    Raises:
        _UnusableError: it cannot be read, or is not what ``record`` says; there is no ``target`` then.
    """
    try:
        with HashedFile(target) as file:
            for chunk in _chunks(source):
                file.write(chunk)
                if file.tell() > record.size:
                    break
            found = file.finish()
        if found != record:
            raise _UnusableError(f"{source}: expected SHA-256 {record.sha256}, has {found.sha256}")
    except BaseException:
        with suppress(OSError):
            os.unlink(target)
        raise


def _chunks(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        raise _UnusableError(f"{path}: cannot be read ({error.strerror or error})") from None
