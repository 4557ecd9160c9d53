"""Steps of a purge after the new version is published; each is idempotent."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.execution.run_directory import torn
from quern.data_pipeline.page.keys import keys_of
from quern.data_pipeline.page.url import url_key
from quern.data_pipeline.stages.tombstones import read_purge_list
from quern.errors import QuernError, one_line
from quern.lineage.index.changes import changes_file
from quern.lineage.index.decided import decisions_file
from quern.lineage.purge.apply.clean import Cleaned, clean
from quern.lineage.purge.apply.pages import clean_forensics
from quern.lineage.purge.apply.superseded import sweep
from quern.lineage.purge.record import audit, journal
from quern.lineage.purge.record.journal import Intent
from quern.lineage.purge.record.remember import Signatures, remember
from quern.lineage.purge.tables.files import FileChange, version_changes
from quern.tokenize.corpus_version import read_version

__all__ = ["TRAINING_IMPACT", "VERSION_BEFORE", "Clock", "clear", "finish", "holds_sketches", "is_remembered"]

#: The note of ``VERSION.json`` as it was.
VERSION_BEFORE = "version_before"
#: The note of who had read the documents.
TRAINING_IMPACT = "taint"


class Clock:
    """Times the parts of a purge in sequence: ``seconds`` by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to ``name``."""
        now = time.monotonic()
        self.seconds[name] = round(now - self._at, 3)
        self._at = now


def finish(run: str, intent: Intent, deletion_set: pa.Table, clock: Clock | None = None) -> dict[str, Any]:
    """Complete a purge whose version is published; return what was done as plain data.

    Raises:
        QuernError: a step failed; the purge is still under way, and goes on with it when it is taken up again.
    """
    report: dict[str, Any] = {}
    steps: dict[str, Callable[[], Any]] = {
        "tombstones": lambda: _remember(run, intent, deletion_set),
        "texts": lambda: clean(run, deletion_set, intent.id),
        "pages": lambda: clean_forensics(run, intent.train_runs, deletion_set, intent.id),
        "audit": lambda: _audit(run, intent, deletion_set, report),
        "anchor": lambda: audit.anchor(run),
        "superseded": lambda: _sweep(run),
        "record": lambda: journal.discard(run, report["superseded"]["held"]),
    }
    try:
        for step, act in steps.items():
            storage.check_guards()
            report[step] = act()
            if clock is not None:
                clock.lap(step)
    except Exception as error:
        why = one_line(error)
        raise QuernError(
            f"{run}: corpus version {intent.after} holds, but the purge is not at its end ({step}: {why}); the next "
            "command that may write to the run goes on with it"
        ) from error
    return {name: _plain(value) for name, value in report.items() if name not in ("anchor", "record")}


def clear(run: str) -> None:
    """If no purge is under way, remove the files of one that never began, and old generations without readers."""
    journal.discard(run, _sweep(run)["held"])


def holds_sketches(purge_list: str) -> bool:
    """Whether the purge list also drops documents similar to those it names."""
    return bool(storage.list_files(purge_list)) and bool(read_purge_list(purge_list).sketches)


def is_remembered(purge_list: str, deletion_set: pa.Table) -> bool:
    """Whether the purge list already has every document's id, URL and text hash."""
    if not storage.list_files(purge_list):
        return False
    known = read_purge_list(purge_list)
    urls = np.array([url_key(url) for url in deletion_set["canonical_url"].drop_null().to_pylist()], "S16")
    ids, texts = (keys_of(deletion_set[name].drop_null()) for name in ("doc_id", "post_filter_hash"))
    pairs = ((ids, known.doc_ids), (urls, known.urls), (texts, known.texts))
    return all(bool(np.isin(wanted, keys).all()) for wanted, keys in pairs)


def _remember(run: str, intent: Intent, deletion_set: pa.Table) -> str | None:
    """The file of tombstones; None where the list held them all."""
    if not intent.remembers:
        return None
    signatures = Signatures(run) if intent.similar else None
    path = remember(intent.purge_list, intent.purge_list_name, deletion_set, signatures)
    _remove_torn_tombstones(intent)
    return path


def _remove_torn_tombstones(intent: Intent) -> None:
    """What this very purge left in the list when it was killed while it wrote; others may be at work there."""
    if not storage.is_local(intent.purge_list):
        return
    own = f".{intent.purge_list_name.removesuffix('.parquet')}."
    for path in torn(intent.purge_list):
        if os.path.basename(path).startswith(own):
            storage.remove(path)


def _audit(run: str, intent: Intent, deletion_set: pa.Table, report: dict[str, Any]) -> str | None:
    """The path of the entry; None where nothing was done, and so there is nothing to tell."""
    tombstones: str | None = report["tombstones"]
    texts: Cleaned = report["texts"]
    pages: Cleaned = report["pages"]
    changes = [*texts.changes, *pages.changes]
    if intent.makes_version:
        before, now = journal.read_note(run, VERSION_BEFORE), read_version(storage.join(run, "tokens"))
        changes += version_changes(before, now)
        for name in (f"tokens/{changes_file(intent.after)}", f"tokens/{decisions_file(intent.after)}"):
            if storage.is_file(storage.join(run, name)):
                changes.append(FileChange(name, None, storage.sha256(storage.join(run, name))))
    if not changes and tombstones is None:
        return None
    impact, notes = journal.read_note(run, TRAINING_IMPACT), [*texts.notes, *pages.notes]
    entry = audit.append(run, intent, deletion_set, changes, _listed(intent, tombstones), impact, notes)
    return audit.path_of(run, entry.number)


def _listed(intent: Intent, tombstones: str | None) -> dict[str, str]:
    """The list, and what was added to it; nothing where it held them all."""
    if tombstones is None:
        return {"list": intent.purge_list}
    name = tombstones.rpartition("/")[2]
    return {"list": intent.purge_list, "file": name, "sha256": storage.sha256(tombstones)}


def _sweep(run: str) -> dict[str, Any]:
    gc.collect()  # readers of the old version that this process has forgotten
    return sweep(storage.join(run, "tokens"))


def _plain(value: Any) -> Any:
    if isinstance(value, Cleaned):
        return {
            "documents": value.texts, "files": [change.path for change in value.changes], "notes": list(value.notes),
        }  # fmt: skip
    return value
