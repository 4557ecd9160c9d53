"""The checkpoint files on a node's disk that other nodes may read and complete.

Below one root lie folders ``step_00001000`` with files of plain names; nothing else is looked at, and no link is
followed. A file that another node sends is written as ``ROOT/.step_00001000.mirror/NAME.SHA256.part`` and renamed into
``ROOT/step_00001000/`` once it is whole, synced and has its SHA-256. A part whose connection broke stays, so that its
sender can go on; a wrong one goes, and so does one that the disk has no room for.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from quern import storage

__all__ = ["CHUNK", "FOLDER", "SHA256", "RefusedError", "Root", "is_file_name", "mirror_folder"]

#: Bytes moved at once.
CHUNK = 1 << 20
#: Modification times are as fine as the kernel's tick: a younger file may change and keep its time.
SETTLED_NS = 1_000_000_000
MAX_HASHES = 100_000

FOLDER = re.compile(r"step_[0-9]{8,20}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"(?!\.\.)(?!\.\Z)[A-Za-z0-9._-]{1,128}")
_MIRROR = re.compile(r"\.step_[0-9]{8,20}\.mirror")
#: A second sender's part, which nobody goes on with.
_SECOND_PART = re.compile(r".+\.[0-9a-f]{64}\.[0-9a-f]{8}\.part")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW


def is_file_name(name: str) -> bool:
    """Whether ``name`` is one that files are served and taken under: plain, at most 128 characters, no temporary's."""
    return _FILE.fullmatch(name) is not None and not storage.is_temporary(name)


def mirror_folder(root: str, folder: str) -> str:
    """Where parts of files for ``ROOT/folder`` lie; to be removed together with that folder."""
    return os.path.join(root, f".{folder}.mirror")


class RefusedError(Exception):
    """A request that is answered with ``status`` and one line of text. ``resumable``: the bytes so far are worth it."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None, *, resumable: bool = False):
        super().__init__(text)
        self.status, self.text, self.headers, self.resumable = status, text, dict(headers or {}), resumable


@contextmanager
def _opened(path: str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


class Root:
    """The files below one folder. Opened by descriptor from the folder down without following links, so that no name
    leads out of it. Raises :class:`RefusedError` for whatever is not there or cannot be done."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._receiving: set[tuple[str, str, str]] = set()
        self._hashes: dict[tuple[str, str], tuple[tuple[int, int, int], str]] = {}
        os.makedirs(path, exist_ok=True)
        for folder in filter(_MIRROR.fullmatch, os.listdir(path)):
            with suppress(OSError), self._folder(folder) as inside:
                for name in filter(_SECOND_PART.fullmatch, os.listdir(inside)):
                    os.unlink(name, dir_fd=inside)

    @contextmanager
    def _folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        with _opened(self.path, os.O_DIRECTORY) as root:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=root)
                    os.fsync(root)
            with _opened(folder, _IN_FOLDER, dir_fd=root) as inside:
                yield inside

    @contextmanager
    def open(self, folder: str, name: str) -> Iterator[int]:
        """A descriptor of a file for reading."""
        try:
            with self._folder(folder) as inside:
                descriptor = os.open(name, os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
        except OSError as error:
            raise RefusedError(404, f"{folder}/{name}: no such file") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RefusedError(404, f"{folder}/{name}: no such file")
            yield descriptor
        finally:
            os.close(descriptor)

    def files(self, folder: str) -> dict[str, int]:
        """Size in bytes by name of the files in a folder."""
        found = {}
        try:
            with self._folder(folder) as inside:
                for name in sorted(filter(is_file_name, os.listdir(inside))):
                    with suppress(FileNotFoundError):  # removed since
                        status = os.stat(name, dir_fd=inside, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found[name] = status.st_size
        except OSError as error:
            raise RefusedError(404, f"{folder}: no such folder") from error
        return found

    def sha256(self, folder: str, name: str) -> tuple[int, str]:
        """Size in bytes and hex SHA-256 of a file; read once, and again when size, time or inode change."""
        with self.open(folder, name) as descriptor:
            before = _identity(os.fstat(descriptor))
            known = self._hashes.get((folder, name))
            if known is not None and known[0] == before:
                return before[0], known[1]
            try:
                found = _hash(descriptor, before[0]).hexdigest()
            except OSError as error:
                raise RefusedError(500, f"{folder}/{name}: cannot be read ({error.strerror or error})") from error
            settled = before == _identity(os.fstat(descriptor)) and time.time_ns() - before[1] > SETTLED_NS
        if settled:
            self._remember(folder, name, before, found)
        return before[0], found

    def _remember(self, folder: str, name: str, identity: tuple[int, int, int], sha256: str) -> None:
        with self._lock:
            self._hashes[folder, name] = identity, sha256
            while len(self._hashes) > MAX_HASHES:
                del self._hashes[next(iter(self._hashes))]

    def standing(self, folder: str, name: str, sha256: str) -> int | None:
        """The size in bytes of the file if it exists here with this content; else None."""
        with suppress(RefusedError):
            size, found = self.sha256(folder, name)
            return size if found == sha256 else None
        return None

    def received(self, folder: str, name: str, sha256: str) -> int:
        """The number of bytes received of an interrupted file, to resume from; 0 while another sender is active."""
        if (folder, name, sha256) in self._receiving:
            return 0
        try:
            with self._folder(f".{folder}.mirror") as inside:
                return os.stat(f"{name}.{sha256}.part", dir_fd=inside, follow_symlinks=False).st_size
        except OSError:
            return 0

    def receive(
        self, folder: str, name: str, sha256: str, *, size: int, start: int, body: Callable[[], Iterator[memoryview]]
    ) -> None:
        """Write a file of ``size`` bytes whose bytes from ``start`` on are ``body``; it appears under its name right
        and synced, or not at all."""
        key = folder, name, sha256
        with self._lock:
            first = key not in self._receiving
            self._receiving.add(key)
        try:
            part = f"{name}.{sha256}.part" if first else f"{name}.{sha256}.{secrets.token_hex(4)}.part"
            self._receive(folder, name, part, sha256, size, start, body, keep=first)
        except OSError as error:
            reason = f"{folder}/{name}: cannot be written ({error.strerror or error})"
            raise RefusedError(507 if error.errno in _FULL else 500, reason) from error
        finally:
            with self._lock:
                if first:
                    self._receiving.discard(key)
                self._tidy(folder, name, sha256)

    def _tidy(self, folder: str, name: str, sha256: str) -> None:
        """Remove what is left of a file that another sender completed, and a folder of parts that is empty."""
        known = self._hashes.get((folder, name))
        if known is not None and known[1] == sha256 and (folder, name, sha256) not in self._receiving:
            with suppress(OSError), self._folder(f".{folder}.mirror") as inside:
                os.unlink(f"{name}.{sha256}.part", dir_fd=inside)
        with suppress(OSError):
            os.rmdir(mirror_folder(self.path, folder))

    def _receive(
        self,
        folder: str,
        name: str,
        part: str,
        sha256: str,
        size: int,
        start: int,
        body: Callable[[], Iterator[memoryview]],
        *,
        keep: bool,
    ) -> None:
        disk = os.statvfs(self.path)
        if size - start > disk.f_bavail * disk.f_frsize:
            raise RefusedError(507, f"{folder}/{name}: {size - start} bytes do not fit on the disk")
        mirror = f".{folder}.mirror"
        with self._lock, self._folder(mirror, make=True) as inside:  # locked: an empty folder is removed
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=inside)
        try:
            has = os.fstat(descriptor).st_size
            if start > has:
                raise RefusedError(409, f"{folder}/{name}: has {has} bytes; cannot go on at {start}", resumable=True)
            os.ftruncate(descriptor, start)
            state = _hash(descriptor, start)
            os.lseek(descriptor, start, os.SEEK_SET)
            for chunk in body():
                state.update(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
            os.fsync(descriptor)
            if state.hexdigest() != sha256:
                raise RefusedError(
                    422, f"{folder}/{name}: expected SHA-256 {sha256}, what arrived has {state.hexdigest()}"
                )
            with self._folder(mirror) as inside, self._folder(folder, make=True) as final:
                os.rename(part, name, src_dir_fd=inside, dst_dir_fd=final)
                os.fsync(final)
            self._remember(folder, name, _identity(os.fstat(descriptor)), sha256)
        except BaseException as error:
            resumable = keep and isinstance(error, RefusedError) and error.resumable
            if not resumable or os.fstat(descriptor).st_size == 0:
                with suppress(OSError), self._folder(mirror) as inside:
                    os.unlink(part, dir_fd=inside)
            raise
        finally:
            os.close(descriptor)


def _hash(descriptor: int, size: int) -> hashlib._Hash:
    """The state of SHA-256 after a file's first ``size`` bytes; its position stays."""
    state, place = hashlib.sha256(), 0
    while place < size and (chunk := os.pread(descriptor, min(CHUNK, size - place), place)):
        state.update(chunk)
        place += len(chunk)
    return state
