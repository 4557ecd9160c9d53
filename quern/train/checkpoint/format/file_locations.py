"""``places.json``: on which nodes' disks the tensor files of a checkpoint are.

The file stands beside the manifest, which does not name it: the same checkpoint fetched into one folder, or in a store,
has none. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quern import storage
from quern.errors import InputError
from quern.train.checkpoint.format.manifest import (
    CONFIG_FILE,
    ENCODING_FILE,
    HISTORY_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    Fields,
)
from quern.words import counted, is_plain_name

__all__ = [
    "PLACES_FILE", "Place", "beside", "check_together", "elsewhere", "in_order", "places_to_bytes", "read_places",
]  # fmt: skip

PLACES_FILE = "places.json"
SCHEMA = 1

#: What always lies in the checkpoint's own folder.
_SMALL = {MANIFEST_FILE, METADATA_FILE, CONFIG_FILE, ENCODING_FILE, HISTORY_FILE, PLACES_FILE}


@dataclass(frozen=True)
class Place:
    """A folder on a node's disk."""

    host: str
    """The node's name."""
    folder: str
    """Absolute path there."""
    files: tuple[str, ...]
    """Plain names of the checkpoint's files in it. A file may lie on several nodes."""


def read_places(checkpoint: str) -> tuple[Place, ...] | None:
    """The locations of the checkpoint's tensor files; None if they are beside the manifest.

    Raises:
        InputError: the file is damaged, with its name and the field.
    """
    file = os.path.join(checkpoint, PLACES_FILE)
    if not os.path.lexists(file):
        return None
    places = _places(file, storage.read_json(file))
    seen: set[tuple[str, str]] = set()
    for number, place in enumerate(places):
        if (place.host, place.folder) in seen:
            raise InputError(f"{file}: nodes.{number}: {place.host}, {place.folder}: expected each folder once")
        seen.add((place.host, place.folder))
    return places


def places_to_bytes(places: Sequence[Place]) -> bytes:
    """The file's bytes; several entries of one folder become one.

    Raises:
        ValueError: :func:`read_places` would not read the result.
    """
    files: dict[tuple[str, str], set[str]] = {}
    for place in places:
        files.setdefault((place.host, os.path.normpath(place.folder)), set()).update(place.files)
    nodes = [{"host": host, "folder": folder, "files": sorted(names)} for (host, folder), names in files.items()]
    plain = {"schema": SCHEMA, "nodes": nodes}
    try:
        _places(PLACES_FILE, plain)
    except InputError as error:
        raise ValueError(str(error)) from None
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()


def elsewhere(checkpoint: str) -> frozenset[str]:
    """Names of the checkpoint's files that are on nodes' disks.

    Raises:
        InputError: as :func:`read_places`.
    """
    return frozenset(name for place in read_places(checkpoint) or () for name in place.files)


def beside(checkpoint: str) -> Callable[[str], bool]:
    """A filter by name for the files that belong in the checkpoint's own folder.

    Raises:
        InputError: as :func:`read_places`.
    """
    away = elsewhere(checkpoint)
    return lambda name: name not in away


def in_order(places: Sequence[Place], name: str) -> list[Place]:
    """Folders to search for a file: those that list it first, since the others may have received it later."""
    return sorted(places, key=lambda place: name not in place.files)


def check_together(checkpoint: str) -> None:
    """Raise unless all tensor files of a checkpoint are in its own folder.

    Raises:
        InputError: saying where they are; or as :func:`read_places`.
    """
    away = {name for name in elsewhere(checkpoint) if not os.path.lexists(os.path.join(checkpoint, name))}
    if not away:
        return
    folders = [
        f"{place.host}:{place.folder}" for place in read_places(checkpoint) or () if away.intersection(place.files)
    ]
    shown = ", ".join(folders[:3]) + (f" and {len(folders) - 3} more" if len(folders) > 3 else "")
    raise InputError(
        f"{checkpoint}: {counted(len(away), 'file')} of tensors are on the run's nodes ({shown}); "
        f"quern checkpoint fetch brings them together in one folder"
    )


def _places(file: str, data: Any) -> tuple[Place, ...]:
    fields = _fields(file, "", data, {"schema", "nodes"})
    schema = data["schema"]
    if isinstance(schema, bool) or schema != SCHEMA:
        raise fields.wrong("schema", f"{SCHEMA} (this version of quern reads no other)", schema)
    nodes = data["nodes"]
    if not isinstance(nodes, list) or not nodes:
        raise fields.wrong("nodes", "a list of at least one", nodes)
    return tuple(_place(file, f"nodes.{number}", node) for number, node in enumerate(nodes))


def _place(file: str, field: str, data: Any) -> Place:
    fields = _fields(file, f"{field}.", data, {"host", "folder", "files"})
    host, folder, files = data["host"], data["folder"], data["files"]
    if not isinstance(host, str) or not host:
        raise fields.wrong("host", "a node's name", host)
    if not isinstance(folder, str) or not _is_path(folder):
        raise fields.wrong("folder", "an absolute path", folder)
    if not isinstance(files, list):
        raise fields.wrong("files", "a list of names", files)
    seen: set[str] = set()
    for number, name in enumerate(files):
        if not is_plain_name(name):
            raise fields.wrong(f"files.{number}", "the plain name of a file", name)
        if name in _SMALL:
            raise fields.wrong(f"files.{number}", "a file of tensors", name)
        if name in seen:
            raise fields.wrong(f"files.{number}", "each name once", name)
        seen.add(name)
    return Place(host, folder, tuple(files))


def _is_path(folder: str) -> bool:
    try:
        return os.path.isabs(folder) and b"\0" not in os.fsencode(folder) and ".." not in folder.split(os.sep)
    except UnicodeEncodeError:
        return False


def _fields(file: str, prefix: str, data: Any, keys: set[str]) -> Fields:
    """An object that has these fields and no others."""
    fields = Fields(file, prefix, data)
    for key in sorted(keys):
        fields.value(key)
    for key in sorted(data.keys() - keys):
        raise InputError(f"{file}: {prefix}{key}: not a field of {PLACES_FILE}")
    return fields
