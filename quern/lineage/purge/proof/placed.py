"""Tells by name which files of a data run quern wrote, and lists the others."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from quern import storage
from quern.lineage.purge.record import audit, journal
from quern.lineage.purge.tables.row_groups import name_below
from quern.tokenize.selection.measures import PART, SCRATCH, listed_parts

__all__ = ["Kind", "strangers"]

Kind = Literal["file", "link", "special", "closed", "training run"]

_LEDGER = "ledger.jsonl"
_LATER = r"(?:\.v[1-9][0-9]*)?"
_TABLE = r"[^/.][^/]*\.parquet"
#: Every file of a run, as ARCHITECTURE.md lists them. Those of ``audit/`` have to belong to an entry, too, those of
#: ``.purge/`` to a purge under way, and parts of ``measures/`` have to be as a manifest lists them.
_PLACED = re.compile(
    "|".join(
        (
            r"run\.json|status\.json|stats\.json|report\.html|consumers\.jsonl|\.lock|\.lease\.json",
            rf"(?:verdicts|documents|signatures)/[^/]+/{_TABLE}",
            r"duplicates/(?:decisions|clusters)\.parquet",
            r"commits/(?:pages|duplicates|tokens|shards)/[^/]+/[^/.][^/]*\.json",
            r"tokens/(?:VERSION\.json|encoding\.tiktoken|(?:changes|decisions)\.v[1-9][0-9]*\.parquet)",
            rf"tokens/[^/]+/(?:manifest{_LATER}\.json|shard_[0-9]{{5,9}}{_LATER}\.(?:bin|spans\.parquet))",
            rf"measures/[a-z0-9][a-z0-9_-]*/(?:manifest\.json|{PART}|{SCRATCH})",
            r"audit/(?P<entry>[0-9]{5,9})\.(?:json|sig|parquet|files\.parquet)",
            r"\.purge/held\.json|(?P<purge>\.purge/[a-z_]+\.(?:json|parquet))",
            r"\.work/.*",  # a finding of its own
            r"lineage/(?:index\.json|\.lock|\.building-[0-9a-f]{32}/.*)",
            r"lineage/(?:segment|spans|duplicates)_[0-9a-f]{32}/[a-z_]+(?:_[0-9]+)?"
            r"(?:\.(?:json|high|low|numbers|values|starts|purged|[0-9]+))?",
        )
    ),
    re.DOTALL,
)
_IS_PART = re.compile(rf"measures/[^/]+/{PART}")
#: Folders of a run in which no training run stands.
_OWN = {"verdicts", "documents", "signatures", "duplicates", "commits", "tokens", "measures", "audit", "lineage"}
_OWN |= {".purge", ".work"}


def strangers(run: str, version: Mapping[str, Any] | None) -> Iterator[tuple[str, Kind]]:
    """Files in the folder of a run that quern did not write, by their names below the run.

    Links are told and never followed. A folder with ``ledger.jsonl`` is a training run: it is told, and nothing in it
    is. Temporary files are left out: those that a killed writer left are looked for elsewhere.
    """
    entries, under_way, parts = set(audit.numbers(run)), journal.is_under_way(run), listed_parts(run)
    encoding = (version or {}).get("encoding")
    ranks = f"tokens/{encoding.get('ranks')}" if isinstance(encoding, dict) else None
    for name, kind in _walk(run) if storage.is_local(run) else _listing(run):
        if kind == "file" and (storage.is_temporary(name) or name == ranks or _is_placed(name, entries, under_way)):
            if _IS_PART.fullmatch(name) and parts.get(name) != storage.sha256(storage.join(run, name)):
                yield name, kind
            continue
        yield name, kind


def _is_placed(name: str, entries: Collection[int], under_way: bool) -> bool:
    found = _PLACED.fullmatch(name)
    if found is None:
        return False
    if found["entry"] is not None:
        return int(found["entry"]) in entries
    return found["purge"] is None or under_way


def _walk(run: str) -> Iterator[tuple[str, Kind]]:
    root = storage.split(run)[1]
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            yield folder, "closed"
            continue
        own = folder.split("/", 1)[0] in _OWN
        if folder and not own and any(entry.name == _LEDGER and not entry.is_symlink() for entry in entries):
            yield folder, "training run"
            continue
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_symlink():
                yield name, "link"
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(name)
            else:
                yield name, "file" if entry.is_file(follow_symlinks=False) else "special"


def _listing(run: str) -> Iterator[tuple[str, Kind]]:
    names = [name_below(run, path) for path in storage.list_files(run)]
    training = sorted({name.removesuffix(f"/{_LEDGER}") for name in names if name.endswith(f"/{_LEDGER}")})
    training = [folder for folder in training if folder.split("/", 1)[0] not in _OWN]
    yield from ((folder, "training run") for folder in training)
    for name in names:
        if not any(name.startswith(f"{folder}/") for folder in training):
            yield name, "file"
