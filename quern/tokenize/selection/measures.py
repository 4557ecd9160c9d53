"""The table of a selection: ``RUN/measures/<name>/part-00000.parquet`` and so on, and ``manifest.json``, which is
written last. A part has the documents of one table of texts, in its order."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import duckdb
import pyarrow as pa

from quern import storage
from quern.errors import InputError
from quern.storage.parquet import read_table

__all__ = ["FORMAT", "MANIFEST", "PART", "SCHEMA", "SCRATCH", "check_name", "checked_parts", "folder", "listed_parts",
           "part", "published", "read_manifest", "rows_of"]  # fmt: skip

#: Raised whenever the code would write another table from the same texts and parameters.
FORMAT = 1
MANIFEST = "manifest.json"
SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.binary(16), nullable=False),
        pa.field("log_weight", pa.float64(), nullable=False),
        pa.field("rank", pa.int64()),
        pa.field("chosen", pa.bool_(), nullable=False),
    ]
)
#: Names below the folder of a selection: of its parts, and of what its passes leave until the manifest is written.
PART = r"part-[0-9]{5,9}\.parquet"
SCRATCH = (
    r"\.work/(?:parameters\.json|driver\.json|log_ratio|"
    r"(?:counts-target|(?:placed|counts)-(?:run|target-[0-9]+)|weighed|chosen)/[0-9]{6,9})"
)
_KEYWORDS = (
    "SELECT 1 FROM duckdb_keywords() WHERE keyword_name = ? AND keyword_category IN ('reserved', 'type_function')"
)
_NAME = re.compile(r"(?!(?:documents|shards|spans)$)[a-z][a-z0-9_]{0,99}")  # as a condition on documents names it


def check_name(name: str) -> str:
    """The name of a selection.

    Raises:
        InputError: no folder of a selection can have it.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"--name: expected lower-case letters, digits and _, a letter first, 100 at most, and none of documents, "
            f"shards and spans, got {name!r:.120}"
        )
    with duckdb.connect() as connection:
        if connection.execute(_KEYWORDS, [name]).fetchone():
            raise InputError(f"--name: expected no keyword of SQL, which conditions could not name, got {name!r}")
    return name


def folder(run: str, name: str) -> str:
    """Where the table of a selection is."""
    return storage.join(run, "measures", name)


def part(run: str, name: str, number: int) -> str:
    """One file of the table."""
    return storage.join(folder(run, name), f"part-{number:05d}.parquet")


def published(run: str) -> list[str]:
    """The names of a run's selections that are complete."""
    paths = [path.split("/")[-2:] for path in storage.list_files(storage.join(run, "measures"))]
    return sorted(name for name, file in paths if file == MANIFEST and _NAME.fullmatch(name))


def read_manifest(run: str, name: str) -> dict[str, Any]:
    """The manifest of a selection that is complete.

    Raises:
        InputError: it is damaged.
    """
    path = storage.join(folder(run, name), MANIFEST)
    record = storage.read_json(path)
    parts = record.get("parts") if isinstance(record, dict) else None
    if not isinstance(parts, list) or not parts:
        raise InputError(f"{path}: parts: expected a list, got {parts!r:.60}")
    for number, own in enumerate(parts):
        if not isinstance(own, dict) or not all(isinstance(own.get(key), str) for key in ("table", "sha256")):
            raise InputError(f"{path}: parts.{number}: expected a table and its sha256, got {own!r:.60}")
    return dict(record)


def checked_parts(run: str, name: str) -> list[str]:
    """The files of the table of a selection, each of which has the bytes that its manifest tells.

    Raises:
        InputError: one has not, or the manifest is damaged.
    """
    root = folder(run, name)
    found = []
    for number, own in enumerate(read_manifest(run, name)["parts"]):
        found.append(file := part(run, name, number))
        if not storage.is_file(file) or storage.sha256(file) != own["sha256"]:
            told = f"is missing or changed: its SHA-256 is not the one in {storage.join(root, MANIFEST)}"
            raise InputError(f"{file}: {told}; remove {root} to have it written again")
    return found


def listed_parts(run: str) -> dict[str, str]:
    """The SHA-256 of each part that a manifest lists, by its name below the run; damaged manifests list none."""
    found: dict[str, str] = {}
    for name in published(run):
        with suppress(InputError):
            parts = enumerate(read_manifest(run, name)["parts"])
            found |= {f"measures/{name}/part-{number:05d}.parquet": own["sha256"] for number, own in parts}
    return found


def rows_of(run: str, table: str, doc_id: bytes) -> list[dict[str, Any]]:
    """``name``, ``log_weight``, ``rank`` and ``chosen`` of a document by each selection that has it; ``table``:
    ``<source>/<partition>.parquet``, where its text is.

    Raises:
        InputError: a manifest or a part is damaged.
    """
    found = []
    for name in published(run):
        parts = read_manifest(run, name)["parts"]
        for number in (number for number, own in enumerate(parts) if own["table"] == table):
            rows = read_table(part(run, name, number), SCHEMA.names)
            at = rows["doc_id"].index(pa.scalar(doc_id, pa.binary(16))).as_py()
            found += [{"name": name, **row} for row in rows.slice(at, int(at >= 0)).drop(["doc_id"]).to_pylist()]
    return found
