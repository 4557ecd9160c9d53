"""Removes shards and manifests that the corpus version no longer lists, once no reader holds them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from quern import storage
from quern.errors import InputError
from quern.tokenize import reader_lock
from quern.tokenize.corpus_version import read_version

__all__ = ["MANIFEST", "SHARD", "sweep"]

SHARD = re.compile(r"shard_[0-9]{5,9}(?:\.v([1-9][0-9]*))?\.(?:bin|spans\.parquet)")
MANIFEST = re.compile(r"manifest(?:\.v([1-9][0-9]*))?\.json")


def sweep(tokens: str) -> dict[str, Any]:
    """Remove generations that are neither listed nor being read; idempotent.

    Gives back ``removed``, the number of files, and ``held``, stream → manifests of generations that are being read;
    their files are still there. On a store, which has no locks, nothing is held.

    Raises:
        InputError: VERSION.json is missing or none, or a manifest that is still read cannot be read.
    """
    record = read_version(tokens)
    local = storage.is_local(tokens)
    removed, held = 0, {}
    for stream, entry in sorted(record["sources"].items()):
        folder = storage.join(tokens, stream)
        names = {path.rpartition("/")[2] for path in storage.list_files(folder)}
        listed = {entry["manifest"].rpartition("/")[2], *_names(entry["shards"])}
        shards = _ours(names - listed, SHARD, record["version"])
        manifests = _ours(names - listed, MANIFEST, record["version"])
        with ExitStack() as stack:
            read = []
            for name in sorted(manifests) if local else ():
                free, lock = reader_lock.take_alone(os.path.join(storage.split(folder)[1], name))
                stack.callback(reader_lock.release, lock)
                if not free:
                    read.append(name)
            for name in read:
                manifest = storage.read_json(storage.join(folder, name))
                if not isinstance(manifest, dict) or not isinstance(manifest.get("shards"), list):
                    raise InputError(f"{storage.join(folder, name)}: shards: expected a list")
                shards -= set(_names(manifest["shards"]))
            for name in (*sorted(shards), *sorted(manifests - set(read))):  # a manifest after what it lists
                storage.remove(storage.join(folder, name))
                removed += 1
            if read:
                held[stream] = read
    return {"removed": removed, "held": held}


def _names(shards: list[Mapping[str, Any]]) -> Iterator[str]:
    for shard in shards:
        yield from (shard[key].rpartition("/")[2] for key in ("bin", "spans"))


def _ours(names: set[str], pattern: re.Pattern[str], version: int) -> set[str]:
    """Those that a version up to ``version`` has written."""
    found = ((name, pattern.fullmatch(name)) for name in names)
    return {name for name, match in found if match is not None and int(match[1] or 1) <= version}
