"""Exports token shards to the formats of other trainers, and verifies every byte read."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

import numpy as np

from quern import storage
from quern.data_pipeline.execution.run_directory import read_record
from quern.data_pipeline.page.keys import keys_of
from quern.errors import InputError
from quern.tokenize.corpus_version import read_streams
from quern.tokenize.exchange.columns import I64, SourceFile
from quern.tokenize.exchange.foreign import FORMATS, SUFFIXES, Format
from quern.tokenize.exchange.megatron import write_index
from quern.tokenize.exchange.sidecar import Placed, SidecarTarget, sidecar_path, write_sidecars
from quern.tokenize.exchange.staging import staged
from quern.tokenize.shard_format import VERSION_FILE
from quern.tokenize.shards import ShardReader
from quern.words import counted

__all__ = ["EXPORT_FILE", "ExportReport", "ExportedFile", "export"]

EXPORT_FILE = "export.json"
_CHUNK_TOKENS = 1 << 22
_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class ExportedFile:
    """A file of tokens that was written."""

    file: str
    """Its name; the files that go with it are beside it."""
    stream: str
    """``<source>`` or ``<source>.val``."""
    shards: tuple[str, ...]
    """The shards it was made from."""
    sha256: str
    size_bytes: int
    documents: int
    tokens: int
    """As written: without EOT if none were asked for."""


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote, as it stands in ``export.json``."""

    format: str
    run_id: str | None
    corpus_version: int
    encoding: str
    vocab_size: int
    eot_id: int
    dtype: str
    """Of the ids in the files."""
    eot: bool
    """Whether an EOT ends each document."""
    purged_documents: int
    """Left out."""
    files: tuple[ExportedFile, ...]


def export(
    run: str,
    format: Format,
    out: str,
    *,
    sources: Sequence[str] = (),
    held_out: bool = False,
    eot: bool = True,
    merge: bool = False,
) -> ExportReport:
    """Write the tokens of a data run to the folder ``out``, which must not be there.

    ``sources``: their names (none: all); ``held_out``: their held-out documents instead; ``eot``: whether the EOT stays
    behind each document; ``merge``: one file a source instead of one a shard. A purged document is left out whole. A
    shard without a document gives no file.

    Raises:
        InputError: the run, a source or an option is wrong, no document is to be exported, a shard is damaged, or
            ``out`` is there.
    """
    if format not in FORMATS:
        raise InputError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if format == "bin" and not eot:
        raise InputError("format bin: nothing but the EOT says where a document ends there; it cannot be left out")
    readers = _readers(run, sources, held_out)
    first = readers[0]
    dtype = _file_dtype(format, first)
    with staged(out) as folder:
        scratch = os.path.join(folder, ".work")
        os.mkdir(scratch)
        job = _Job(format, folder, scratch, dtype, eot)
        files: list[ExportedFile] = []
        for reader in readers:
            files += _write_stream(job, reader, merge)
        report = ExportReport(
            format=format, run_id=_run_id(first), corpus_version=first.version, encoding=first.encoding,
            vocab_size=first.vocab_size, eot_id=first.eot_id, dtype=dtype, eot=eot,
            purged_documents=job.purged, files=tuple(files),
        )  # fmt: skip
        if not files:
            gone = f" ({counted(job.purged, 'document')} purged)" if job.purged else ""
            what = "held-out documents" if held_out else "documents"
            raise InputError(f"{run}: has no {what} to export in {', '.join(r.source for r in readers)}{gone}")
        shutil.rmtree(scratch)
        storage.write_json(os.path.join(folder, EXPORT_FILE), asdict(report))
    return report


@dataclass
class _Job:
    """What every file needs."""

    format: Format
    folder: str
    scratch: str
    dtype: str
    eot: bool
    purged: int = 0


def _readers(run: str, sources: Sequence[str], held_out: bool) -> list[ShardReader]:
    """The streams asked for, all of one corpus version and one encoding."""
    if not storage.is_local(run):
        raise InputError(f"{run}: shards are read from a local file system; copy the run here first")
    tokens = os.path.join(os.path.abspath(storage.split(run)[1]), "tokens")
    path = os.path.join(tokens, VERSION_FILE)
    if not os.path.exists(path):
        raise InputError(f"{run}: expected a data run with tokens: it has no tokens/{VERSION_FILE}")
    listed = read_streams(tokens)
    suffix = ".val" if held_out else ""
    known = sorted(name.removesuffix(".val") for name in listed if name.endswith(".val") is held_out)
    unknown = [name for name in sources if name not in known]
    if unknown or not known:
        what = "held-out documents of a source" if held_out else "source"
        wanted = f" {unknown[0]!r:.99}" if unknown else ""
        raise InputError(f"{path}: the corpus version has no {what}{wanted} (it has {', '.join(known) or 'none'})")
    names = dict.fromkeys(sources or known)
    readers = [ShardReader(os.path.join(tokens, f"{name}{suffix}")) for name in names]
    for reader in readers:
        if (reader.version, reader.eot_id, reader.dtype) != (
            readers[0].version, readers[0].eot_id, readers[0].dtype,
        ):  # fmt: skip
            raise InputError(f"{path}: has changed while it was read; try again")
    return readers


def _file_dtype(format: Format, reader: ShardReader) -> str:
    """The type of ids in the files: Megatron knows no uint32."""
    if format != "megatron" or reader.dtype == np.dtype("uint16"):
        return reader.dtype.name
    if reader.vocab_size - 1 > _MOST_INT32:
        raise InputError(
            f"{reader.path}: vocab_size: expected {_MOST_INT32} at most for int32, got {reader.vocab_size}"
        )
    return "int32"


def _run_id(reader: ShardReader) -> str | None:
    ident = (read_record(os.path.dirname(reader.root)) or {}).get("id")
    return ident if isinstance(ident, str) else None


def _write_stream(job: _Job, reader: ShardReader, merge: bool) -> list[ExportedFile]:
    """Write the files of a source, and what goes with them."""
    count = len(reader.shards)
    groups = [range(count)] if merge else [range(number, number + 1) for number in range(count)]
    files, targets = [], []
    for shards in groups:
        name = reader.source if merge else f"{reader.source}_{shards.start:05d}"
        placed = Placed(os.path.join(job.scratch, f"{name}.placed"))
        written = _write_file(job, reader, shards, name, placed)
        if written is not None:
            files.append(written)
            told = {"file": written.file, "sha256": written.sha256, "eot": job.eot}
            targets.append(SidecarTarget(os.path.join(job.folder, sidecar_path(name)), placed, told))
    write_sidecars(targets, os.path.dirname(reader.root), reader.source.removesuffix(".val"), job.scratch)
    return files


def _write_file(job: _Job, reader: ShardReader, shards: range, name: str, placed: Placed) -> ExportedFile | None:
    """Write one file of tokens and its index, noting its documents; None, and no file, if there are none."""
    file = f"{name}{SUFFIXES[job.format]}"
    state = hashlib.sha256()
    dtype = np.dtype(job.dtype).newbyteorder("<")
    part = os.path.join(job.scratch, file)
    with ExitStack() as stack:
        stack.callback(placed.close)
        output = stack.enter_context(open(part, "wb"))
        for shard in shards:
            for tokens in _kept(job, reader, shard, placed):
                data = tokens.astype(dtype, copy=False).tobytes()
                state.update(data)
                output.write(data)
        output.flush()
        os.fsync(output.fileno())
    if not placed.documents:
        return None
    os.replace(part, os.path.join(job.folder, file))
    _write_index(job, reader, name, file, placed)
    names = tuple(reader.shards[shard].bin for shard in shards)
    size = placed.tokens * dtype.itemsize
    return ExportedFile(file, reader.source, names, state.hexdigest(), size, placed.documents, placed.tokens)


def _kept(job: _Job, reader: ShardReader, shard: int, placed: Placed) -> Iterator[np.ndarray]:
    """The tokens of a shard's documents that are not purged, chunk by chunk; notes the documents.

    Raises:
        InputError: a byte of the shard or of its spans is not what the corpus version says.
    """
    info = reader.shards[shard]
    path, spans_path = os.path.join(reader.path, info.bin), os.path.join(reader.path, info.spans)
    if storage.sha256(spans_path) != info.spans_sha256:
        raise InputError(f"{spans_path}: is damaged: its SHA-256 is not the one in the manifest")
    table = reader.spans(shard)
    lengths = table["length"].to_numpy()
    kept = ~table["purged"].to_numpy(zero_copy_only=False)
    written = lengths - (not job.eot)
    most = int(lengths.max(initial=0))
    if int(lengths.min(initial=1)) < 1 or (job.format == "megatron" and most > _MOST_INT32):
        raise InputError(f"{spans_path}: expected documents of 1 to {_MOST_INT32} tokens, got one of {most}")
    placed.add(keys_of(table["doc_id"])[kept].tobytes(), written[kept])
    job.purged += int(len(kept) - np.count_nonzero(kept))
    ends = np.cumsum(lengths)
    with closing(SourceFile(path)) as source:
        for first in range(0, info.tokens, _CHUNK_TOKENS):
            count = min(_CHUNK_TOKENS, info.tokens - first)
            itemsize = reader.dtype.itemsize
            data = source.read_on(first * itemsize, count * itemsize)
            yield _choose(np.frombuffer(data, reader.dtype.newbyteorder("<")), first, ends, kept, job.eot, reader)
        if source.finish() != info.sha256:
            raise InputError(f"{path}: is damaged: its SHA-256 is not the one in the manifest")


def _choose(tokens: np.ndarray, first: int, ends: I64, kept: np.ndarray, eot: bool, reader: ShardReader) -> np.ndarray:
    """Those of ``tokens``, which stand from ``first`` on in the shard, that are exported."""
    last = first + len(tokens)
    low, high = (int(np.searchsorted(ends, place, "right")) for place in (first, last - 1))
    edges = np.minimum(ends[low : high + 1], last)
    over = np.diff(np.concatenate([[first], edges]))
    closing = ends[low : high + 1]
    closing = closing[closing <= last] - 1 - first
    if (tokens[closing] != reader.eot_id).any():
        raise InputError(f"{reader.path}: expected the EOT, {reader.eot_id}, at the end of each document")
    if eot and kept[low : high + 1].all():
        return tokens
    wanted = np.repeat(kept[low : high + 1], over)
    if not eot:
        wanted[closing] = False
    return tokens[wanted]


def _write_index(job: _Job, reader: ShardReader, name: str, file: str, placed: Placed) -> None:
    """What the format has beside a file of tokens."""
    if job.format == "megatron":
        with storage.publish(os.path.join(job.folder, f"{name}.idx")) as index:
            write_index(index, job.dtype, placed.documents, placed.lengths)
    if job.format == "datatrove":
        with storage.publish(os.path.join(job.folder, f"{file}.index")) as index:
            end = 0
            for lengths in placed.lengths():
                index.write((end + np.cumsum(lengths)).astype("<u8").tobytes())
                end += int(lengths.sum())
        told = f"{reader.encoding}|{np.dtype(job.dtype).itemsize}\n{placed.tokens}\n{placed.tokens:,} T"
        storage.publish_bytes(os.path.join(job.folder, f"{file}.metadata"), told.encode())
