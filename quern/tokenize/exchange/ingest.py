"""Imports token files of other trainers as a data run for the trainer and lineage.

A document is known by where it stands: its ``doc_id`` is of the source, the file's relative path and the byte at which
the document starts. Where the sidecar of quern's own export lies beside a file, ids and records come from there.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.page.document import make_doc_id, verdict_schema
from quern.data_pipeline.page.keys import column_of
from quern.data_pipeline.sources.plan import partition_name
from quern.errors import InputError
from quern.storage.parquet import TableWriter
from quern.tokenize.encoding import OPTIONS, Encoding, load_encoding
from quern.tokenize.exchange.columns import I64
from quern.tokenize.exchange.foreign import FORMATS, SUFFIXES, Batch, Format, TokenFile, data_path, stem
from quern.tokenize.exchange.new_run import Shards, write_run
from quern.tokenize.exchange.sidecar import RECORD, Rows, Sidecar, find_twin, sidecar_path, table_writer
from quern.tokenize.exchange.staging import staged
from quern.tokenize.exchange.texts import Vocabulary
from quern.tokenize.shard_format import ShardInfo
from quern.words import counted

__all__ = ["ImportOptions", "ImportReport", "Imported", "ingest"]

_SOURCE = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
_DECIDING = ("format", "encoding", "dtype", "shard_tokens", "sidecars")
_VERDICT = verdict_schema(())


@dataclass(frozen=True)
class ImportOptions:
    """How files are read and what they become."""

    format: Format
    encoding: str
    ranks: str | None = None
    eot: int | None = None
    """The id that ends documents; None: the encoding's EOT."""
    source: str = "imported"
    root: str | None = None
    """What the files' paths are relative to in doc_ids; None: each file's own folder."""
    dtype: str | None = None
    """Of ids in files that do not say so; None: the encoding's, and a file that looks like uint32 then is refused."""
    shard_tokens: int = 2**30
    sidecars: bool = True
    """Whether sidecars beside the files are used."""


@dataclass(frozen=True)
class Imported:
    """A file that was read."""

    file: str
    relative_path: str
    sha256: str
    documents: int
    tokens: int
    """In the corpus, EOTs included."""
    eots_added: int
    """Documents that did not end with an EOT and got one."""
    empty: int
    """Documents without a token that were left out."""
    passed_over_bytes: int
    """Bytes that no document of the index holds."""
    sidecar: bool
    """Whether ids and records came from a sidecar."""


@dataclass(frozen=True)
class ImportReport:
    """What an import read and wrote."""

    source: str
    """Its name, or the names of several with a comma between them."""
    documents: int
    tokens: int
    shards: int
    files: tuple[Imported, ...]


def ingest(files: Sequence[str], out: str, options: ImportOptions) -> ImportReport:
    """Make the data run ``out``, which must not be there, from token files, in the order given.

    ``files``: each a path, of ``options.source``, or ``NAME=PATH`` of the source ``NAME``, where ``PATH`` may be a
    glob, of which the format's files count. A document that does not end with an EOT gets one. Each file must hold a
    document. Ids are those of ``options.encoding``.

    Raises:
        InputError: an option, a file, an index or a sidecar is wrong (file and record are named), the encoding cannot
            be had, two documents have the same doc_id, or ``out`` is there. Then nothing is left of ``out``.
    """
    _check(files, options)
    encoding = load_encoding(options.encoding, options.ranks, OPTIONS)
    eot = encoding.eot_id if options.eot is None else options.eot
    if not 0 <= eot < encoding.vocab_size:
        raise InputError(f"eot: expected an id of {encoding.name}, 0 to {encoding.vocab_size - 1}, got {eot}")
    vocabulary = Vocabulary(encoding)
    if not vocabulary.known[eot]:
        raise InputError(f"eot: expected an id of {encoding.name}, which leaves {eot} out")
    paths = {name: _paths(own, options) for name, own in _by_source(files, options.source, options.format).items()}
    read: dict[str, list[Imported]] = {name: [] for name in paths}
    infos: dict[str, tuple[ShardInfo, ...]] = {}
    with staged(out) as folder:
        for name, own in paths.items():
            job = _Job(replace(options, source=name), encoding, eot, vocabulary, folder)
            with Shards(os.path.join(folder, "tokens", name), encoding.dtype, options.shard_tokens) as shards:
                read[name] += [_read_file(job, shards, path, relative) for path, relative in own]
                infos[name] = shards.infos
        if any(file.sidecar for own in read.values() for file in own):
            _refuse_twins(folder)
        deciding = {name: getattr(options, name) for name in _DECIDING}
        write_run(folder, encoding, eot, infos, deciding, {name: list(map(asdict, own)) for name, own in read.items()})
    written = [info for own in infos.values() for info in own]
    tokens, documents = sum(info.tokens for info in written), sum(info.documents for info in written)
    every = tuple(file for own in read.values() for file in own)
    return ImportReport(", ".join(paths), documents, tokens, len(written), every)


def _by_source(files: Sequence[str], source: str, format: Format) -> dict[str, list[str]]:
    """Source → its files."""
    found: dict[str, list[str]] = {}
    for given in files:
        name, named, path = given.partition("=")
        if named and _SOURCE.fullmatch(name) and not os.path.lexists(given):
            of_glob = [file for file in sorted(glob.glob(path)) if file.endswith(SUFFIXES[format])]
            found.setdefault(name, []).extend(of_glob or [path])
        else:
            found.setdefault(source, []).append(given)
    return found


@dataclass(frozen=True)
class _Job:
    options: ImportOptions
    encoding: Encoding
    eot: int
    vocabulary: Vocabulary
    folder: str


def _check(files: Sequence[str], options: ImportOptions) -> None:
    if options.format not in FORMATS:
        raise InputError(f"format: expected one of {', '.join(FORMATS)}, got {options.format!r}")
    if not files:
        raise InputError("expected one file or more, got none")
    if not _SOURCE.fullmatch(options.source):
        raise InputError(f"source: expected a name of a-z, 0-9, _ and -, got {options.source!r:.99}")
    if options.dtype not in (None, "uint16", "uint32"):
        raise InputError(f"dtype: expected uint16 or uint32, got {options.dtype!r}")
    if options.dtype is not None and options.format == "megatron":
        raise InputError("dtype: a Megatron index says it itself; leave it out")
    if options.shard_tokens < 1:
        raise InputError(f"shard_tokens: expected an integer ≥ 1, got {options.shard_tokens}")


def _paths(files: Sequence[str], options: ImportOptions) -> list[tuple[str, str]]:
    """Absolute path of each file of tokens, and the path by which its documents are known."""
    root = None if options.root is None else os.path.abspath(options.root)
    found: dict[str, str] = {}
    for given in files:
        if not storage.is_local(given):
            raise InputError(f"{given}: expected a file on a local file system; copy it here first")
        place = storage.split(given)[1]
        path = os.path.abspath(data_path(options.format, place))
        if os.path.isdir(place) and not os.path.isfile(path):
            expected = os.path.join(given, f"x{SUFFIXES[options.format]}")
            raise InputError(f"{given}: is a folder; expected a file of tokens, such as {expected}")
        if any("\ud800" <= character <= "\udfff" for character in path):
            name = path.encode("utf-8", "backslashreplace").decode()
            raise InputError(f"{name}: expected a file name in UTF-8; rename it")
        relative = os.path.basename(path) if root is None else os.path.relpath(path, root)
        if relative.split(os.sep)[0] == os.pardir:
            raise InputError(f"{path}: lies outside the root {root!r}")
        if relative in found:
            raise InputError(
                f"{found[relative]} and {path} have the same relative path, {relative!r}, by which documents are "
                "known; give --root, a folder above both, or each file once"
            )
        found[relative] = path
    return [(path, relative) for relative, path in found.items()]


def _read_file(job: _Job, shards: Shards, path: str, relative: str) -> Imported:
    """All documents of one file into the shards, and their verdicts."""
    options = job.options
    with closing(TokenFile(options.format, path, options.dtype, job.encoding.dtype)) as file:
        sidecar = _sidecar(options, path)
        rows = None if sidecar is None else _Rows(sidecar)
        name = partition_name(relative)
        verdicts = os.path.join(job.folder, "verdicts", options.source, f"{name}.parquet")
        counts = Counter[str]()
        with storage.publish(verdicts) as output, table_writer(output, _VERDICT) as table:
            for batch in _batches(file, sidecar, job.eot):
                counts["held_bytes"] += int(batch.lengths.sum()) * file.dtype.itemsize
                _take(job, shards, table, file, relative, batch, rows, counts)
        shards.close()
        sha256 = file.finish()
        if sidecar is not None:
            _settle(sidecar, rows, path, sha256)
        if not counts["documents"]:
            raise InputError(
                f"{path}: expected one document or more, got none (the file has {counted(file.size, 'byte')})"
            )
        return Imported(
            path, relative, sha256, counts["documents"], counts["tokens"], counts["eots_added"], counts["empty"],
            file.size - counts["held_bytes"], sidecar is not None,
        )  # fmt: skip


def _sidecar(options: ImportOptions, path: str) -> Sidecar | None:
    beside = sidecar_path(stem(options.format, path))
    return Sidecar(beside, path) if options.sidecars and os.path.lexists(beside) else None


def _batches(file: TokenFile, sidecar: Sidecar | None, eot: int) -> Iterator[Batch]:
    if file.indexed:
        return file.batches(file.bounds())
    if sidecar is not None:
        return file.batches(sidecar.bounds(file.size, file.dtype.itemsize))
    return file.batches_by_eot(eot)


class _Rows:
    """The rows of a sidecar, from the first on."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar, self._rows = sidecar, Rows(sidecar.rows())
        self.taken = 0
        self.eot = sidecar.eot

    def take(self, starts: I64, lengths: I64) -> pa.Table:
        """The rows of documents, which must start and be as long (in tokens) as these."""
        parts = list(self._rows.take(len(starts)))
        self.taken += sum(map(len, parts))
        if sum(map(len, parts)) < len(starts):
            raise InputError(f"{self._sidecar.path}: has {self.taken} documents; the file has more")
        table = pa.concat_tables(parts).combine_chunks()
        wrong = (table["start"].to_numpy() != starts) | (table["length"].to_numpy() != lengths)
        if wrong.any():
            number = self.taken - len(table) + int(np.flatnonzero(wrong)[0])
            raise InputError(f"{self._sidecar.path}: row {number}: is not the document that the file has there")
        return table


def _settle(sidecar: Sidecar, rows: _Rows | None, path: str, sha256: str) -> None:
    """The sidecar was of this file, and of all of it."""
    if sidecar.sha256 != sha256:
        raise InputError(
            f"{sidecar.path}: is of other bytes than {path} has now (SHA-256 {sha256}); import without sidecars"
        )
    assert rows is not None
    if rows.taken != sidecar.documents:
        raise InputError(f"{sidecar.path}: has {sidecar.documents} documents, the file has {rows.taken}")


def _take(
    job: _Job, shards: Shards, table: TableWriter, file: TokenFile, relative: str, batch: Batch,
    rows: _Rows | None, counts: Counter[str],
) -> None:  # fmt: skip
    """One batch of documents: check its ids, end each with an EOT, write it."""
    _check_ids(job, file, batch)
    offsets, lengths, itemsize = batch.offsets, batch.lengths, file.dtype.itemsize
    known = None if rows is None else rows.take(offsets // itemsize, lengths)
    if known is None and not lengths.all():
        counts["empty"] += int(np.count_nonzero(lengths == 0))
        offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
    if not len(lengths):
        return
    tokens = batch.tokens.astype(job.encoding.dtype)
    ends = np.cumsum(lengths)
    open_ended = np.ones(len(lengths), bool)
    if rows is None or rows.eot:
        full = lengths > 0
        open_ended[full] = tokens[ends[full] - 1] != job.eot
    tokens = np.insert(tokens, ends[open_ended], job.eot)
    with_eot = lengths + open_ended
    if known is None:
        source, positions = job.options.source, offsets.tolist()
        ids = b"".join(make_doc_id(source, relative, position) for position in positions)
        record = _record_by_place(job, file, offsets, lengths, tokens, with_eot)
    else:
        ids = b"".join(known["doc_id"].to_pylist())
        record = {name: known[name] for name in RECORD.names}
    shards.add(ids, with_eot, tokens)
    table.add(_verdicts(job.options.source, ids, len(with_eot), record, file.path))
    counts["documents"] += len(with_eot)
    counts["tokens"] += int(with_eot.sum())
    counts["eots_added"] += int(np.count_nonzero(open_ended))


def _check_ids(job: _Job, file: TokenFile, batch: Batch) -> None:
    """Every id is one of the encoding's."""
    tokens, most = batch.tokens, job.encoding.vocab_size
    wrong = (tokens < 0) | (tokens >= most) if tokens.dtype.kind == "i" else tokens >= most
    if not wrong.any():
        wrong = ~job.vocabulary.known[tokens]
        if not wrong.any():
            return
    place = int(np.flatnonzero(wrong)[0])
    ends = np.cumsum(batch.lengths)
    number = int(np.searchsorted(ends, place, "right"))
    within = place - int(ends[number] - batch.lengths[number])
    gap = " (it leaves this one out)" if 0 <= int(tokens[place]) < most else ""
    hint = f"; they were read as {file.dtype.name}: give --dtype if that is not their type" if file.assumed else ""
    raise InputError(
        f"{file.path}: document at byte {int(batch.offsets[number])}: token {within}: expected an id of "
        f"{job.encoding.name}, 0 to {most - 1}{gap}, got {int(tokens[place])}{hint}"
    )


def _record_by_place(
    job: _Job, file: TokenFile, offsets: I64, lengths: I64, tokens: np.ndarray, with_eot: I64
) -> dict[str, Any]:
    """What is known of documents of which nothing is known but their place."""
    hashes = job.vocabulary.text_hashes(tokens, with_eot)
    return {
        "source_file": [file.path] * len(offsets),
        "record_offset": offsets,
        "record_length": lengths * file.dtype.itemsize,
        "post_filter_hash": hashes,
    }


def _verdicts(source: str, ids: bytes, count: int, record: Mapping[str, Any], path: str) -> pa.Table:
    """Rows of kept documents; ``path`` stands for a file that the record does not know."""
    known: dict[str, Any] = {
        **record,
        "doc_id": column_of(ids),
        "source": [source] * count,
        "failed_rules": [[]] * count,
    }
    if isinstance(known["source_file"], pa.ChunkedArray):
        known["source_file"] = known["source_file"].fill_null(path)
    columns = []
    for own in _VERDICT:
        values = known.get(own.name)
        if values is None:
            columns.append(pa.nulls(count, own.type))
        else:
            columns.append(values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, own.type))
    return pa.table(columns, schema=_VERDICT)


def _refuse_twins(folder: str) -> None:
    """Sidecars may give one doc_id to two documents."""
    twin = find_twin(os.path.join(folder, "verdicts"), folder)
    if twin is not None:
        raise InputError(f"two documents have the doc_id {twin.hex()}; import one of the files without sidecars")
