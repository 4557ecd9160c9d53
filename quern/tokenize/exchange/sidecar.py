"""The table beside an exported file, ``<file>.documents.parquet``: each document's place and source record.

An export writes it; an import that finds it gives every document its ``doc_id`` and its record back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.committed import missing_tables, named
from quern.data_pipeline.page.document import verdict_schema
from quern.data_pipeline.page.keys import column_of
from quern.errors import InputError, QuernError, one_line
from quern.storage.parquet import TableWriter, open_table, read_batches
from quern.storage.sql import connect
from quern.tokenize.exchange.columns import I64

if TYPE_CHECKING:
    import duckdb

__all__ = [
    "RECORD",
    "SIDECAR",
    "Placed",
    "Rows",
    "Sidecar",
    "SidecarTarget",
    "find_twin",
    "sidecar_path",
    "table_writer",
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
_JOIN_BYTES = 1 << 30


def table_writer(file: IO[bytes], schema: pa.Schema) -> TableWriter:
    """Writes a table of documents."""
    return TableWriter(file, schema, rows=_ROWS, write_page_checksum=True)


class Placed:
    """Documents in the order in which they stand in an exported file, kept on disk at ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.documents = self.tokens = 0
        self._stack = contextlib.ExitStack()
        file = self._stack.enter_context(open(path, "wb"))  # noqa: SIM115
        self._table = self._stack.enter_context(table_writer(file, _PLACED))

    def add(self, doc_ids: bytes, lengths: I64) -> None:
        """Append documents: 16 bytes each, and the tokens each has in the file."""
        starts = self.tokens + np.cumsum(lengths) - lengths
        self._table.add(pa.table([column_of(doc_ids), starts, lengths], schema=_PLACED))
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())

    def close(self) -> None:
        """No more documents; they can be read now."""
        self._stack.close()

    def lengths(self) -> Iterator[I64]:
        """Their lengths, chunk by chunk."""
        for batch in read_batches(self.path, ["length"], _ROWS):
            yield batch["length"].to_numpy()


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
    columns = ", ".join(f"v.{name}" for name in RECORD.names)
    sql = (
        f"SELECT p.*, v.doc_id IS NOT NULL AS judged, {columns} FROM placed p LEFT JOIN verdicts v "
        "ON p.doc_id = v.doc_id ORDER BY p.row"
    )
    verdicts = os.path.join(run, "verdicts", source)
    missing = missing_tables(run, ("verdicts",), source)
    needed = bool(missing) or any(path.endswith(".parquet") for path in storage.list_files(verdicts))
    with _connected(verdicts, scratch, "documents cannot be joined") as connection:
        connection.register("placed", pa.RecordBatchReader.from_batches(_PLACED_ROWS, _placed_batches(targets)))
        rows = connection.sql(sql).to_arrow_reader(_ROWS)
        found = Rows(_records(rows, run, verdicts, missing, needed))
        for target in targets:
            told = {_META: json.dumps({"format": _FORMAT, **target.told}, sort_keys=True).encode()}
            with (
                storage.publish(target.path) as file,
                table_writer(file, SIDECAR.with_metadata(told)) as table,
            ):
                for part in found.take(target.placed.documents):
                    table.add(part)
        assert not list(found.take(1))


def find_twin(verdicts: str, scratch: str) -> bytes | None:
    """A doc_id that occurs twice in the verdict files of the folder ``verdicts``; None if there is none."""
    sql = "SELECT doc_id FROM verdicts GROUP BY doc_id HAVING count(*) > 1 ORDER BY doc_id LIMIT 1"
    spill = os.path.join(scratch, ".spill")
    os.makedirs(spill, exist_ok=True)  # DuckDB makes no more than one folder below it
    with _connected(verdicts, spill, "doc_ids cannot be compared") as connection:
        rows = connection.sql(sql).fetchall()
    storage.remove_tree(spill)
    return bytes(rows[0][0]) if rows else None


class Rows:
    """The rows of tables that come one after the other, so many at a time as asked for."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._held: pa.Table | None = None

    def take(self, count: int) -> Iterator[pa.Table]:
        """The next ``count`` rows, in parts; fewer where there are no more."""
        while count:
            if not self._held:
                self._held = next(self._tables, None)
                if self._held is None:
                    return
            part, self._held = self._held.slice(0, count), self._held.slice(count)
            count -= len(part)
            yield part


@contextlib.contextmanager
def _connected(verdicts: str, scratch: str, failed: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to the table ``verdicts``: doc_id and record of every page of a source, types as :func:`_plain`.

    DuckDB makes text of what goes wrong in reading them, so that error is kept.
    """
    import duckdb

    errors: list[InputError] = []

    def read() -> Iterator[pa.RecordBatch]:
        try:
            for path in storage.list_files(verdicts):
                if path.endswith(".parquet"):
                    with open_table(path, _VERDICTS.names) as file:
                        for batch in file.iter_batches(_ROWS, columns=_VERDICTS.names):
                            yield batch.select(_VERDICTS.names).cast(_VERDICTS)
        except InputError as error:
            errors.append(error)
            raise

    with connect(scratch, _JOIN_BYTES, 2) as connection:
        try:
            connection.register("verdicts", pa.RecordBatchReader.from_batches(_VERDICTS, read()))
            yield connection
        except duckdb.Error as error:
            raise (*errors, QuernError(f"{verdicts}: {failed}: {one_line(error, 200)}"))[0] from None


_PLACED_ROWS = pa.schema([*_PLACED, pa.field("row", pa.int64())])


def _placed_batches(targets: Sequence[SidecarTarget]) -> Iterator[pa.RecordBatch]:
    """The documents of all files, with ``row``, from 0 on."""
    first = 0
    for target in targets:
        for batch in read_batches(target.placed.path, rows=_ROWS):
            rows = pa.array(np.arange(first, first + len(batch)))
            yield pa.record_batch([*batch.columns, rows], schema=_PLACED_ROWS)
            first += len(batch)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type a column has inside DuckDB: it knows no 16 bytes, and wants another library for times with a zone."""
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


def _records(
    batches: Iterable[pa.RecordBatch], run: str, verdicts: str, missing: Sequence[str], needed: bool
) -> Iterator[pa.Table]:
    """The rows of the join with the sidecar's types; each document comes once, and where verdicts are ``needed`` it has
    one. ``missing``: committed files that are not there."""
    first = 0
    for batch in batches:
        without = np.flatnonzero(~batch["judged"].to_numpy(zero_copy_only=False))
        for row in without[:1].tolist() if needed else ():
            lost = f"{os.path.join(run, named(missing))} is committed and missing" if missing else ""
            doc_id = batch["doc_id"][row].as_py().hex()
            raise InputError(f"{verdicts}: has no verdict of document {doc_id}: {lost or 'no file there has one'}")
        for row in np.flatnonzero(batch["row"].to_numpy() != np.arange(first, first + len(batch)))[:1].tolist():
            doc_id = batch["doc_id"][row].as_py().hex()
            raise InputError(f"{verdicts}: expected one verdict row for document {doc_id}, got two")
        first += len(batch)
        yield pa.table(batch.select(SIDECAR.names)).cast(SIDECAR)


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
