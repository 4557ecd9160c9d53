"""The append-only audit log of a data run: what was purged, when, why, and from which files.

``RUN/audit/<n>.json`` is entry n, numbered from 00001. Beside it stand ``<n>.parquet``, the documents to delete, and
``<n>.files.parquet``, every file that was changed with its SHA-256 before and after; the entry has the SHA-256 of both,
and that of the entry before it, so that the last entry vouches for all; ``tokens/VERSION.json`` has that of the last,
and ``<n>.sig`` its HMAC with a key that is not in the run, if somebody has signed it.

No text of a page is in it. It names documents by doc_id, canonical URL and text hash, as the verdicts do for as long as
the run stands. ``selection`` and ``reason`` are what the person gave, as given.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from quern import __version__, storage
from quern.data_pipeline.page.keys import key_set, keys_of
from quern.errors import InputError, QuernError
from quern.lineage.purge.record.journal import Intent
from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA, WHY
from quern.lineage.purge.tables.files import FileChange
from quern.storage.parquet import publish_table
from quern.tokenize.shard_format import VERSION_FILE

__all__ = [
    "CHANGE_SCHEMA",
    "FOLDER",
    "Entry",
    "anchor",
    "append",
    "check_anchor",
    "digest_of",
    "is_signed",
    "last_entry",
    "numbers",
    "path_of",
    "read_entry",
    "read_key",
    "sign",
]

FOLDER = "audit"
FORMAT = 1

CHANGE_SCHEMA = pa.schema(
    [pa.field("path", pa.string(), nullable=False), pa.field("before", pa.string()), pa.field("after", pa.string())]
)
_NAME = re.compile(r"([0-9]{5,9})\.json")
_ROW_GROUP = 1 << 16
_KEY_BYTES = (32, 4096)


@dataclass(frozen=True)
class Entry:
    """An existing entry of the log."""

    number: int
    record: dict[str, Any] = field(repr=False)
    sha256: str
    """Of the JSON file."""


def path_of(run: str, number: int, end: str = ".json") -> str:
    """The path of entry ``number``, or of the table ``end`` (``.parquet``, ``.files.parquet``) beside it."""
    return storage.join(run, FOLDER, f"{number:05d}{end}")


def numbers(run: str) -> list[int]:
    """The numbers of all entries, ascending."""
    names = (path.rsplit("/", 1)[-1] for path in storage.list_files(storage.join(run, FOLDER)))
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_entry(run: str, number: int) -> Entry:
    """Entry ``number``.

    Raises:
        InputError: it is not there, or no entry of an audit log.
    """
    path = path_of(run, number)
    try:
        data = storage.read_bytes(path)
        record = json.loads(data)
    except FileNotFoundError:
        raise InputError(f"{path}: no such entry") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(record, dict) or record.get("kind") != "purge" or record.get("format") != FORMAT:
        raise InputError(f"{path}: expected an entry of a purge in format {FORMAT}")
    return Entry(number, record, hashlib.sha256(data).hexdigest())


def last_entry(run: str) -> Entry | None:
    """The newest entry; None where there is none."""
    found = numbers(run)
    return read_entry(run, found[-1]) if found else None


def append(
    run: str, intent: Intent, deletion_set: pa.Table, changes: Iterable[FileChange],
    purge_list: Mapping[str, str] | None, training_impact: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
) -> Entry:  # fmt: skip
    """Add the entry of a purge, and return it; if the last entry is of this very purge, that one.

    ``purge_list``: ``list`` (where it is); ``file`` (below it, or its path) and ``sha256`` of what was added, if
    anything was. ``training_impact``: what was known, before anything changed, of who had read the documents.

    Tables first, the entry last: it appears whole, under a number that was free. The caller holds the run's lock.

    Raises:
        QuernError: another process has added an entry meanwhile.
    """
    last = last_entry(run)
    if last is not None and last.record["id"] == intent.id:
        return last
    number = last.number + 1 if last is not None else 1
    documents = deletion_set.select(DELETION_SET_SCHEMA.names).cast(DELETION_SET_SCHEMA).sort_by("doc_id")
    files = pa.Table.from_pylist([vars(change) for change in sorted(changes)], CHANGE_SCHEMA)
    tables = {".parquet": documents, ".files.parquet": files}
    for end, table in tables.items():
        publish_table(path_of(run, number, end), table, row_group_size=_ROW_GROUP, version="2.6")
    sums = {end: storage.sha256(path_of(run, number, end)) for end in tables}
    whys = dict(zip(*(documents["why"].value_counts().flatten()[at].to_pylist() for at in (0, 1)), strict=True))
    record = {
        "format": FORMAT,
        "kind": "purge",
        "number": number,
        "previous": last.sha256 if last is not None else None,
        "quern": __version__,
        "id": intent.id,
        "time": intent.at,
        "reason": intent.reason,
        "selection": dict(intent.selection),
        "mode": intent.mode,
        "duplicates": intent.duplicates,
        "version_before": intent.before,
        "version_after": intent.after,
        "documents": {
            "count": len(documents),
            "by_why": {why: whys.get(why, 0) for why in WHY},
            "digest": digest_of(documents["doc_id"]),
            "sha256": sums[".parquet"],
        },
        "restored": intent.counts.get("documents_restored", 0),
        "files": {"count": len(files), "sha256": sums[".files.parquet"]},
        "purge_list": purge_list and {**purge_list, "list": storage.absolute(purge_list["list"])},
        "train_runs": list(intent.train_runs),
        "taint": training_impact,
        "notes": list(notes),
    }
    data = (json.dumps(record, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()
    path = path_of(run, number)
    try:
        storage.create_bytes(path, data)
    except FileExistsError:
        raise QuernError(
            f"{path}: another process has added this entry meanwhile; run the same command again"
        ) from None
    return Entry(number, record, hashlib.sha256(data).hexdigest())


def anchor(run: str) -> None:
    """Write number and SHA-256 of the last entry into ``tokens/VERSION.json``. The caller holds the run's lock."""
    path, last = storage.join(run, "tokens", VERSION_FILE), last_entry(run)
    if last is None or not storage.is_file(path):
        return
    record, told = storage.read_json(path), {"entry": last.number, "sha256": last.sha256}
    if record.get("audit") != told:
        storage.write_json(path, {**record, "audit": told})


def check_anchor(version: Mapping[str, Any], last: Entry | None) -> str | None:
    """How the last entry differs from the one that ``VERSION.json`` names; None if it does not, or none is named."""
    told = version.get("audit")
    if told is None:
        return None
    if not isinstance(told, dict) or not {"entry", "sha256"} <= told.keys():
        return "audit: expected the number and the SHA-256 of the last entry of the audit log"
    if last is None or told["entry"] != last.number:
        return f"names entry {told['entry']} as the last of the audit log, whose last is {last.number if last else 0}"
    if told["sha256"] != last.sha256:
        return (
            f"entry {last.number} of the audit log was changed, or one before it: its SHA-256 is not the one told here"
        )
    return None


def read_key(path: str) -> bytes:
    """The key in a file (all of its bytes).

    Raises:
        InputError: it cannot be read, or is too short or too long to be one.
    """
    least, most = _KEY_BYTES
    with storage.reading(path), open(path, "rb") as file:
        key = file.read(most + 1)
    if not least <= len(key) <= most:
        raise InputError(f"{path}: a key has {least} to {most} bytes, got {len(key) if len(key) <= most else 'more'}")
    return key


def sign(run: str, entry: Entry, key: bytes) -> None:
    """Sign the last entry of a log that the caller has verified."""
    storage.publish_bytes(path_of(run, entry.number, ".sig"), f"{_signature(entry, key)}\n".encode())


def is_signed(run: str, entry: Entry, key: bytes) -> bool | None:
    """Whether ``key`` has signed the entry as it stands, and with it all before it; None if nobody has signed it."""
    try:
        found = storage.read_bytes(path_of(run, entry.number, ".sig")).strip()
    except FileNotFoundError:
        return None
    return hmac.compare_digest(found, _signature(entry, key).encode())


def _signature(entry: Entry, key: bytes) -> str:
    return hmac.digest(key, f"quern audit {entry.number} {entry.sha256}".encode(), "sha256").hex()


def digest_of(doc_ids: pa.Array | pa.ChunkedArray | np.ndarray) -> str:
    """Hex SHA-256 of all doc_ids, 16 bytes each, sorted: the same for the same set of documents."""
    ids = doc_ids if isinstance(doc_ids, np.ndarray) else key_set([keys_of(doc_ids)])
    return hashlib.sha256(ids.tobytes()).hexdigest()
