"""Removes purged texts from the HTML pages that ``quern lineage forensics`` wrote in training runs.

The JSON beside them has figures and numbers of windows, and no text. A page can be made anew at any time, from what is
in the corpus then; so one that shows the text of a document to delete goes whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline import report
from quern.data_pipeline.execution.run_directory import remove_torn
from quern.data_pipeline.page.keys import KEY, contains, key_set, keys_of
from quern.lineage.forensics.file import FOLDER
from quern.lineage.purge.apply.clean import Cleaned
from quern.lineage.purge.tables.files import changes_since, note_before

__all__ = ["clean_forensics", "pages", "shown_in"]

_DOC_ID = re.compile(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


def pages(train_run: str) -> list[str]:
    """Every HTML page of a training run's ``forensics/``, sorted."""
    found = storage.list_files(storage.join(train_run, FOLDER))
    return [path for path in found if path.endswith((".html", ".htm"))]


def shown_in(page: bytes) -> np.ndarray:
    """S16[n], sorted: the documents whose text a page shows; of one that does not say whose, all that it names."""
    shown = report.shown_documents(page.decode("utf-8", "replace"))
    if shown is None:
        shown = {bytes.fromhex(found.decode()) for found in _DOC_ID.findall(page)}
    return key_set([np.array(sorted(shown), KEY)])


def clean_forensics(run: str, train_runs: Sequence[str], deletion_set: pa.Table, purge: str) -> Cleaned:
    """Remove the pages in ``forensics/`` of the training runs that show the text of a document to delete.

    Doing it again does nothing; ``purge`` as in :func:`quern.lineage.purge.apply.clean.clean`. A page that was written
    elsewhere (``--html FILE``) is not known, and stays.

    Returns their changes, by path; ``notes`` say how each page is made anew, and which training run is not there.
    """
    ids = key_set([keys_of(deletion_set["doc_id"])])
    before = note_before(run, purge, "pages", lambda: _showing(train_runs, ids))
    there = {storage.absolute(path) for train_run in train_runs for path in pages(train_run)}
    for path in sorted(before.keys() & there):  # whatever else the note names is no page
        storage.remove(path)
    for train_run in train_runs:
        if storage.is_local(train_run):  # what a killed writer of a page left
            remove_torn(storage.join(train_run, FOLDER))
    missing = [own for own in train_runs if not storage.is_folder(own)]
    notes = [f"{own}: no such training run here; its pages are as they were" for own in missing]
    notes += [
        f"{path}: showed purged documents and is removed; quern lineage forensics makes it anew" for path in before
    ]
    return Cleaned(0, tuple(changes_since(run, before)), tuple(notes))


def _showing(train_runs: Sequence[str], ids: np.ndarray) -> Iterator[str]:
    for train_run in train_runs:
        for path in pages(train_run):
            if contains(ids, shown_in(storage.read_bytes(path))).any():
                yield storage.absolute(path)
