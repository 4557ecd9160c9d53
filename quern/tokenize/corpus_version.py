"""Reads and checks a corpus version: ``VERSION.json`` and the manifests of its sources, from any store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quern import storage
from quern.errors import InputError
from quern.tokenize.shard_format import VERSION_FILE, ShardInfo, version_entry

__all__ = ["Listed", "check_version", "fields", "inside", "listed_files", "read_listed", "read_streams", "read_version"]

#: What a reader needs of VERSION.json, of a source in it, of a manifest, of a shard in that.
_VERSION = {"version": int, "sources": dict, "encoding.ranks": str}
_LISTED = {"manifest": str, "sha256": str, "shards": list}
_MANIFEST = {"encoding": str, "vocab_size": int, "dtype": str, "eot_id": int, "seed": int, "shards": list}
_SHARD = {
    **dict.fromkeys(("bin", "spans", "sha256", "spans_sha256", "first_key", "last_key"), str),
    **dict.fromkeys(("tokens", "documents"), int),
}
#: What both VERSION.json and a manifest say of a shard.
_AGREED = ("bin", "spans", "sha256", "spans_sha256", "tokens", "documents")
_STREAM = re.compile(r"[a-z0-9][a-z0-9_-]*(\.val)?")


@dataclass(frozen=True)
class Listed:
    """A source (or the held-out documents of one) as a corpus version lists it."""

    source: str
    entry: Mapping[str, Any]
    """What VERSION.json says of it."""
    manifest: Mapping[str, Any]
    """All that its manifest says."""
    shards: tuple[ShardInfo, ...]


def fields(path: str, value: Any, kinds: Mapping[str, type], below: str = "") -> dict[str, Any]:
    """What ``value`` (``below`` of the file) has under dotted names, each of its type; other keys are left out.

    Raises:
        InputError: a field is missing or of another type.
    """
    found = {}
    for dotted, kind in kinds.items():
        here = value
        for name in dotted.split("."):
            here = here.get(name) if isinstance(here, dict) else None
        if type(here) is not kind:  # true is no integer
            expected = {dict: "a mapping", list: "a list", int: "an integer", str: "text"}[kind]
            raise InputError(f"{path}: {below}{dotted}: expected {expected}, got {here!r:.60}")
        found[dotted] = here
    return found


def inside(path: str, field: str, name: str, folders: bool = True) -> str:
    """A name that a file of the corpus gives; one that leads out of its folder is refused."""
    parts = name.split("/") if folders else [name]
    if any(part in ("", ".", "..") or set(part) & {"/", "\\", "\0"} for part in parts):
        raise InputError(f"{path}: {field}: expected the name of a file of the corpus, got {name!r:.99}")
    return name


def read_version(tokens: str) -> dict[str, Any]:
    """``VERSION.json`` of the folder ``tokens``, with the fields a reader needs.

    Raises:
        InputError: it is missing, or is none.
    """
    path = storage.join(tokens, VERSION_FILE)
    return check_version(path, storage.read_json(path))


def check_version(path: str, record: Any) -> dict[str, Any]:
    """``record``, which stands at ``path``, if it has the fields a reader needs of a corpus version."""
    version = fields(path, record, _VERSION)
    inside(path, "encoding.ranks", version["encoding.ranks"])
    for source in version["sources"]:
        inside(path, "sources", source, folders=False)
    return dict(record)


def read_streams(tokens: str) -> dict[str, Any]:
    """What ``VERSION.json`` of the folder ``tokens`` says of each stream, a source or the held-out documents of one.

    Raises:
        InputError: it is missing, or a name is not that of a stream.
    """
    path = storage.join(tokens, VERSION_FILE)
    streams: dict[str, Any] = fields(path, storage.read_json(path), {"sources": dict})["sources"]
    for name in streams:
        if not _STREAM.fullmatch(name):
            raise InputError(f"{path}: sources: expected <source> or <source>.val, got {name!r:.99}")
    return streams


def read_listed(tokens: str, version: Mapping[str, Any], source: str) -> Listed:
    """A source of a version that :func:`read_version` gave, with its manifest.

    Raises:
        InputError: the version has no such source; the manifest is missing, damaged, or lists other shards.
    """
    version_path = storage.join(tokens, VERSION_FILE)
    if source not in version["sources"]:
        known = ", ".join(sorted(version["sources"])) or "none"
        raise InputError(
            f"{storage.join(tokens, source)}: the corpus version has no source {source!r} (it has {known})"
        )
    entry = version["sources"][source]
    listed = fields(version_path, entry, _LISTED, f"sources.{source}.")
    inside(version_path, f"sources.{source}.manifest", listed["manifest"])
    path = storage.join(tokens, listed["manifest"])
    if not storage.exists(path) or storage.sha256(path) != listed["sha256"]:
        raise InputError(f"{path}: missing or changed; its SHA-256 is not the one in {VERSION_FILE}")
    record = storage.read_json(path)
    manifest = fields(path, record, _MANIFEST)
    if manifest["dtype"] not in ("uint16", "uint32"):
        raise InputError(f"{path}: dtype: expected uint16 or uint32, got {manifest['dtype']!r}")
    shards = tuple(
        ShardInfo(**fields(path, own, _SHARD, f"shards.{number}.")) for number, own in enumerate(manifest["shards"])
    )
    for number, shard in enumerate(shards):
        inside(path, f"shards.{number}.bin", shard.bin, folders=False)
        inside(path, f"shards.{number}.spans", shard.spans, folders=False)
    own = [[*map(there.get, _AGREED)] for there in version_entry(source, "", "", shards)["shards"]]
    if own != [isinstance(there, dict) and [*map(there.get, _AGREED)] for there in listed["shards"]]:
        raise InputError(f"{storage.join(tokens, source)}: the manifest's shards are not those of {VERSION_FILE}")
    return Listed(source, entry, record, shards)


def listed_files(version: Mapping[str, Any]) -> dict[str, str]:
    """Path below the run → SHA-256 of every file that a ``VERSION.json`` lists."""
    files = {}
    for source in version["sources"].values():
        files[f"tokens/{source['manifest']}"] = source["sha256"]
        for shard in source["shards"]:
            files[f"tokens/{shard['bin']}"] = shard["sha256"]
            files[f"tokens/{shard['spans']}"] = shard["spans_sha256"]
    return files
