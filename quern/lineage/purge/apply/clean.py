"""Removes the texts of documents to delete from a run's tables of texts and signatures, and from its report.

What stays of a document is its verdict, without text. Files are replaced whole, one after the other, and each step
looks at what there is: a purge that was killed does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from quern import storage
from quern.data_pipeline import report
from quern.data_pipeline.execution.commits import commit_path
from quern.data_pipeline.execution.run_directory import remove_torn
from quern.data_pipeline.page.keys import contains, key_set, keys_of
from quern.errors import QuernError, one_line
from quern.lineage.index.build import FOLDER as INDEX_FOLDER
from quern.lineage.limits import config_of
from quern.lineage.purge.tables.files import FileChange, changes_since, note_before
from quern.lineage.purge.tables.row_groups import opened
from quern.lineage.purge.tables.rows import by_partition

__all__ = ["REPORT", "TEXT_COLUMNS", "Cleaned", "clean"]

#: Columns of ``documents/`` that a purged document has null.
TEXT_COLUMNS = ("text", "extracted", "kept")
REPORT = "report.html"


@dataclass(frozen=True)
class Cleaned:
    """Counts of what a purge removed from files with texts."""

    texts: int
    """Documents to delete that have a row in ``documents/``, now without a text."""
    changes: tuple[FileChange, ...]
    """By path."""
    notes: tuple[str, ...]
    """What a person should know: a file that was not as its commit said, a report that could not be made anew."""


@dataclass(frozen=True)
class _Partition:
    """The documents to delete of a partition that came as far as to have a text: their sorted ids."""

    source: str
    name: str
    ids: np.ndarray

    @property
    def documents(self) -> str:
        return f"documents/{self.source}/{self.name}.parquet"

    @property
    def signatures(self) -> str:
        return f"signatures/{self.source}/{self.name}.parquet"


def clean(run: str, deletion_set: pa.Table, purge: str) -> Cleaned:
    """Remove the texts and signatures of the documents in ``deletion_set`` from the run, on any store.

    Of every touched partition ``documents/`` is written anew with :data:`TEXT_COLUMNS` null for them, ``signatures/``
    without their rows, and the commit with the new checksums; the report is made anew where it shows one of them.
    Scratch of killed writers goes. Doing it again changes nothing. The caller holds the run's lock.

    Memory: the ids, and a row group of each file in work.

    Args:
        run: the run, complete.
        deletion_set: rows of :data:`quern.lineage.purge.selection.deletion_set.DELETION_SET_SCHEMA`.
        purge: a name of this purge and of no other; by it a purge that goes on knows what was there before.

    Raises:
        InputError: a table cannot be read, or has not the columns of its kind.
    """
    _remove_scratch(run)
    partitions = _partitions(deletion_set)
    before = note_before(
        run,
        purge,
        "cleaned",
        lambda: [REPORT, *(path for own in partitions for path in (own.documents, own.signatures))],
    )
    texts = sum(storage.each(lambda own: _clean_partition(run, own, before), partitions, run))
    ids = key_set([keys_of(deletion_set["doc_id"])])
    notes = _clean_report(run, ids)
    changes = {change.path: change for change in changes_since(run, before)}
    for own in partitions:
        notes += _commit(run, own, before, changes)
    return Cleaned(texts, tuple(changes[path] for path in sorted(changes)), tuple(notes))


def _remove_scratch(run: str) -> None:
    """What killed drivers and writers left: a complete run has no use for it, and it may hold texts."""
    storage.remove_tree(storage.join(run, ".work"))
    remove_torn(run, besides=INDEX_FOLDER)  # which is made beside us, and holds no text


def _partitions(deletion_set: pa.Table) -> list[_Partition]:
    """By source and name; a document without a post_filter_hash never had a text."""
    rows = deletion_set.filter(pc.is_valid(deletion_set["post_filter_hash"])).select(["source", "partition", "doc_id"])
    return [_Partition(source, name, key_set([keys_of(own["doc_id"])])) for source, name, own in by_partition(rows)]


# ---- tables


def _clean_partition(run: str, own: _Partition, before: Mapping[str, str]) -> int:
    """Both tables; how many of the documents have a row among the texts."""
    texts = 0
    if own.documents in before:
        texts = _rewrite(run, own.documents, own.ids, _holds_text, _without_text, nullable=TEXT_COLUMNS)
    if own.signatures in before:
        _rewrite(run, own.signatures, own.ids, lambda rows, mask: True, lambda rows, mask: rows.filter(pa.array(~mask)))
    return texts


Rows = NDArray[np.bool_]


def _rewrite(
    run: str,
    name: str,
    ids: np.ndarray,
    holds: Callable[[pa.Table, Rows], bool],
    cleaned: Callable[[pa.Table, Rows], pa.Table],
    nullable: Sequence[str] = (),
) -> int:
    """Replace a table by one whose row groups are ``cleaned`` of the documents in ``ids``, if one of them still
    ``holds`` something of theirs; return how many rows are of them."""
    path = storage.join(run, name)
    with opened(path, ("doc_id", *nullable)) as table:
        masks = [
            contains(ids, keys_of(table.read_row_group(group, ["doc_id"])["doc_id"]))
            for group in range(table.num_row_groups)
        ]
        touched = [group for group, mask in enumerate(masks) if mask.any()]
        if any(holds(table.read_row_group(group, nullable), masks[group]) for group in touched):
            schema = table.schema_arrow
            for column in nullable:  # a purged text is null, whatever the writer promised of texts
                at = schema.get_field_index(column)
                schema = schema.set(at, schema.field(at).with_nullable(True))
            # with the settings of the pages' own writer
            with storage.publish(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
                for group, mask in enumerate(masks):
                    rows = table.read_row_group(group)
                    rows = cleaned(rows, mask) if mask.any() else rows
                    if len(rows):
                        writer.write_table(pa.Table.from_arrays(rows.columns, schema=schema), row_group_size=len(rows))
    return sum(int(mask.sum()) for mask in masks)


def _holds_text(rows: pa.Table, mask: Rows) -> bool:
    own = rows.filter(pa.array(mask))
    return any(own[name].null_count < len(own) for name in TEXT_COLUMNS)


def _without_text(rows: pa.Table, mask: Rows) -> pa.Table:
    gone = pa.array(mask)
    for name in TEXT_COLUMNS:
        at = rows.schema.get_field_index(name)
        column = rows.column(at)
        cleaned = pc.if_else(gone, pa.scalar(None, column.type), column)
        rows = rows.set_column(at, rows.schema.field(at).with_nullable(True), cleaned)
    return rows


# ---- what is committed


def _commit(run: str, own: _Partition, before: Mapping[str, str], changes: Mapping[str, FileChange]) -> Iterator[str]:
    """Put the new checksums into the partition's commit; say which files were not as it told before."""
    path = commit_path(run, "pages", own.source, own.name)
    if not storage.is_file(path):
        return
    entry = storage.read_json(path)
    outputs = dict(entry["outputs"])
    for name in (own.documents, own.signatures):
        if name not in outputs or name not in before:
            continue
        now = changes[name].after if name in changes else before[name]
        if outputs[name] not in (before[name], now):
            yield f"{name}: was not what its commit says, before this purge: its SHA-256 was {before[name]}"
        if now is not None:
            outputs[name] = now
    if outputs != entry["outputs"]:
        storage.write_json(path, {**entry, "outputs": outputs})


# ---- the report


def _clean_report(run: str, ids: np.ndarray) -> list[str]:
    """Make ``report.html`` anew where it shows a text of one of the documents, or does not say whose it shows."""
    path = storage.join(run, REPORT)
    if not storage.is_file(path):
        return []
    shown = report.shown_documents(storage.read_bytes(path).decode("utf-8", "replace"))
    if shown is not None and not contains(ids, np.array(sorted(shown), ids.dtype)).any():
        return []
    stats = storage.join(run, "stats.json")
    why = "there is no stats.json"
    if storage.is_file(stats):
        try:
            report.write_report(run, storage.read_json(stats), seed=_seed(run))
            return []
        except (QuernError, OSError, KeyError, TypeError, ValueError) as error:
            why = one_line(error, 200)
    storage.remove(path)
    return [f"{REPORT}: showed texts of purged documents and is removed; it could not be made anew: {why}"]


def _seed(run: str) -> int:
    seed = config_of(storage.read_json(storage.join(run, "run.json"))).get("seed")
    return seed if isinstance(seed, int) else 0
