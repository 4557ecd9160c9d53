"""Paths on any store (fsspec), atomic publish, checksums.

A path is a local path or an fsspec URL (``s3://bucket/key``). Nothing here ever leaves half a file under its final
name: on a file system a file is written beside its place and renamed, on an object store the upload is the publish.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import posixpath
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from quern.errors import InputError

__all__ = [
    "exists",
    "fingerprint",
    "glob",
    "guarded",
    "is_file",
    "is_local",
    "is_temporary",
    "join",
    "list_files",
    "open_read",
    "publish",
    "publish_bytes",
    "read_bytes",
    "read_json",
    "remove_tree",
    "sha256",
    "split",
    "sync",
    "write_json",
]

#: Names of files while :func:`publish` writes them.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")

REMOVE_ATTEMPTS = 6

#: What :func:`guarded` has put before every publish of this process.
_guards: list[Callable[[], None]] = []


def split(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system a path lives on, and the path inside it."""
    try:
        fs, inner = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise InputError(f"{path}: no such store ({error})") from None
    return fs, inner


def is_local(path: str) -> bool:
    """Whether ``path`` is on this machine's file system."""
    return isinstance(split(path)[0], LocalFileSystem)


def join(base: str, *parts: str) -> str:
    """``base`` with ``parts`` below it, POSIX style, on any store."""
    return posixpath.join(base, *parts)


def exists(path: str) -> bool:
    """Whether a file or folder is there."""
    fs, inner = split(path)
    return bool(fs.exists(inner))


def is_file(path: str) -> bool:
    """Whether a file is there; a text that is no path at all is none."""
    try:
        fs, inner = split(path)
        return bool(fs.isfile(inner))
    except (InputError, OSError, ValueError):
        return False


def glob(pattern: str) -> list[str]:
    """Files that match, sorted; each as a path of the same form as ``pattern``."""
    fs, inner = split(pattern)
    found = sorted(name for name in fs.glob(inner) if not fs.isdir(name))
    return [_full(fs, name, pattern) for name in found]


def list_files(folder: str) -> list[str]:
    """Every published file below ``folder``, sorted; empty when it is not there."""
    fs, inner = split(folder)
    if not fs.exists(inner):
        return []
    return [_full(fs, name, folder) for name in sorted(fs.find(inner)) if not is_temporary(name)]


def is_temporary(path: str) -> bool:
    """Whether ``path`` is a file that :func:`publish` has not yet renamed, or never will."""
    return _TEMPORARY.fullmatch(posixpath.basename(path)) is not None


def _full(fs: fsspec.AbstractFileSystem, name: str, like: str) -> str:
    return name if "://" not in like else str(fs.unstrip_protocol(name))


def open_read(path: str) -> IO[bytes]:
    """Open for reading bytes, seekable."""
    fs, inner = split(path)
    return fs.open(inner, "rb")


def read_bytes(path: str) -> bytes:
    """The whole file."""
    with open_read(path) as file:
        return file.read()


def read_json(path: str) -> Any:
    """A JSON file; an unreadable one is an :class:`InputError` that names it."""
    try:
        return json.loads(read_bytes(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


@contextmanager
def guarded(check: Callable[[], None]) -> Iterator[None]:
    """Inside the block :func:`publish` calls ``check`` before a file gets its name; where it raises, none appears."""
    _guards.append(check)
    try:
        yield
    finally:
        _guards.remove(check)


def _check_guards() -> None:
    for check in _guards:
        check()


@contextmanager
def publish(path: str) -> Iterator[IO[bytes]]:
    """A binary stream that appears under ``path`` whole, when the block ends without an error, or not at all.

    On a file system the bytes are synced before the rename, so a published name always holds all of them.
    """
    fs, inner = split(path)
    if isinstance(fs, LocalFileSystem):
        parent = os.path.dirname(inner)
        os.makedirs(parent, exist_ok=True)
        temporary = os.path.join(parent, f".{os.path.basename(inner)}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _check_guards()
            os.replace(temporary, inner)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        sync(parent)
        return
    with tempfile.TemporaryFile() as spool:
        yield spool
        spool.seek(0)
        _check_guards()
        upload = fs.open(inner, "wb")
        try:
            shutil.copyfileobj(spool, upload, 8 << 20)
        except BaseException:
            _discard(upload)
            raise
        upload.close()


def _discard(upload: Any) -> None:
    """Give an upload up. Closing it, and so leaving a ``with`` or being collected, would publish what it has so far."""
    if hasattr(upload, "discard"):
        upload.discard()
    with suppress(AttributeError):  # a store that has nothing to upload
        upload.closed = True


def sync(path: str) -> None:
    """Make a local file's bytes, or a local folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_bytes(path: str, data: bytes) -> None:
    """Write ``data`` under ``path``, atomically."""
    with publish(path) as file:
        file.write(data)


def write_json(path: str, value: Any, *, indent: int | None = 2) -> None:
    """Write JSON atomically, with sorted keys: equal values are equal bytes."""
    publish_bytes(path, (json.dumps(value, sort_keys=True, indent=indent, ensure_ascii=False) + "\n").encode())


def sha256(path: str) -> str:
    """Hex SHA-256 of a file's bytes, in bounded memory."""
    state = hashlib.sha256()
    with open_read(path) as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def fingerprint(path: str) -> str:
    """A cheap identity of a file's present content: size with modification time (file system) or ETag (store)."""
    fs, inner = split(path)
    try:
        info = fs.info(inner)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    stamp = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("LastModified") or ""
    return f"{info.get('size')}:{stamp}"


def remove_tree(path: str) -> None:
    """Remove a file or folder and what is below it; nothing happens when it is not there.

    A folder in which somebody writes at the same time is tried again for a moment, then the error is raised.
    """
    fs, inner = split(path)
    for attempt in range(REMOVE_ATTEMPTS):
        try:
            if fs.exists(inner):
                fs.rm(inner, recursive=True)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or attempt == REMOVE_ATTEMPTS - 1:
                raise
        time.sleep(0.05 * 2**attempt)
