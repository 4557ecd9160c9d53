"""The table beside an exported file, ``<file>.documents.parquet``: each document's place and source record.

An export writes it; an import that finds it gives every document its ``doc_id`` and its record back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.committed import missing_tables, named
from quern.data_pipeline.page.document import verdict_schema
from quern.errors import InputError, QuernError, one_line
from quern.storage.parquet import open_table, read_batches
from quern.tokenize.exchange.columns import I64

__all__ = [
    "RECORD",
    "SIDECAR",
    "Placed",
    "Sidecar",
    "SidecarTarget",
    "TableWriter",
    "find_twin",
    "sidecar_path",
    "write_sidecars",
]

_NO_RECORD = ("doc_id", "source", "stage", "reason", "failed_rules")
#: What is known of a document's record: columns of its verdict, each of which may be null.
RECORD = pa.schema([pa.field(field.name, field.type) for field in verdict_schema(()) if field.name not in _NO_RECORD])
_PLACED = pa.schema(
    [
        pa.field("doc_id", pa.binary(16), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
    ]
)
SIDECAR = pa.schema([*_PLACED, *RECORD])
"""``start`` and ``length`` count tokens of the exported file."""

_TEXTS = [field.name for field in RECORD if pa.types.is_string(field.type)]
_META = b"quern.documents"
_FORMAT = 1
_ROWS = 1 << 14
_GROUP_ROWS = 1 << 20
_GROUP_BYTES = 1 << 30
_JOIN_MEMORY = "1GiB"


class TableWriter:
    """Writes a table to a stream in row groups of about :data:`_ROWS`, whatever pieces it comes in."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(file, schema, compression="zstd", version="2.6", write_page_checksum=True)
        self._schema = schema
        self._held: list[pa.Table] = []
        self._rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._flush(1)
        self._writer.close()

    def add(self, table: pa.Table) -> None:
        """Append rows."""
        self._held.append(table.cast(self._schema))
        self._rows += len(table)
        self._flush(_ROWS)

    def _flush(self, least: int) -> None:
        if self._rows >= least:
            self._writer.write_table(pa.concat_tables(self._held), row_group_size=_ROWS)
            self._held, self._rows = [], 0


class Placed:
    """Documents in the order in which they stand in an exported file, kept on disk at ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.documents = self.tokens = 0
        self._stack = contextlib.ExitStack()
        file = self._stack.enter_context(open(path, "wb"))  # noqa: SIM115
        self._table = self._stack.enter_context(TableWriter(file, _PLACED))

    def add(self, doc_ids: bytes, lengths: I64) -> None:
        """Append documents: 16 bytes each, and the tokens each has in the file."""
        starts = self.tokens + np.cumsum(lengths) - lengths
        ids = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(lengths), [None, pa.py_buffer(doc_ids)])
        self._table.add(pa.table([ids, pa.array(starts, pa.int64()), pa.array(lengths, pa.int64())], schema=_PLACED))
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())

    def close(self) -> None:
        """No more documents; they can be read now."""
        self._stack.close()

    def lengths(self) -> Iterator[I64]:
        """Their lengths, chunk by chunk."""
        for batch in read_batches(self.path, ["length"], _ROWS):
            yield batch["length"].to_numpy()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All columns."""
        return read_batches(self.path, rows=_ROWS)


@dataclass(frozen=True)
class SidecarTarget:
    """A sidecar to write: its path, its documents, and what it says of its file."""

    path: str
    placed: Placed
    told: dict[str, Any]


def write_sidecars(targets: Sequence[SidecarTarget], run: str, source: str, scratch: str) -> None:
    """Join the documents of a source's files with their records, all at once, and write the sidecars.

    Where the run has no verdicts of the source and knows of none, as beside tokens that were copied alone, every record
    is null. What does not fit in memory spills to ``scratch``.

    Raises:
        InputError: a verdict file cannot be read, two rows are of one document, or a document has none.
        QuernError: memory or disk did not suffice.
    """
    import duckdb

    columns = ", ".join(f"v.{name}" for name in RECORD.names)
    sql = (
        f"SELECT p.*, v.doc_id IS NOT NULL AS judged, {columns} FROM placed p LEFT JOIN verdicts v "
        "ON p.doc_id = v.doc_id ORDER BY p.row"
    )
    verdicts = os.path.join(run, "verdicts", source)
    missing = missing_tables(run, ("verdicts",), source)
    read = _Verdicts(verdicts)
    needed = bool(missing) or any(path.endswith(".parquet") for path in storage.list_files(verdicts))
    with contextlib.closing(duckdb.connect(":memory:", config=_settings(scratch))) as connection:
        try:
            connection.register("placed", pa.RecordBatchReader.from_batches(_PLACED_ROWS, _placed_batches(targets)))
            connection.register("verdicts", pa.RecordBatchReader.from_batches(_VERDICTS, read))
            rows = connection.sql(sql).to_arrow_reader(_ROWS)
            found = _in_order(_judged(rows, run, verdicts, missing) if needed else rows, verdicts)
            held = pa.table([[]] * len(SIDECAR), schema=SIDECAR)
            for target in targets:
                held = _write_one(target, held, found)
            assert not len(held)
            assert next(found, None) is None
        except duckdb.Error as error:
            raise read.why(error, "documents cannot be joined") from None


def find_twin(verdicts: str, scratch: str) -> bytes | None:
    """A doc_id that occurs twice in the verdict files of the folder ``verdicts``; None if there is none."""
    import duckdb

    sql = "SELECT doc_id FROM verdicts GROUP BY doc_id HAVING count(*) > 1 ORDER BY doc_id LIMIT 1"
    spill = os.path.join(scratch, ".spill")
    os.makedirs(spill, exist_ok=True)  # DuckDB makes no more than one folder below it
    read = _Verdicts(verdicts)
    with contextlib.closing(duckdb.connect(":memory:", config=_settings(spill))) as connection:
        try:
            connection.register("verdicts", pa.RecordBatchReader.from_batches(_VERDICTS, read))
            rows = connection.sql(sql).fetchall()
        except duckdb.Error as error:
            raise read.why(error, "doc_ids cannot be compared") from None
    storage.remove_tree(spill)
    return bytes(rows[0][0]) if rows else None


def _settings(scratch: str) -> dict[str, Any]:
    return {
        "memory_limit": _JOIN_MEMORY, "temp_directory": os.path.join(scratch, "spill"), "threads": "2",
        "autoinstall_known_extensions": "false", "autoload_known_extensions": "false",
    }  # fmt: skip


def _write_one(target: SidecarTarget, held: pa.Table, found: Iterator[pa.Table]) -> pa.Table:
    """Write one sidecar of the rows that are ``held`` and more; return those that are left."""
    told = {_META: json.dumps({"format": _FORMAT, **target.told}, sort_keys=True).encode()}
    missing = target.placed.documents
    with storage.publish(target.path) as file, TableWriter(file, SIDECAR.with_metadata(told)) as table:
        while missing:
            if not len(held):
                held = next(found)
            table.add(held.slice(0, missing))
            missing, held = max(0, missing - len(held)), held.slice(missing)
    return held


_PLACED_ROWS = pa.schema([*_PLACED, pa.field("row", pa.int64())])


def _placed_batches(targets: Sequence[SidecarTarget]) -> Iterator[pa.RecordBatch]:
    """The documents of all files, with ``row``, from 0 on."""
    first = 0
    for target in targets:
        for batch in target.placed.batches():
            rows = pa.array(np.arange(first, first + len(batch)))
            yield pa.record_batch([*batch.columns, rows], schema=_PLACED_ROWS)
            first += len(batch)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type a column has inside DuckDB: it knows no 16 bytes, and wants another library for times with a zone."""
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


class _Verdicts:
    """doc_id and record of every page of a source, types as :func:`_plain`, for DuckDB to read.

    DuckDB makes text of what goes wrong here; so the error is kept.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._failed: InputError | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for path in storage.list_files(self._folder):
            if not path.endswith(".parquet"):
                continue
            try:
                with open_table(path, _VERDICTS.names) as file:
                    for batch in file.iter_batches(_ROWS, columns=_VERDICTS.names):
                        columns = [batch[field.name].cast(field.type) for field in _VERDICTS]
                        yield pa.record_batch(columns, schema=_VERDICTS)
            except InputError as error:
                self._failed = error
                raise

    def why(self, error: Exception, what: str) -> QuernError:
        """The error to raise for an error of DuckDB."""
        return self._failed or QuernError(f"{self._folder}: {what}: {one_line(error, 200)}")


def _judged(
    batches: Iterable[pa.RecordBatch], run: str, verdicts: str, missing: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The rows of the join, each of a document that has a verdict. ``missing``: committed files that are not there."""
    for batch in batches:
        without = np.flatnonzero(~batch["judged"].to_numpy(zero_copy_only=False))
        if len(without):
            doc_id = batch["doc_id"][int(without[0])].as_py().hex()
            where = (
                f"{os.path.join(run, named(missing))} is committed and missing" if missing else "no file there has one"
            )
            raise InputError(f"{verdicts}: has no verdict of document {doc_id}: {where}")
        yield batch


def _in_order(batches: Iterable[pa.RecordBatch], verdicts: str) -> Iterator[pa.Table]:
    """The rows of the join with the sidecar's types; each document comes once."""
    first = 0
    for batch in batches:
        wrong = np.flatnonzero(batch["row"].to_numpy() != np.arange(first, first + len(batch)))
        if len(wrong):
            doc_id = batch["doc_id"][int(wrong[0])].as_py()
            raise InputError(f"{verdicts}: expected one verdict row for document {doc_id.hex()}, got two")
        first += len(batch)
        yield _typed(batch)


def _typed(batch: pa.RecordBatch) -> pa.Table:
    """A batch of the join with the sidecar's types."""
    columns = []
    for field in SIDECAR:
        column = batch[field.name]
        if pa.types.is_timestamp(field.type):
            column = column.cast(pa.int64())
        columns.append(column.cast(field.type))
    return pa.table(columns, schema=SIDECAR)


_VERDICTS = pa.schema([pa.field("doc_id", pa.binary()), *(pa.field(f.name, _plain(f.type)) for f in RECORD)])


class Sidecar:
    """A sidecar, opened; ``documents``, and ``told``, what it says of the file that it belongs to.

    Raises:
        InputError: it is none, or not one of the file ``of``.
    """

    def __init__(self, path: str, of: str) -> None:
        self.path = path
        with open_table(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            self.documents: int = metadata.num_rows
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            large = any(own.num_rows > _GROUP_ROWS or own.total_byte_size > _GROUP_BYTES for own in groups)
        told = _told(schema.metadata)
        if told is None or not schema.remove_metadata().equals(SIDECAR):
            raise InputError(f"{path}: is no table of documents that quern wrote; move it, or import without sidecars")
        if large:
            raise InputError(f"{path}: expected row groups of {_GROUP_ROWS} rows at most, got a larger one")
        if told["file"] != os.path.basename(of):
            raise InputError(f"{path}: is of a file {told['file']!r:.99}, not of {of}; import without sidecars")
        self.sha256: str = told["sha256"]
        self.eot: bool = told["eot"]

    def rows(self) -> Iterator[pa.Table]:
        """Its rows, chunk by chunk, in the order of the file."""
        # as dictionaries: a text that all rows share is held once, as it is stored
        with open_table(self.path, page_checksum_verification=True, read_dictionary=_TEXTS) as file:
            for batch in file.iter_batches(_ROWS):
                batch.validate(full=True)
                if sum(_plain_bytes(batch[name]) for name in _TEXTS) > _GROUP_BYTES:
                    raise InputError(f"{self.path}: expected at most 1 GiB of text in {_ROWS} rows, got more")
                if any(batch[name].null_count for name in _PLACED.names):
                    raise InputError(f"{self.path}: expected doc_id, start and length in every row, got null")
                yield pa.Table.from_batches([batch.replace_schema_metadata()]).cast(SIDECAR)

    def bounds(self, size: int, itemsize: int) -> Iterator[tuple[I64, I64]]:
        """First byte and end of each document in a file of ``size`` bytes.

        Raises:
            InputError: a document is not where it can be; its row is named.
        """
        end, row, tokens = 0, 0, size // itemsize
        for table in self.rows():
            starts, lengths = table["start"].to_numpy(), table["length"].to_numpy()
            wrong = (starts < 0) | (starts > tokens) | (lengths < 0) | (lengths > tokens - np.clip(starts, 0, tokens))
            ends = np.where(wrong, 0, starts + lengths)
            wrong |= starts != np.concatenate([[end], ends[:-1]])
            if wrong.any():
                number = int(np.flatnonzero(wrong)[0])
                raise InputError(
                    f"{self.path}: row {row + number}: expected a document right after the one before it, of "
                    f"{tokens} tokens in all, got start {int(starts[number])}, length {int(lengths[number])}"
                )
            yield starts * itemsize, ends * itemsize
            end, row = int(ends[-1]) if len(ends) else end, row + len(starts)
        if end != tokens:
            raise InputError(f"{self.path}: its documents end at token {end}, expected {tokens}")


def _plain_bytes(texts: pa.DictionaryArray) -> int:
    """How many bytes they would take one by one."""
    return pc.sum(pc.binary_length(texts.dictionary).cast(pa.int64()).take(texts.indices)).as_py() or 0


def _told(metadata: dict[bytes, bytes] | None) -> dict[str, Any] | None:
    """What the schema's metadata say; None if they are not quern's."""
    try:
        told = json.loads((metadata or {})[_META])
        known = told["format"] == _FORMAT and isinstance(told["file"], str) and isinstance(told["sha256"], str)
        return dict(told) if known and isinstance(told["eot"], bool) else None
    except (KeyError, ValueError, TypeError, RecursionError):
        return None


def sidecar_path(stem: str) -> str:
    """``x`` → ``x.documents.parquet``; the file of tokens is ``x.bin`` or ``x.ds``."""
    return f"{stem}.documents.parquet"
