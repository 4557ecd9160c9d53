"""Checks for other files with purged text: unlisted, half-written, HTML pages; and for an incomplete purge list."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quern import storage
from quern.data_pipeline import report
from quern.data_pipeline.execution.run_directory import torn
from quern.data_pipeline.page.keys import KEY, contains
from quern.data_pipeline.stages.tombstones import read_purge_list
from quern.errors import InputError, QuernError, one_line
from quern.lineage.index.build import FOLDER as INDEX_FOLDER
from quern.lineage.index.changes import CHANGE_FILE
from quern.lineage.purge.apply.clean import REPORT
from quern.lineage.purge.apply.pages import pages, shown_in
from quern.lineage.purge.apply.superseded import MANIFEST, SHARD
from quern.lineage.purge.proof.check_audit import Purged
from quern.lineage.purge.proof.findings import Check
from quern.lineage.purge.record import journal
from quern.tokenize import reader_lock
from quern.tokenize.corpus_version import listed_files

__all__ = ["check_left_over", "check_pages", "check_purge_list"]


def check_left_over(run: str, version: Mapping[str, Any] | None) -> Check:
    """Check for files of older versions or of interrupted work."""
    check = Check("left over", "no file of an older version, of an unfinished purge or of a killed writer is left")
    if version is not None:
        held = _held(run) if storage.is_local(run) else set()
        try:
            for name, why in _unlisted(run, version, check):
                reader = "; a reader has it open: it can go when that ends" if name in held else ""
                check.found(name, f"{why}{reader}")
        except (KeyError, TypeError) as error:
            check.unknown.append(f"tokens/VERSION.json: is no whole list of a corpus version ({error})")
    if journal.is_under_way(run):
        check.found(f"{journal.FOLDER}/intent.json", "a purge was cut off, and is neither finished nor undone")
    if storage.is_folder(storage.join(run, ".work")):
        check.found(".work", "scratch of a killed driver, which may hold texts")
    if storage.is_local(run):
        for path in torn(run, besides=INDEX_FOLDER):  # which holds no text, and is made beside us
            name = os.path.relpath(path, storage.split(run)[1])
            check.found(name, "half a file of a killed writer, which may hold texts")
    else:
        check.unknown.append("uploads that were begun and never completed are not looked for; nobody can read them")
    return check


def _unlisted(run: str, version: Mapping[str, Any], check: Check) -> Iterator[tuple[str, str]]:
    listed = listed_files(version)
    base = storage.join(run, "tokens")
    for path in storage.list_files(base):
        check.counts["files"] += 1
        name = "tokens/" + path[path.rindex("/tokens/") + len("/tokens/") :]
        file = name.rsplit("/", 1)[-1]
        changes = CHANGE_FILE.fullmatch(file)
        if changes and int(changes[1]) > version["version"]:
            yield name, f"is of a version after {version['version']}, which is the newest"
        elif (SHARD.fullmatch(file) or MANIFEST.fullmatch(file)) and name not in listed:
            yield name, "is listed by no version any more"


def _held(run: str) -> set[str]:
    """Files that a manifest lists which a reader holds: its shared lock keeps us from taking it alone."""
    found = set()
    root = storage.split(run)[1]
    for path in storage.list_files(os.path.join(root, "tokens")):
        folder, file = path.rsplit("/", 2)[-2:]
        if not MANIFEST.fullmatch(file):
            continue
        free, lock = reader_lock.take_alone(path)
        reader_lock.release(lock)
        if free:
            continue
        found.add(f"tokens/{folder}/{file}")
        try:
            shards = storage.read_json(path)["shards"]
            found.update(f"tokens/{folder}/{shard[kind]}" for shard in shards for kind in ("bin", "spans"))
        except (InputError, KeyError, TypeError):
            continue
    return found


def check_purge_list(purged: Purged, purge_list: str | None) -> Check:
    """Check that later runs would drop everything purged. ``purge_list``: where it is now; None: where it was."""
    check = Check("purge list", "the purge list holds every purged doc_id, URL and text, for later runs")
    named = {entry["purge_list"]["list"] for entry in purged.entries if entry.get("purge_list")}
    lists = [purge_list] if purge_list is not None else sorted(named)
    if not lists:
        if purged.entries:
            check.unknown.append("the audit log names no purge list; give --purge-list")
        return check
    kinds = (("doc_id", purged.ids), ("canonical URL", purged.urls), ("text", purged.texts))
    missing = [np.ones(len(keys), bool) for _, keys in kinds]
    for path in lists:
        try:
            found = read_purge_list(path)
        except InputError as error:
            if storage.exists(path):
                check.found(path, str(error))
            else:
                check.found(path, "the purge list is gone: a later run may keep what was purged")
            continue
        except (QuernError, OSError) as error:
            check.unknown.append(f"{path}: cannot be read ({one_line(error, 200)})")
            continue
        for gone, (_, keys), held in zip(missing, kinds, (found.doc_ids, found.urls, found.texts), strict=True):
            gone &= ~contains(held.astype(KEY), keys)
    if check.findings or check.unknown:
        return check
    for (kind, keys), gone in zip(kinds, missing, strict=True):
        check.counts[f"{kind}s"] = len(keys)
        for at in np.flatnonzero(gone).tolist():
            doc_id = keys[at : at + 1].tobytes() if kind == "doc_id" else None
            key = "" if doc_id else f" (key {keys[at : at + 1].tobytes().hex()})"
            check.found(", ".join(lists), f"does not hold the {kind} of a purged document{key}", None, doc_id)
    return check


def check_pages(run: str, purged: Purged, train_runs: Sequence[str]) -> Check:
    """Check that neither the report nor a forensics page of a training run shows the text of a purged document."""
    check = Check("pages", "neither the report nor a forensics page shows the text of a purged document")
    found: dict[str, np.ndarray] = {}
    path = storage.join(run, REPORT)
    if storage.is_file(path):
        check.counts["pages"] += 1
        shown = report.shown_documents(storage.read_bytes(path).decode("utf-8", "replace"))
        if shown is None:
            check.unknown.append(f"{REPORT}: does not say whose texts it shows")
        found[REPORT] = np.array(sorted(shown or ()), KEY)
    for train_run in train_runs:
        if not storage.is_folder(train_run):
            check.unknown.append(f"{train_run}: no such training run here")
            continue
        for path in pages(train_run):
            check.counts["pages"] += 1
            found[path] = shown_in(storage.read_bytes(path))
    for page, doc_ids in found.items():
        check.found_each(page, "shows the text of a purged document", contains(purged.ids, doc_ids), doc_ids, None)
    return check
