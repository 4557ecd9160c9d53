"""Exports the texts of a corpus version as JSON lines, as Parquet, or as a folder that ``datasets`` loads.

A document is in the corpus if its tokens are: it has a span in the current version that is not purged. The verdict
and document tables of a partition are read side by side, some rows at a time, so memory does not grow with the run.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, Literal, Self, get_args

import pyarrow as pa

from quern import storage
from quern.closes import Closes
from quern.errors import InputError
from quern.lineage.store import IndexedRun, plain
from quern.storage.parquet import TableWriter, open_table, read_batches

__all__ = ["FILE_BYTES", "FORMATS", "RECORD_FILE", "TextExport", "export_texts"]

Format = Literal["jsonl", "parquet", "hf"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: Bytes of text after which the next file begins.
FILE_BYTES = 256 << 20
RECORD_FILE = "export.json"

_ROWS = 1024
_GROUP_BYTES = 32 << 20
_FIXED = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("url", pa.string()),
        pa.field("date", pa.string()),
        pa.field("language", pa.string()),
        pa.field("source", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class TextExport:
    """What an export wrote, as it stands in ``export.json``."""

    format: Format
    run_id: str
    corpus_version: int
    columns: tuple[str, ...]
    documents: int
    files: tuple[dict[str, Any], ...]
    """Of each: ``file``, ``source``, ``split`` (train or validation), ``documents``, ``bytes``, ``sha256``."""


def export_texts(
    lineage: IndexedRun,
    format: Format,
    out: str,
    *,
    sources: Sequence[str] = (),
    columns: Sequence[str] = (),
    file_bytes: int = FILE_BYTES,
) -> TextExport:
    """Write the texts of the corpus's current version below ``out``, a folder on any store; ``export.json`` comes last.

    A row has ``id`` (the doc_id in hex), ``text`` (what was tokenized), ``url``, ``date`` (ISO 8601), ``language``,
    ``source`` and the verdict ``columns`` asked for. Partitions follow each other, each in its order.

    Raises:
        InputError: ``out`` is not empty; the run has no tokens, no texts, or not such a source or column.
    """
    streams = {stream.name for stream in lineage.streams}
    names = sorted({name.removesuffix(".val") for name in streams})
    if not names:
        raise InputError(f"{lineage.run}: has no tokens; expected a run whose tokens are written")
    if unknown := [name for name in sources if name not in names]:
        raise InputError(f"--source: {lineage.run} has no source {unknown[0]!r} (it has {', '.join(names) or 'none'})")
    if taken := [name for name in columns if name in (*_FIXED.names, "doc_id") or columns.count(name) > 1]:
        raise InputError(f"--column: {taken[0]} is there already; expected another column of the verdicts, each once")
    if storage.list_files(out):
        raise InputError(f"{out}: is not empty; expected a new folder (without {RECORD_FILE} an export was cut off)")
    parts = {
        name: sorted(storage.list_files(storage.join(lineage.run, "documents", name))) for name in sources or names
    }
    for source in (name for name, paths in parts.items() if not paths):
        raise InputError(f"{lineage.run}: source {source}: has no texts (documents/{source}/)")
    with ExitStack() as stack:
        writers: dict[str, _Writer] = {}
        for path in (path for paths in parts.values() for path in paths):
            for stream, rows in _rows(lineage, path, columns):
                if stream not in writers:
                    writers[stream] = stack.enter_context(_Writer(format, out, stream, rows.schema, file_bytes))
                writers[stream].add(rows)
        files = tuple(record for writer in writers.values() for record in writer.close())
    documents = sum(record["documents"] for record in files)
    if not documents:
        raise InputError(f"{lineage.run}: no document of {', '.join(parts)} is in corpus version {lineage.version}")
    given = tuple([*_FIXED.names, *columns])
    result = TextExport(format, lineage.run_id, lineage.version, given, documents, files)
    if format == "hf":
        storage.publish_bytes(storage.join(out, "README.md"), _card(result).encode())
    storage.write_json(storage.join(out, RECORD_FILE), vars(result))
    return result


def _rows(lineage: IndexedRun, path: str, columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """The rows of a partition that are in the corpus, with the stream that has their tokens; some at a time."""
    verdicts = _Verdicts(storage.join(lineage.run, "verdicts", *path.split("/")[-2:]), columns)
    for batch in read_batches(path, ("doc_id", "text"), _ROWS):
        ids = batch["doc_id"].to_pylist()
        numbers = lineage.find_docs(b"".join(ids))
        spans = lineage.spans_of(numbers)
        kept = spans.numbers[~spans.purged]
        placed = dict(zip(lineage.documents(kept).doc_ids, spans.streams[~spans.purged].tolist(), strict=True))
        wanted = verdicts.of([doc_id for doc_id in ids if doc_id in placed])
        texts = dict(zip(ids, batch["text"].to_pylist(), strict=True))
        for index in dict.fromkeys(placed.values()):
            own = [row for row in wanted if placed[row["doc_id"]] == index]
            yield lineage.streams[index].name, verdicts.table(own, texts)


class _Verdicts:
    """The verdicts of a partition, asked for in the order in which they stand there."""

    def __init__(self, path: str, columns: Sequence[str]) -> None:
        self._path, self._columns = path, list(columns)
        fixed = ["doc_id", "url", "fetched_at", "language", "source"]
        with open_table(path, [*fixed, *columns]) as table:
            kinds = {name: _plain_type(table.schema_arrow.field(name).type) for name in columns}
        self._schema = pa.schema([*_FIXED, *(pa.field(name, kind) for name, kind in kinds.items())])
        self._rows = (row for batch in read_batches(path, [*fixed, *columns], _ROWS) for row in batch.to_pylist())

    def of(self, doc_ids: Sequence[bytes]) -> list[dict[str, Any]]:
        found = []
        for doc_id in doc_ids:
            row = next((row for row in self._rows if row["doc_id"] == doc_id), None)
            if row is None:
                raise InputError(f"{self._path}: has no verdict of document {doc_id.hex()} where its text comes")
            found.append(row)
        return found

    def table(self, rows: Sequence[dict[str, Any]], texts: dict[bytes, str]) -> pa.Table:
        made = [
            {
                "id": row["doc_id"].hex(), "text": texts[row["doc_id"]], "url": row["url"],
                "date": plain(row["fetched_at"]), "language": row["language"], "source": row["source"],
                **{name: plain(row[name]) for name in self._columns},
            }
            for row in rows
        ]  # fmt: skip
        return pa.Table.from_pylist(made, schema=self._schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type in which a column is exported: hashes as hex digits, times in ISO 8601."""
    return pa.string() if pa.types.is_timestamp(kind) or pa.types.is_fixed_size_binary(kind) else kind


class _JsonLines(Closes):
    """Gzipped JSON lines; equal rows give equal bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0)

    def close(self) -> None:
        self._file.close()

    def add(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")


class _Writer:
    """The files of one stream; the one that is open gets no name where the block ends in an error."""

    def __init__(self, format: Format, out: str, stream: str, schema: pa.Schema, file_bytes: int) -> None:
        self._json, self._out, self._schema, self._bytes = format == "jsonl", out, schema, file_bytes
        self._source = stream.removesuffix(".val")
        self._split = "validation" if stream != self._source else "train"
        self._stack = ExitStack()
        self._rows: _JsonLines | TableWriter | None = None
        self._name = ""
        self._documents = self._size = 0
        self._records: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def add(self, rows: pa.Table) -> None:
        if self._rows is None:
            suffix = "jsonl.gz" if self._json else "parquet"
            self._name = f"{self._source}/{self._split}-{len(self._records):05d}.{suffix}"
            file = self._stack.enter_context(storage.publish(storage.join(self._out, self._name)))
            self._rows = _JsonLines(file) if self._json else TableWriter(file, self._schema, size=_GROUP_BYTES)
            self._stack.enter_context(self._rows)
            self._documents = self._size = 0
        self._rows.add(rows)
        self._documents += len(rows)
        self._size += rows.nbytes
        if self._size >= self._bytes:
            self._end()

    def _end(self) -> None:
        if self._rows is None:
            return
        self._rows = None
        self._stack.close()
        path = storage.join(self._out, self._name)
        self._records.append(
            {"file": self._name, "source": self._source, "split": self._split, "documents": self._documents,
             "bytes": storage.describe([path])[0][0], "sha256": storage.sha256(path)}
        )  # fmt: skip

    def close(self) -> list[dict[str, Any]]:
        self._end()
        return self._records


def _card(result: TextExport) -> str:
    """The card of a dataset: which files are which configuration and split."""
    streams = dict.fromkeys((record["source"], record["split"]) for record in result.files)
    lines = ["---", "configs:"]
    for source in dict.fromkeys(source for source, _ in streams):
        lines += [f"- config_name: {source}", "  data_files:"]
        for split in (split for own, split in streams if own == source):
            lines += [f"  - split: {split}", f"    path: {source}/{split}-*.parquet"]
    lines += [
        "---",
        "",
        f"Texts of run {result.run_id}, corpus version {result.corpus_version}: {result.documents:,} documents.",
    ]
    return "\n".join(lines) + "\n"
