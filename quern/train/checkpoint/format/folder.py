"""Atomic folders: staging names, publish, replace, remove, recovery, and a lock for one writer at a time.

A checkpoint is written in ``.step_00001000.<random>.tmp`` and renamed. When its step already stands (the run was rolled
back past it), the standing folder is first renamed to ``.step_00001000.<random>.replaced``; a crash between the two
renames is undone by :func:`recover`. A removal renames to the staging form before the first file goes. So what bears a
published name in a run's folder is complete, at every instant. On a node's own disk (``checkpoint.local``) it need not
be: there the manifest in the run's folder says what counts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from quern import storage
from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.manifest import FileRecord

__all__ = [
    "FolderLock", "HashedFile", "check_free", "make_staging_folder", "new_folder", "publish_folder", "recover",
    "remove_folder", "staging_path", "write_file",
]  # fmt: skip

_LEFTOVER = re.compile(r"\.(?P<name>step_\d{8,})\.[0-9a-f]{32}\.(?P<kind>tmp|replaced)")


def staging_path(final: str, token: str) -> str:
    """Where the folder ``final`` is written before it is published; ``token`` is 32 hex digits."""
    return os.path.join(os.path.dirname(final), f".{os.path.basename(final)}.{token}.tmp")


def make_staging_folder(final: str) -> str:
    """Make the folder in which ``final`` is written, under a random name; returns the name's token."""
    token = uuid.uuid4().hex
    os.mkdir(staging_path(final, token))
    return token


class HashedFile(io.RawIOBase):
    """A file being written, and its SHA-256. Whatever leaves the ``with`` before :meth:`finish` has no checksum."""

    def __init__(self, path: str, buffer_bytes: int = 1 << 20) -> None:
        self._file: BinaryIO = open(path, "wb", buffering=buffer_bytes)  # noqa: SIM115  (closed by close)
        self._hash = hashlib.sha256()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Write and hash."""
        self._hash.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        if not self._file.closed:
            self._file.flush()

    def finish(self) -> FileRecord:
        """Make the file durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self._hash.hexdigest(), self._file.tell())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def write_file(path: str, data: bytes) -> FileRecord:
    """Write and sync a file inside a folder that is not published yet."""
    with HashedFile(path) as file:
        file.write(data)
        return file.finish()


def check_free(path: str) -> None:
    """Refuse a path that is taken."""
    if os.path.lexists(path):
        raise InputError(f"{path}: is already there; expected a path that is free")


@contextmanager
def new_folder(final: str) -> Iterator[str]:
    """The folder in which the block writes ``final``: published when the block ends, removed if it raises.

    Raises:
        InputError: ``final`` is there.
    """
    token = uuid.uuid4().hex
    staged = staging_path(final, token)
    try:
        os.makedirs(staged)
        yield staged
        publish_folder(staged, final, token, replace=False)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def publish_folder(staged: str, final: str, token: str, *, replace: bool) -> None:
    """Rename the complete, synced folder ``staged`` to its final name.

    Raises:
        InputError: ``final`` is there and ``replace`` is false.
    """
    parent = os.path.dirname(final)
    aside = None
    storage.sync(staged)
    if not replace:
        check_free(final)
    if os.path.lexists(final):
        aside = os.path.join(parent, f".{os.path.basename(final)}.{token}.replaced")
        os.rename(final, aside)
        storage.sync(parent)
    try:
        os.rename(staged, final)
    except OSError:
        if aside is not None:
            os.rename(aside, final)
        raise
    storage.sync(parent)
    if aside is not None:
        with suppress(OSError):  # published already; what stays is removed at the next start
            remove_folder(aside, token)


def remove_folder(path: str, token: str) -> None:
    """Remove a folder; it is renamed before its first file is removed."""
    name = os.path.basename(path)
    match = _LEFTOVER.fullmatch(name)
    if match and match["kind"] == "tmp":
        staged = path
    else:
        staged = staging_path(os.path.join(os.path.dirname(path), match["name"] if match else name), token)
        os.rename(path, staged)
        storage.sync(os.path.dirname(path))
    shutil.rmtree(staged)


def recover(root: str, token: str) -> list[str]:
    """Tidy what a killed writer left in ``root``: put back a folder that was moved aside and not replaced, remove the
    rest. Only for the holder of the folder's lock. Returns the names dealt with."""
    leftovers = sorted(name for name in os.listdir(root) if _LEFTOVER.fullmatch(name))
    for name in leftovers:
        match = _LEFTOVER.fullmatch(name)
        assert match is not None
        path, final = os.path.join(root, name), os.path.join(root, match["name"])
        if match["kind"] == "replaced" and not os.path.lexists(final):
            os.rename(path, final)
            storage.sync(root)
        else:
            remove_folder(path, token)
    return leftovers


class FolderLock:
    """One writer a folder: a POSIX record lock on ``<folder>/.lock``, which the kernel lets go when the process ends.

    A record lock belongs to the process, not to the descriptor: a forked child does not keep it alive, and it holds
    between machines on NFS too.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, ".lock")
        try:
            self._file = open(self.path, "a+b", opener=storage.open_own)  # noqa: SIM115  (held open as long as the lock)
        except OSError as error:
            raise QuernError(f"{self.path}: cannot be locked ({error.strerror})") from None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = self._owner()
            self._file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise QuernError(f"{self.path}: cannot be locked ({error.strerror})") from None
            raise QuernError(
                f"{self.path}: another trainer writes here{owner}; one run directory, one trainer"
            ) from None
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
        self._file.flush()

    def _owner(self) -> str:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            self._file.seek(0)
            owner = json.loads(self._file.read(4096))
            return f" (process {owner['pid']} on {owner['host']})"
        return ""

    def close(self) -> None:
        """Release the lock."""
        self._file.close()
