"""Checks the audit log: numbering, chain of checksums, its tables, and versions that agree with the run."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.committed import Committed, read_committed
from quern.data_pipeline.execution.commits import TABLES
from quern.data_pipeline.page.keys import KEY, contains, key_set, keys_of
from quern.data_pipeline.page.url import url_key
from quern.errors import InputError
from quern.lineage.index.changes import CHANGES_SCHEMA, PURGED, changes_file
from quern.lineage.index.decided import decisions_file
from quern.lineage.purge.proof.findings import Check
from quern.lineage.purge.record import audit
from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA, WHY
from quern.lineage.purge.tables.files import checksum
from quern.lineage.purge.tables.row_groups import tables_in
from quern.storage.parquet import table_in

__all__ = ["Purged", "check_audit", "check_files"]


@dataclass
class Purged:
    """Everything that the audit log says was purged."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, KEY))
    """S16[n], sorted; so are the others."""
    texts: np.ndarray = field(default_factory=lambda: np.empty(0, KEY))
    """post_filter_hash."""
    urls: np.ndarray = field(default_factory=lambda: np.empty(0, KEY))
    """:func:`url_key` of canonical URLs."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    """Path → what it was after the last purge that changed it."""


def check_audit(
    run: str, version: Mapping[str, Any] | None, key: bytes | None = None, *, to_sign: bool = False
) -> tuple[Purged, Check]:
    """Read all entries.

    Args:
        version: the run's ``VERSION.json``, None if it has none.
        key: of the signatures, all of which have to be of it; and the last entry needs one, unless it is ``to_sign``.
    """
    check = Check("audit", "the audit log is whole, and every corpus version that purged stands in it")
    purged = Purged()
    ids, texts, urls = [], [], []
    previous, before, last = None, None, None
    numbers = audit.numbers(run)
    for expected, number in enumerate(numbers, 1):
        name = f"{audit.FOLDER}/{number:05d}.json"
        if number != expected:
            check.found(name, f"expected entry {expected} next: one is missing")
            break
        try:
            entry = audit.read_entry(run, number)
            record, last = entry.record, entry
            if record["previous"] != previous:
                check.found(name, "its entry before is not the one that it was appended to")
            if before is not None and record["version_before"] < before:
                check.found(name, f"began at version {record['version_before']}, after one that ended at {before}")
            previous, before = entry.sha256, record["version_after"]
            if key is not None and audit.is_signed(run, entry, key) is False:
                check.found(f"{audit.FOLDER}/{number:05d}.sig", "is not of this key and the entry as it stands")
            table = _documents(run, number, record, check)
            if table is not None:
                ids.append(keys_of(table["doc_id"]))
                texts.append(keys_of(table["post_filter_hash"]))
                urls.append(np.array([url_key(url) for url in table["canonical_url"].drop_null().to_pylist()], KEY))
            for path, after in _files(run, number, record, check):
                purged.files[path] = after
            purged.entries.append(record)
            check.counts["entries"] += 1
        except InputError as error:
            check.found(name, str(error))
        except (KeyError, TypeError, ValueError) as error:
            check.found(name, f"is no whole entry ({error})")
    purged.ids, purged.texts, purged.urls = key_set(ids), key_set(texts), key_set(urls)
    check.counts["documents"] = len(purged.ids)
    if key is not None and last is not None and not to_sign and audit.is_signed(run, last, key) is None:
        check.found(f"{audit.FOLDER}/{last.number:05d}.sig", "is missing: the last entry is not signed")
    if version is not None:
        if (fault := audit.check_anchor(version, last)) is not None:
            check.found("tokens/VERSION.json", fault)
        elif numbers and version.get("audit") is None:
            check.notes.append("the audit log is not anchored in tokens/VERSION.json: an edit of its end is not seen")
        _check_versions(run, version, purged, check)
    return purged, check


def _table(run: str, number: int, end: str, sha256: str, schema: pa.Schema, check: Check) -> pa.Table | None:
    """A table beside an entry, if it is the one that was written."""
    path = audit.path_of(run, number, end)
    name = f"{audit.FOLDER}/{number:05d}{end}"
    try:
        data = storage.read_bytes(path)
    except FileNotFoundError:
        check.found(name, "is missing")
        return None
    if hashlib.sha256(data).hexdigest() != sha256:
        check.found(name, "is not what was written: its SHA-256 is not the one in its entry")
    try:
        return table_in(data, schema)
    except InputError as error:
        check.found(name, f"cannot be read: {error}")
        return None


def _documents(run: str, number: int, record: Mapping[str, Any], check: Check) -> pa.Table | None:
    told = record["documents"]
    table = _table(run, number, ".parquet", told["sha256"], DELETION_SET_SCHEMA, check)
    if table is None:
        return None
    name = f"{audit.FOLDER}/{number:05d}.parquet"
    own = key_set([keys_of(table["doc_id"])])
    whys = Counter(table["why"].to_pylist())
    if len(table) != told["count"] or audit.digest_of(own) != told["digest"]:
        check.found(name, f"has {len(table)} documents that are not the {told['count']} of its entry")
    if {why: whys.get(why, 0) for why in WHY} != told["by_why"]:
        check.found(name, "its documents are condemned for other reasons than its entry counts")
    return table


def _files(run: str, number: int, record: Mapping[str, Any], check: Check) -> Iterator[tuple[str, str | None]]:
    table = _table(run, number, ".files.parquet", record["files"]["sha256"], audit.CHANGE_SCHEMA, check)
    if table is not None:
        yield from zip(table["path"].to_pylist(), table["after"].to_pylist(), strict=True)


def _check_versions(run: str, version: Mapping[str, Any], purged: Purged, check: Check) -> None:
    """What later versions purged is in the log: it cannot have been cut at its end."""
    number = version.get("version")
    told = {record["version_after"] for record in purged.entries if record["version_after"] != record["version_before"]}
    if version.get("kind") in ("mask", "rewrite") and number not in told:
        check.found("tokens/VERSION.json", f"version {number} ({version['kind']}) has no entry in the audit log")
    for later in range(2, number + 1 if isinstance(number, int) else 2):
        name = f"tokens/{changes_file(later)}"
        path = storage.join(run, name)
        if not storage.exists(path):
            if later in told:
                check.found(name, "is missing: nobody can say what this version purged")
            continue
        try:
            rows = table_in(storage.read_bytes(path), CHANGES_SCHEMA)
            ids, taken = keys_of(rows["doc_id"]), pc.equal(rows["action"], PURGED).to_numpy()
            gone = taken & ~contains(_displaced(run, later), ids)
        except InputError as error:
            check.found(name, f"cannot be read: {error}")
            continue
        check.counts["purged in versions"] += int(gone.sum())
        unsaid = gone & ~contains(purged.ids, ids)
        check.found_each(name, "was purged, and no entry of the audit log says so", unsaid, ids)


def _displaced(run: str, version: int) -> np.ndarray:
    """Documents (S16, sorted) that a version removed as duplicates of restored ones, and that are not in the deletion
    set."""
    path = storage.join(run, "tokens", decisions_file(version))
    if not storage.exists(path):
        return key_set([])
    rows = table_in(storage.read_bytes(path), pa.schema([CHANGES_SCHEMA.field("doc_id")]))
    return key_set([keys_of(rows["doc_id"])])


def check_files(run: str, purged: Purged) -> Check:
    """Whether tables and tokens are still the files that were committed and that the last purge left."""
    check = Check("files", "tables and tokens are the files that the commits and the audit log name")
    kinds = ("documents", "signatures", "tokens")  # pages are judged by what they show
    left = {path: after for path, after in purged.files.items() if after and path.split("/", 1)[0] in kinds}
    try:
        committed = read_committed(run)
    except InputError as error:
        check.found("commits", str(error))
        committed = Committed({}, None)
    if committed.fault is not None:
        check.found("commits/pages", committed.fault)
    wanted = sorted({*left, *committed.tables})
    for path, now in zip(wanted, storage.each(lambda path: checksum(run, path), wanted, run), strict=True):
        check.counts["files"] += 1
        if now is None:
            check.found(path, "is missing")
        elif path in left and now != left[path]:
            check.found(path, "is not as the purge left it: its SHA-256 is not the one in the audit log")
        elif (told := committed.tables.get(path)) is not None and now != told:
            check.found(path, "is not as it was committed: its SHA-256 is not the one in its commit")
    there = {name for folder in TABLES for _, _, name in tables_in(run, folder)}
    for path in sorted(there.difference(committed.tables) if committed.tables else ()):
        check.found(path, "is named by no commit")
    return check
