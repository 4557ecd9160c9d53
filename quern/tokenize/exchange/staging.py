"""Creates a folder atomically: it gets its name when it is complete."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from quern import storage
from quern.errors import InputError, QuernError

__all__ = ["staged"]


@contextmanager
def staged(path: str) -> Iterator[str]:
    """A hidden folder beside ``path``, renamed to it if the block ends without an error, else removed.

    Whoever stages holds a lock on the folder, so that one left over by a process that was killed is known as such and
    removed by the next that stages the same path.

    Raises:
        InputError: ``path`` is not on a local file system, cannot be made, or something is there already.
        QuernError: the disk is full or fails.
    """
    if not storage.is_local(path):
        raise InputError(f"{path}: expected a folder on a local file system; copy it to a store afterwards")
    path = os.path.abspath(storage.split(path)[1])
    _refuse_standing(path)
    parent = os.path.dirname(path)
    try:
        os.makedirs(parent, exist_ok=True)
        _remove_left_over(path)
        folder, lock = _make(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
    try:
        yield folder
        _sync_below(folder)
        _refuse_standing(path)
        try:
            os.rename(folder, path)
        except OSError as error:
            raise InputError(f"{path}: cannot be given its name ({error.strerror or error})") from None
        storage.sync(parent)
    except BaseException as error:
        if os.path.isdir(folder):
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # of a file that is open: the disk is full
            raise QuernError(f"{path}: cannot be written ({error.strerror or error})") from error
        raise
    finally:
        os.close(lock)


def _refuse_standing(path: str) -> None:
    if os.path.islink(path) or (os.path.exists(path) and not (os.path.isdir(path) and not os.listdir(path))):
        raise InputError(f"{path}: is there already, and nothing is overwritten; give another name, or remove it")


def _make(path: str) -> tuple[str, int]:
    """A new folder for ``path``, and the descriptor that holds its lock."""
    while True:
        folder = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{uuid.uuid4().hex}.tmp")
        os.mkdir(folder)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is removing left-overs, this folder included
            os.close(lock)
            continue
        except OSError:  # no locks on this file system
            return folder, lock
        if os.path.isdir(folder):
            return folder, lock
        os.close(lock)


def _remove_left_over(path: str) -> None:
    """Remove the folders of writers of ``path`` that are no more."""
    parent, name = os.path.split(path)
    for entry in os.listdir(parent):
        if not (entry.startswith(f".{name}.") and storage.is_temporary(entry) and len(entry) == len(name) + 38):
            continue
        folder = os.path.join(parent, entry)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its writer is alive, or that cannot be determined
        finally:
            os.close(lock)


def _sync_below(folder: str) -> None:
    """Make the names in all folders durable; the writers of the files have synced these."""
    for below, _, _ in os.walk(folder):
        storage.sync(below)
