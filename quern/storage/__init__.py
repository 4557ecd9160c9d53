"""Paths on any store (fsspec), atomic publication, checksums.

A path is a local path or an fsspec URL (``s3://bucket/key``). Nothing here ever leaves half a file under its final
name: on a file system a file is written beside its place and renamed, on an object store the upload is the publish.
What goes over a network goes by :mod:`quern.remote`: in bounded time, tried again, and with errors that say what to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from quern import filesystem
from quern.errors import InputError
from quern.filesystem import FullError, is_temporary, needs_room, open_own, sync
from quern.remote.concurrency import in_order
from quern.remote.lease import hold, takes_leases
from quern.remote.objects import Info, Objects, objects
from quern.remote.patterns import matching
from quern.remote.reader import open_object
from quern.remote.retry import ChangedError
from quern.remote.waits import around_waits

__all__ = [
    "ChangedError",
    "FullError",
    "absolute",
    "around_waits",
    "check_guards",
    "create_bytes",
    "describe",
    "each",
    "exists",
    "fingerprint",
    "give_up_uploads",
    "glob",
    "guarded",
    "is_file",
    "is_folder",
    "is_local",
    "is_temporary",
    "join",
    "lease",
    "list_files",
    "needs_room",
    "open_own",
    "open_read",
    "publish",
    "publish_bytes",
    "read_bytes",
    "read_json",
    "read_range",
    "reading",
    "remove",
    "remove_tree",
    "sha256",
    "split",
    "sync",
    "write_json",
]

T = TypeVar("T")
R = TypeVar("R")

_LOCAL = ("file", "local")
#: So many files of one folder are described by listing it.
_MANY = 8
#: What is held in memory of a file that is being published on a store; the rest is on this machine's disk.
_SPOOL_BYTES = 8 << 20

#: What :func:`guarded` has put before every publish of this process.
_guards: list[Callable[[], None]] = []


def split(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system a path lives on, and the path inside it."""
    try:
        fs, inner = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise InputError(f"{path}: no such store ({error})") from None
    return fs, inner


def _store(path: str) -> Objects | None:
    """The store of a path; None for this machine's file system."""
    return objects(path) if _is_url(path) else None


def _is_url(path: str) -> bool:
    scheme, mark, _ = path.partition("://")
    return bool(mark) and scheme not in _LOCAL


def is_local(path: str) -> bool:
    """Whether ``path`` is on this machine's file system."""
    return isinstance(split(path)[0], LocalFileSystem)


def absolute(path: str) -> str:
    """``path`` as it is found from any working folder: absolute where it is local."""
    return os.path.abspath(split(path)[1]) if is_local(path) else path


def join(base: str, *parts: str) -> str:
    """``base`` with ``parts`` below it, POSIX style, on any store."""
    return posixpath.join(base, *parts)


def exists(path: str) -> bool:
    """Whether a file or folder is there."""
    if (store := _store(path)) is not None:
        return store.stat(path) is not None or store.has_folder(path)
    return os.path.exists(split(path)[1])


def is_file(path: str) -> bool:
    """Whether a file is there; a text that is no path at all is none."""
    try:
        store = _store(path)
        return os.path.isfile(split(path)[1]) if store is None else store.stat(path) is not None
    except (InputError, OSError, ValueError):
        return False


def is_folder(path: str) -> bool:
    """Whether a folder is there; on an object store: whether anything is below it."""
    store = _store(path)
    return os.path.isdir(split(path)[1]) if store is None else store.has_folder(path)


def glob(pattern: str) -> list[str]:
    """Files that match, sorted; each as a path of the same form as ``pattern``."""
    store = _store(pattern)
    if store is not None:
        return sorted(matching(store, pattern))
    fs, inner = split(pattern)
    found = sorted(name for name in fs.glob(inner) if not fs.isdir(name))
    return [_full(fs, name, pattern) for name in found]


def list_files(folder: str) -> list[str]:
    """Every published file below ``folder``, sorted; empty when it is not there."""
    store = _store(folder)
    if store is not None:
        return sorted(name for name, info in store.listing(folder) if info is not None)
    fs, inner = split(folder)
    if not fs.exists(inner):
        return []
    return [_full(fs, name, folder) for name in sorted(fs.find(inner)) if not is_temporary(name)]


def _full(fs: fsspec.AbstractFileSystem, name: str, like: str) -> str:
    return name if "://" not in like else str(fs.unstrip_protocol(name))


def open_read(path: str, fingerprint: str | None = None) -> IO[bytes]:
    """Open for reading bytes, seekable. On a store all bytes are of one version of the object, or an error says so.

    Raises:
        ChangedError: on a store, the object has not this :func:`fingerprint`.
    """
    store = _store(path)
    if store is not None:
        return open_object(store, path, fingerprint)
    return open(split(path)[1], "rb")


def read_bytes(path: str) -> bytes:
    """The whole file."""
    store = _store(path)
    if store is not None:
        return store.read(path)
    with open_read(path) as file:
        return file.read()


def read_range(path: str, start: int, end: int) -> bytes:
    """The bytes from ``start`` up to and without ``end`` of a file, and no others."""
    store = _store(path)
    if store is not None:
        return store.read_range(path, start, end)
    with open(split(path)[1], "rb", buffering=0) as file:
        file.seek(start)
        return file.read(end - start)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """In the block only this file is read; one that cannot be is an :class:`InputError` that names it."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_json(path: str) -> Any:
    """A JSON file; an unreadable one is an :class:`InputError` that names it."""
    with reading(path):
        data = read_bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


@contextmanager
def guarded(check: Callable[[], None]) -> Iterator[None]:
    """Inside the block :func:`publish` calls ``check`` before it publishes a file; if that raises, none appears."""
    _guards.append(check)
    try:
        yield
    finally:
        _guards.remove(check)


def check_guards() -> None:
    """Run the checks of :func:`guarded`, for a caller that is about to remove files."""
    for check in _guards:
        check()


@contextmanager
def publish(path: str) -> Iterator[IO[bytes]]:
    """A binary stream that is published atomically under ``path`` when the block ends without an error.

    On a file system the bytes are synced before the rename, so a published name always holds all of them.
    """
    store = _store(path)
    if store is None:
        with filesystem.publish(split(path)[1], check_guards) as file:
            yield file
        return
    with needs_room(tempfile.gettempdir()), tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        yield spool
        size, state = spool.seek(0, os.SEEK_END), hashlib.sha256()
        spool.seek(0)
        while chunk := spool.read(1 << 20):
            state.update(chunk)
        check_guards()
        store.put(path, spool, size, state.hexdigest())


@contextmanager
def lease(path: str, what: str) -> Iterator[None]:
    """Hold an exclusive lease inside the block, on stores that support it (S3); elsewhere nothing is held.

    Inside the block nothing is published any more, and :func:`check_guards` raises, once another process has it.

    Raises:
        QuernError: another process holds it, or took it over since this one was not heard of for long.
    """
    if not takes_leases(path):
        yield
        return
    with hold(path, what) as held, guarded(held.check):
        yield


def give_up_uploads(folder: str) -> None:
    """Abort uploads below a store's folder that killed processes left."""
    store = _store(folder)
    if store is not None:
        store.give_up_uploads(folder)


def each(function: Callable[[T], R], items: Sequence[T], place: str) -> Iterator[R]:
    """Results in order; where ``place`` is on a store, whose answers take their time, several are under way."""
    store = _store(place)
    if store is None:
        yield from map(function, items)
        return
    yield from in_order(lambda item, stopped: function(item), items, store.width)


def publish_bytes(path: str, data: bytes) -> None:
    """Write ``data`` under ``path``, atomically."""
    with publish(path) as file:
        file.write(data)


def create_bytes(path: str, data: bytes) -> None:
    """Write ``data`` under ``path`` atomically if nothing is there; of two at once one wins (not on every store).

    Raises:
        FileExistsError: something else is there already. On a store, an object with these very bytes is no error: the
            answer to the first try may have been lost.
    """
    check_guards()
    store = _store(path)
    if store is not None:
        store.create(path, data)
    else:
        filesystem.create(split(path)[1], data)


def write_json(path: str, value: Any, *, indent: int | None = 2) -> None:
    """Write JSON atomically, with sorted keys: equal values are equal bytes."""
    publish_bytes(path, (json.dumps(value, sort_keys=True, indent=indent, ensure_ascii=False) + "\n").encode())


def sha256(path: str, *, read: bool = False) -> str:
    """Hex SHA-256 of a file's bytes, in bounded memory.

    Of an object that :func:`publish` put it stands beside the object, which a store changes only as a whole; ``read``:
    of the bytes that are there all the same.
    """
    store = None if read else _store(path)
    if store is not None:
        info = store.stat(path)
        if info is not None and info.sha256 is not None:
            return info.sha256
    state = hashlib.sha256()
    with open_read(path) as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def fingerprint(path: str) -> str:
    """A cheap identity of a file's present content: size with modification time (file system) or ETag (store)."""
    return describe([path])[0][1]


def describe(paths: Sequence[str]) -> list[tuple[int, str]]:
    """(size in bytes, fingerprint) of each file. On stores many of one folder cost few requests.

    Raises:
        InputError: one is not there.
    """
    known: dict[str, Info] = {}
    folders: dict[str, set[str]] = {}
    for path in paths:
        if _is_url(path):
            folders.setdefault(posixpath.dirname(path), set()).add(path)
    for folder, names in folders.items():
        store = objects(folder)
        if len(names) >= _MANY and store.lists:
            known |= store.listed(folder, names)
        left = sorted(names - known.keys())
        known |= {name: info for name, info in zip(left, store.stats(left), strict=True) if info is not None}
    return [_described(path, known) for path in paths]


def _described(path: str, known: dict[str, Info]) -> tuple[int, str]:
    if _is_url(path):
        if path not in known:
            raise InputError(f"{path}: no such file")
        info = known[path]
        return info.size, info.fingerprint
    try:
        found = os.stat(split(path)[1])
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    return found.st_size, f"{found.st_size}:{found.st_mtime or ''}"


def remove(path: str) -> None:
    """Remove a file; nothing happens when it is not there."""
    store = _store(path)
    if store is not None:
        store.remove([path])
    elif os.path.lexists(inner := split(path)[1]):
        os.unlink(inner)


def remove_tree(path: str) -> None:
    """Remove a file or folder and what is below it; nothing happens when it is not there.

    A folder in which somebody writes at the same time is tried again for a moment, then the error is raised.
    """
    store = _store(path)
    if store is not None:
        below = [name for name, info in store.listing(path) if info is not None]
        store.remove([path, *(name for name in below if name != path)])
        return
    filesystem.remove_tree(split(path)[1])
