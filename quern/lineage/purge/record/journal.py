"""The journal of a purge, written before any change: ``RUN/.purge``.

``intent.json`` is written last and removed first. While it exists, a purge must be finished or undone; other files
without it were left by a purge that had not begun, or had ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import NoneType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.errors import InputError
from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA
from quern.lineage.purge.tables.files import PURGE_FOLDER as FOLDER
from quern.storage.parquet import publish_table, read_table
from quern.tokenize.corpus_version import inside

__all__ = [
    "FOLDER",
    "RESTORED_TOKENS",
    "Intent",
    "discard",
    "is_there",
    "is_under_way",
    "path_of",
    "read_deletion_set",
    "read_intent",
    "read_note",
    "write_intent",
]

_INTENT, _HELD = "intent.json", "held.json"
#: Where the tokens of restored documents wait.
RESTORED_TOKENS = "restored_tokens.parquet"


@dataclass(frozen=True)
class Intent:
    """The parameters of a purge."""

    id: str
    """Its own, for the audit."""
    before: int
    """The corpus version it begins with."""
    after: int
    """The one it makes; ``before`` where nothing of the deletion set has tokens."""
    mode: str
    duplicates: str
    selection: Mapping[str, Any]
    """As given."""
    reason: str | None
    at: str
    """When it began, ISO 8601 in UTC."""
    purge_list: str
    """The folder of the tombstones."""
    purge_list_name: str
    """The tombstones' file in it."""
    train_runs: tuple[str, ...] = ()
    """Given or registered; their pages are cleaned."""
    similar: bool = False
    """Whether the tombstones hold signatures too."""
    remembers: bool = True
    """Whether there is a document that the purge list does not hold yet."""
    touched: Mapping[str, list[int]] = field(default_factory=dict)
    """Stream → positions of the shards that are written again."""
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def makes_version(self) -> bool:
        """Whether the purge changes tokens and so makes a new version."""
        return self.after != self.before


def path_of(run: str, name: str) -> str:
    """A file of the folder."""
    return storage.join(run, FOLDER, name)


def write_intent(run: str, intent: Intent, tables: Mapping[str, pa.Table], notes: Mapping[str, Any]) -> None:
    """Write it down, the tables and notes (plain data) by name; from the end of this call on the purge is under way."""
    for name, table in tables.items():
        publish_table(path_of(run, f"{name}.parquet"), table)
    for name, note in notes.items():
        storage.write_json(path_of(run, f"{name}.json"), note)
    storage.write_json(path_of(run, _INTENT), asdict(intent))


def is_under_way(run: str) -> bool:
    """Whether a purge is running or was interrupted."""
    return storage.is_file(path_of(run, _INTENT))


def read_intent(run: str) -> Intent | None:
    """The purge under way in a run; None: none is.

    Raises:
        InputError: it cannot be read.
    """
    path = path_of(run, _INTENT)
    if not storage.exists(path):
        return None
    record = storage.read_json(path)
    try:
        intent = Intent(**{**record, "train_runs": tuple(record["train_runs"])})
    except (TypeError, KeyError) as error:
        raise InputError(f"{path}: is not of a purge: {error}") from None
    _check(path, intent)
    return intent


def _check(path: str, intent: Intent) -> None:
    """Raise if the journal has anything that no purge writes, since recovery removes and writes files by it."""
    for own in fields(Intent):
        value, expected = getattr(intent, own.name), _KINDS.get(own.name, str)
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            raise InputError(f"{path}: {own.name}: is not of a purge, got {value!r:.60}")
    if intent.before < 1 or intent.after - intent.before not in (0, 1):
        raise InputError(f"{path}: after: expected version {intent.before} or the one after it, got {intent.after}")
    inside(path, "purge_list_name", intent.purge_list_name, folders=False)
    for train_run in intent.train_runs:
        if not isinstance(train_run, str):
            raise InputError(f"{path}: train_runs: expected folders, got {train_run!r:.60}")


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("before", "after"), int), **dict.fromkeys(("similar", "remembers"), bool),
    **dict.fromkeys(("selection", "touched", "counts"), Mapping), "train_runs": tuple, "reason": (str, NoneType),
}  # fmt: skip


def read_deletion_set(run: str) -> pa.Table:
    """The documents of the purge under way: ``DELETION_SET_SCHEMA``.

    Raises:
        InputError: it is missing, cannot be read, or is no such table.
    """
    path = path_of(run, "condemned.parquet")
    table = read_table(path, missing="is missing")
    if table.schema != DELETION_SET_SCHEMA:
        raise InputError(f"{path}: is not of a purge: its columns are {', '.join(table.schema.names)[:200]}")
    for name in ("source", "partition"):  # files of these names are written anew
        for value in pc.unique(table[name]).to_pylist():
            inside(path, name, value, folders=False)
    return table


def read_note(run: str, name: str) -> Any:
    """A note of the purge under way.

    Raises:
        InputError: it is missing or no JSON.
    """
    return storage.read_json(path_of(run, f"{name}.json"))


def is_there(run: str) -> bool:
    """Whether anything needs attention: a purge under way, left-over files, or old generations with readers."""
    return storage.is_folder(storage.join(run, FOLDER))


def discard(run: str, held: Mapping[str, Any] | None = None) -> None:
    """Remove the intent, and then what stood beside it. ``held``: old generations that are being read, to be noted so
    that whoever comes next looks again."""
    if held:
        storage.write_json(path_of(run, _HELD), held)
    storage.remove(path_of(run, _INTENT))
    for path in storage.list_files(storage.join(run, FOLDER)):
        if not (held and path == path_of(run, _HELD)):
            storage.remove(path)
    if not held:
        storage.remove_tree(storage.join(run, FOLDER))
