"""Writes tombstones of purged documents outside of the run, for the ``purge_list`` of later runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.page.document import SIGNATURE_SCHEMA
from quern.data_pipeline.stages.tombstones import MADE_WITH, PURGE_SCHEMA
from quern.errors import InputError
from quern.lineage.purge.tables.row_groups import GONE
from quern.lineage.purge.tables.rows import by_partition
from quern.storage.parquet import open_table, read_batches
from quern.tokenize.corpus_version import inside

__all__ = ["Signatures", "purge_list_of", "remember", "tombstones_name"]

#: Of whom a file of tombstones is, in its metadata.
_OF = b"quern.purge"
_SKETCH = ("signature", "shingles")
_BATCH = 1024


class Signatures:
    """Near-duplicate signatures of a run, for tombstones that also match similar documents.

    Only pages that passed all gates have one, whether they were kept or removed as duplicates; a text with fewer words
    than a shingle has none.

    Raises:
        InputError: the run has none.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        config = storage.read_json(storage.join(run, "run.json")).get("config", {})
        self.config = DuplicatesConfig.model_validate(config.get("duplicates", {}))
        if not self.config.near:
            raise InputError(f"{run}: --similar: the run made no signatures (duplicates.near is false)")

    def of(self, source: str, partition: str, doc_ids: pa.Array) -> Iterator[pa.RecordBatch]:
        """Rows of ``SIGNATURE_SCHEMA`` of those of a partition's documents that have a signature."""
        path = storage.join(self.run, "signatures", source, f"{partition}.parquet")
        for batch in read_batches(path, SIGNATURE_SCHEMA.names, _BATCH, missing=GONE):
            here = pc.and_(pc.is_in(batch["doc_id"], value_set=doc_ids), batch["shingles"].is_valid())
            if pc.any(here).as_py():
                yield batch.filter(here)


def purge_list_of(run: str, given: str | None = None) -> tuple[str, str]:
    """The folder that a purge of ``run`` writes its tombstones to, absolute where it is local, and why that one.

    ``given`` on the command line, else the list that the run itself was given, else a folder beside the run.

    Raises:
        InputError: it is a single file, lies in the run, or cannot be told.
    """
    config = storage.read_json(storage.join(run, "run.json")).get("config", {})
    configured = config.get("purge_list")
    if given is not None:
        folder, why = given, "as given"
    elif configured is not None:
        folder, why = str(configured), "the run's own purge_list"
        if not storage.exists(folder):
            raise InputError(
                f"{run}: its purge_list {folder} is not there (any more); give another --purge-list FOLDER"
            )
    else:
        folder, why = f"{run.rstrip('/')}.purge-list", "beside the run, which has no purge_list"
    folder = folder.rstrip("/") or "/"
    if storage.is_file(folder) or folder.endswith(".parquet"):
        raise InputError(
            f"{folder}: the purge list is a single file, which nothing can be added to safely; move it into a folder, "
            "which is read as one list, and give that: --purge-list FOLDER"
        )
    if f"{_absolute(folder)}/".startswith(f"{_absolute(run)}/"):
        raise InputError(f"{folder}: the purge list would go with the run; give a --purge-list outside of it")
    _check_writable(folder)
    return storage.absolute(folder), why  # a later command may run in another folder


def _check_writable(folder: str) -> None:
    """A list that nothing can be written to is an error before anything is purged."""
    if not storage.is_local(folder):
        return
    there = _absolute(folder)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise InputError(f"{folder}: expected a folder of purge lists, got a file: {there}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: the purge list cannot be written: no permission to write to {there}")


def _absolute(path: str) -> str:
    path = path.rstrip("/")
    return os.path.realpath(storage.split(path)[1]) if storage.is_local(path) else path


def tombstones_name(run_id: str, version: int, deletion_set: pa.Table, *, similar: bool = False) -> str:
    """The file of a purge's tombstones: of another run, version or set of documents it is another one, and the same
    purge that is done again writes the same."""
    return inside("run.json", "id", f"{run_id}.v{version}.{_digest(deletion_set, similar)}.parquet", folders=False)


def _digest(deletion_set: pa.Table, similar: bool) -> str:
    state = blake2b(b"similar" if similar else b"", digest_size=8)
    for doc_id in sorted(deletion_set["doc_id"].to_pylist()):
        state.update(doc_id)
    return state.hexdigest()


def remember(purge_list: str, name: str, deletion_set: pa.Table, signatures: Signatures | None = None) -> str:
    """Publish the tombstones of ``deletion_set`` as ``name`` in the folder ``purge_list``; the path of the file.

    Where the same purge has written its file before, that stays as it is: the signatures may be gone by now. Where the
    name is another purge's, the file is given one more part. Memory is for the deletion set and the signatures of some
    documents.

    Raises:
        InputError: the list cannot be written, or a table of signatures is missing or damaged.
    """
    digest = _digest(deletion_set, signatures is not None)
    stem = name.removesuffix(".parquet")
    path = storage.join(purge_list, f"{stem}.parquet")
    if storage.exists(path) and _of(path) != digest:
        path = storage.join(purge_list, f"{stem}.{digest}.parquet")
    if storage.exists(path) and _of(path) == digest:
        return path
    metadata = {_OF: digest.encode()}
    schema = PURGE_SCHEMA
    if signatures is not None:
        schema = pa.schema([*PURGE_SCHEMA, *(SIGNATURE_SCHEMA.field(name) for name in _SKETCH)])
        config = signatures.config
        made = {"ngram": config.ngram, "num_perm": config.num_perm, "seed": config.seed}
        metadata[MADE_WITH] = json.dumps(made, sort_keys=True).encode()
    schema = schema.with_metadata(metadata)
    try:
        with storage.publish(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for table in _rows(deletion_set, signatures):
                writer.write_table(table.cast(schema))
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{purge_list}: expected a folder of purge lists, got a file") from None
    except PermissionError as error:
        raise InputError(f"{purge_list}: cannot be written ({error.strerror})") from None
    return path


def _of(path: str) -> str | None:
    """Whose tombstones are in a file; None where it does not say."""
    try:
        with open_table(path) as table:
            found = (table.schema_arrow.metadata or {}).get(_OF)
    except InputError:
        return None
    return None if found is None else str(found, "ascii", "replace")


def _rows(deletion_set: pa.Table, signatures: Signatures | None) -> Iterator[pa.Table]:
    """The tombstones: those that passed all gates and have a signature by partition, then the others at once."""
    rows = deletion_set.select([*PURGE_SCHEMA.names, "source", "partition", "stage"]).combine_chunks()
    if signatures is None:
        yield rows.select(PURGE_SCHEMA.names)
        return
    signed = np.zeros(len(rows), np.bool_)
    passed = rows.append_column("row", pa.array(np.arange(len(rows)))).filter(rows["stage"].is_null())
    for source, partition, own in by_partition(passed):
        doc_ids, places = own["doc_id"].combine_chunks(), own["row"].combine_chunks()
        for batch in signatures.of(source, partition, doc_ids):
            at = places.take(pc.index_in(batch["doc_id"], value_set=doc_ids))
            signed[at.to_numpy()] = True
            found = rows.select(PURGE_SCHEMA.names).take(at)
            for name in _SKETCH:
                found = found.append_column(name, batch[name])
            yield found
    rest = rows.select(PURGE_SCHEMA.names).filter(pa.array(~signed))
    for name in _SKETCH:
        rest = rest.append_column(name, pa.nulls(len(rest), SIGNATURE_SCHEMA.field(name).type))
    yield rest
