"""Local files, written atomically and durably."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from quern.errors import QuernError

__all__ = ["FullError", "create", "is_temporary", "needs_room", "open_own", "publish", "remove_tree", "sync"]

_ATTEMPTS = 6
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")


class FullError(QuernError, OSError):
    """There is no space left for ``filename``, on its file system or in a quota; ``strerror`` says how much is free."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}; make room and the same command goes on, or give another folder"


@contextmanager
def needs_room(path: str) -> Iterator[None]:
    """Turn every failure for lack of space in the block, in a library too, into a :class:`FullError` of ``path``."""
    try:
        yield
    except Exception as error:
        known = (n for n in _FULL if getattr(error, "errno", None) == n or os.strerror(n) in str(error))
        number = next(known, None)
        if number is None or isinstance(error, QuernError):
            raise
        raise FullError(number, f"{os.strerror(number)} ({_room(path)})", path) from error


def _room(path: str) -> str:
    place = os.path.realpath(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    found = os.statvfs(place)
    while not os.path.ismount(place):
        place = os.path.dirname(place)
    free, total = (blocks * found.f_frsize / 2**20 for blocks in (found.f_bavail, found.f_blocks))
    return f"{free:,.1f} of {total:,.1f} MiB are free on {place}"


def is_temporary(path: str) -> bool:
    """Whether ``path`` is a temporary file of :func:`publish`."""
    return _TEMPORARY.fullmatch(os.path.basename(path)) is not None


def open_own(path: str, flags: int, mode: int = 0o666) -> int:
    """As :func:`os.open`, of a regular file only; an opener for :func:`open`. For what is written under a name that
    others can foresee: who made the folder may have put a link there, and the link's target would be changed.

    Raises:
        OSError: also where a link, a pipe or anything else stands that is no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads, or a socket
            raise OSError(error.errno, "is not a regular file", path) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", path)


@contextmanager
def publish(path: str, check: Callable[[], None]) -> Iterator[IO[bytes]]:
    """A binary stream whose bytes are synced, and only then get their name. ``check`` is called in between; where it
    raises, or the block does, nothing is left."""
    with _beside(path) as file:
        yield file
        _write_out(file)
        check()
        os.replace(file.name, path)
    sync(os.path.dirname(path))


def create(path: str, data: bytes) -> None:
    """Create a complete file if none exists; of two at once, one does.

    Raises:
        FileExistsError: something is there.
    """
    with _beside(path) as file:
        file.write(data)
        _write_out(file)
        try:
            os.link(file.name, path)
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "is there already", path) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, "is there already", path) from None
            os.rename(file.name, path)
    sync(os.path.dirname(path))


@contextmanager
def _beside(path: str) -> Iterator[IO[bytes]]:
    """A new file in the folder of ``path``, which is made too; gone afterwards, unless it got another name."""
    parent = os.path.dirname(path)
    temporary = os.path.join(parent, f".{os.path.basename(path)}.{uuid.uuid4().hex}.tmp")
    try:
        with needs_room(path):
            os.makedirs(parent, exist_ok=True)
            with open(temporary, "wb") as file:
                yield file
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)


def _write_out(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync(path: str) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: str) -> None:
    """Remove a file or folder and what is below it; nothing happens when it is not there.

    A folder in which somebody writes at the same time is tried again for a moment, then the error is raised.
    """
    for attempt in range(_ATTEMPTS):
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or attempt == _ATTEMPTS - 1:
                raise
        time.sleep(0.05 * 2**attempt)
