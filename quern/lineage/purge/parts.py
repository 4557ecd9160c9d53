"""What a purge does beside the tokens: tombstones, texts, pages of training runs, the audit log.

Each part may be done again after it was cut off, and returns plain data for the report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from quern import storage
from quern.lineage.index.changes import changes_file
from quern.lineage.purge.audit import Purge, append
from quern.lineage.purge.clean import Cleaned, clean
from quern.lineage.purge.files import Change, changes_since, read_note, version_changes
from quern.lineage.purge.journal import Intent
from quern.lineage.purge.pages import clean_forensics
from quern.lineage.purge.remember import Signatures, remember
from quern.lineage.purge.transaction import Parts
from quern.tokenize.corpus_version import read_version
from quern.train.consumers import read_consumers

__all__ = ["all_parts", "told"]

_MANIFEST = re.compile(r"manifest(?:\.v([1-9][0-9]*))?\.json")


def all_parts() -> Parts:
    """The parts of every purge, and of every recovery of one."""
    return Parts(remember=_remember, clean=_clean, forensics=_forensics, audit=_audit)


def told(run: str, intent: Intent) -> list[str]:
    """The training runs that a purge of ``run`` tells: those given, and those that have registered with the run."""
    known = [own.train_run for own in read_consumers(storage.split(run)[1])] if storage.is_local(run) else []
    there = (own for own in known if own not in intent.train_runs)
    return [*intent.train_runs, *dict.fromkeys(there)]


def _remember(run: str, intent: Intent, condemned: pa.Table) -> dict[str, Any]:
    path = remember(
        intent.purge_list, intent.purge_list_name, condemned, Signatures(run) if intent.signatures else None
    )
    return {"file": path, "documents": len(condemned)}


def _clean(run: str, intent: Intent, condemned: pa.Table) -> dict[str, Any]:
    return _reported(clean(run, condemned, intent.id))


def _forensics(run: str, intent: Intent, condemned: pa.Table) -> dict[str, Any]:
    found = _reported(clean_forensics(run, told(run, intent), condemned, intent.id))
    return {"files": found["files"], "notes": found["notes"]}


def _reported(cleaned: Cleaned) -> dict[str, Any]:
    return {"texts": cleaned.texts, "files": len(cleaned.changes), "notes": list(cleaned.notes)}


def _audit(run: str, intent: Intent, condemned: pa.Table) -> dict[str, Any]:
    path = remember(  # it stands: this is its name and its checksum
        intent.purge_list, intent.purge_list_name, condemned, Signatures(run) if intent.signatures else None
    )
    folder = intent.purge_list if not storage.is_local(intent.purge_list) else os.path.abspath(intent.purge_list)
    changes = list(_token_changes(run, intent))
    for name in ("cleaned", "pages"):
        changes += changes_since(run, read_note(run, intent.id, name) or {})
    purge = Purge(
        id=intent.id,
        time=intent.at,
        reason=intent.reason,
        selection=intent.selection,
        mode=intent.mode,
        duplicates=intent.duplicates,
        version_before=intent.before,
        version_after=intent.after,
        purge_list={"list": folder, "file": path.rsplit("/", 1)[-1], "sha256": storage.sha256(path)},
        train_runs=told(run, intent),
        counts=intent.counts,
    )
    entry = append(run, purge, condemned, changes)
    return {"entry": entry.number, "sha256": entry.sha256}


def _token_changes(run: str, intent: Intent) -> Iterator[Change]:
    """What the new version lists in the place of what. The manifests it took the place of still stand."""
    if not intent.makes_version:
        return
    tokens = storage.join(run, "tokens")
    version = read_version(tokens)
    old = {}
    for stream in intent.touched:
        folder = storage.join(tokens, stream)
        names = (own.rsplit("/", 1)[-1] for own in storage.list_files(folder))
        found = [(int(match[1] or 1), match[0]) for name in names if (match := _MANIFEST.fullmatch(name))]
        before = [name for number, name in sorted(found) if number <= intent.before]
        if before:
            path = storage.join(folder, before[-1])
            shards = [
                {key: f"{stream}/{own[key]}" if key in ("bin", "spans") else own[key] for key in own}
                for own in storage.read_json(path)["shards"]
            ]
            old[stream] = {"manifest": f"{stream}/{before[-1]}", "sha256": storage.sha256(path), "shards": shards}
    new = {stream: version["sources"][stream] for stream in old}
    yield from version_changes({"sources": old}, {"sources": new})
    name = f"tokens/{changes_file(intent.after)}"
    yield Change(name, None, storage.sha256(storage.join(run, name)))
