"""Finds objects whose URLs match a pattern, with few listings."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence

from fsspec.utils import glob_translate

from quern.remote.objects import Info, Objects

__all__ = ["matching"]

_MAGIC = re.compile(r"[*?\[]")


def matching(store: Objects, pattern: str) -> Iterator[str]:
    """Files on a store that match: folder by folder, so that only those are listed that can hold one."""
    parts = pattern.split("/")
    plain = next((index for index, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    base, rest = "/".join(parts[:plain]), parts[plain:]
    if not rest:
        if store.stat(pattern) is not None:
            yield pattern
        return
    if any("**" in part for part in rest):
        matches = re.compile(glob_translate("/".join(rest)))
        for name, info in store.listing(base):
            if info is not None and matches.match(name[len(base) + 1 :]):
                yield name
        return
    folders = [base]
    for part in rest[:-1]:
        folders = [name for name, info in _in_folders(store, folders, part) if info is None]
    yield from (name for name, info in _in_folders(store, folders, rest[-1]) if info is not None)


def _in_folders(store: Objects, folders: Sequence[str], part: str) -> Iterator[tuple[str, Info | None]]:
    matches = re.compile(glob_translate(part))
    for folder in folders:
        for name, info in store.listing(folder, recursive=False):
            if matches.match(posixpath.basename(name)):
                yield name, info
