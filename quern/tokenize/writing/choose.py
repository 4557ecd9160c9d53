"""Selects the documents to tokenize and those held out, by a join with the duplicate decisions.

A task takes a group of partitions and streams the decisions past their doc_ids once. It leaves one byte a row of each
``documents/<source>/<partition>.parquet`` in the scratch folder, which later tasks read beside the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.dedup.passes.facts import read_rows
from quern.data_pipeline.dedup.schemas import CLUSTERS, DECISIONS
from quern.data_pipeline.execution.commits import table_path
from quern.data_pipeline.page.keys import keys_of, places
from quern.errors import QuernError
from quern.storage.parquet import read_batches
from quern.tokenize.place import keyed_hashes, validation_limit

__all__ = [
    "JOIN_DOCUMENTS",
    "LEFT_OUT",
    "TRAIN",
    "VALIDATION",
    "choose",
    "chosen_documents",
    "group_partitions",
    "marked_texts",
]

LEFT_OUT, TRAIN, VALIDATION = 0, 1, 2

#: Kept documents a task joins at once: about 400 MB. The decisions are read once for so many.
JOIN_DOCUMENTS = 8_000_000

_JOIN_ROWS = 1 << 18
_TEXT_ROWS = 256


def group_partitions(kept: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of partitions in groups of at most ``limit`` kept documents (a larger partition stands alone)."""
    groups: list[list[int]] = []
    held = 0
    for index, count in enumerate(kept):
        if not groups or held + count > limit:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += count
    return groups


def choose(
    run_dir: str, partitions: Sequence[tuple[str, str]], seed: int, validation: float, scratch: str
) -> list[str]:
    """Write the choice of every partition of the group; return the SHA-256 of each.

    A document is tokenized iff it is kept and has no row in the decisions. It is held out iff the keyed hash of its
    cluster_id (else of its doc_id) is below ``validation``: near duplicates are never on both sides.
    """
    kept_flags, ids = [], []
    for source, partition in partitions:
        own, kept = [], []
        for batch in read_batches(table_path(run_dir, "documents", source, partition), ["doc_id", "kept"], _JOIN_ROWS):
            kept.append(batch["kept"].to_numpy(zero_copy_only=False))
            own.append(keys_of(batch["doc_id"])[kept[-1]])
        kept_flags.append(np.concatenate([np.empty(0, bool), *kept]))
        ids.append(np.concatenate([np.empty(0, "S16"), *own]))
    everything = np.concatenate(ids)
    order = np.argsort(everything, kind="stable")
    everything = everything[order]
    hashes = keyed_hashes(seed, "validation", _each(everything)).copy()
    for batch in read_batches(storage.join(run_dir, CLUSTERS), ["doc_id", "cluster_id"], _JOIN_ROWS):
        at = places(everything, keys_of(batch["doc_id"]))
        found = at >= 0
        hashes[at[found]] = keyed_hashes(seed, "validation", _each(keys_of(batch["cluster_id"])[found]))
    limit = validation_limit(validation)
    choice_sorted = np.where(hashes < np.uint64(limit), VALIDATION, TRAIN).astype(np.uint8)
    for batch in read_batches(storage.join(run_dir, DECISIONS), ["doc_id"], _JOIN_ROWS):
        at = places(everything, keys_of(batch["doc_id"]))
        choice_sorted[at[at >= 0]] = LEFT_OUT
    choices = np.empty_like(choice_sorted)
    choices[order] = choice_sorted
    digests = []
    ends = np.cumsum([len(own) for own in ids])
    for (source, partition), flag, choice in zip(partitions, kept_flags, np.split(choices, ends[:-1]), strict=True):
        flags = np.zeros(len(flag), np.uint8)
        flags[flag] = choice
        data = flags.tobytes()
        storage.publish_bytes(_choice_path(scratch, source, partition), data)
        digests.append(hashlib.sha256(data).hexdigest())
    return digests


def chosen_documents(
    run_dir: str, source: str, partition: str, scratch: str, *, only: int | None = None
) -> Iterator[tuple[bytes, str, int]]:
    """(doc_id, text, choice) of the partition's chosen documents, in file order, a few hundred texts at once."""
    flags = np.frombuffer(storage.read_bytes(_choice_path(scratch, source, partition)), np.uint8)
    wanted = flags != LEFT_OUT if only is None else flags == only
    for doc_ids, texts, choices in marked_texts(table_path(run_dir, "documents", source, partition), flags, wanted):
        yield from zip(doc_ids, texts, choices.tolist(), strict=True)


def marked_texts(
    path: str, marks: np.ndarray, wanted: np.ndarray
) -> Iterator[tuple[list[bytes], list[str], np.ndarray]]:
    """doc_ids, texts and marks of those rows of a table of texts that are ``wanted`` (bool[rows]), some at a time.

    Raises:
        QuernError: the table has another number of rows than ``marks``.
    """
    first = 0
    for batch in read_rows(path, ["doc_id", "text"], _TEXT_ROWS):
        rows = np.flatnonzero(wanted[first : first + len(batch)])
        taken = batch.take(pa.array(rows))
        yield taken["doc_id"].to_pylist(), taken["text"].to_pylist(), marks[first + rows]
        first += len(batch)
    if first != len(marks):
        raise QuernError(f"{path}: has {first} rows, {len(marks)} when its documents were looked up; start again")


def _choice_path(scratch: str, source: str, partition: str) -> str:
    return storage.join(scratch, "chosen", source, f"{partition}.u8")


def _each(ids: np.ndarray) -> Iterator[bytes]:
    """Every id with all of its 16 bytes (a NumPy item would lose trailing NULs)."""
    data = ids.tobytes()
    return (data[i : i + 16] for i in range(0, len(data), 16))
