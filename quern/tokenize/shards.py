"""The reader of token shards (format: :mod:`.shard_format`)."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from quern import storage
from quern.errors import InputError
from quern.storage.parquet import open_table, read_batches
from quern.tokenize import reader_lock
from quern.tokenize.corpus_version import Listed, read_listed, read_version
from quern.tokenize.shard_format import SPANS_SCHEMA, VERSION_FILE, ShardInfo

__all__ = ["ShardReader", "Span"]

_SPANS_IN_MEMORY = 8
_OPEN_ATTEMPTS = 20


@dataclass(frozen=True)
class Span:
    """A document's position: ``length`` tokens from ``start`` of a shard, the EOT included."""

    shard: int
    index: int
    """Its number in the shard."""
    doc_id: bytes
    start: int
    length: int
    purged: bool


class ShardReader:
    """The tokens of one source, as its corpus version lists them: one logical stream over all shards.

    ``path`` is ``RUN/tokens/<source>`` or ``….val``, on a local file system. A shard is memory-mapped at first use. As
    long as it is neither closed nor forgotten, the files of the version that it opened stay where the file system has
    locks, even if a purge makes another version of the corpus meanwhile.

    Attributes: ``source``, ``version`` (of the corpus), ``entry`` (what it says of the source), ``version_encoding``
    (and of the encoding), ``manifest`` (all that the source's says), ``encoding`` (name), ``ranks_path``,
    ``vocab_size``, ``dtype``, ``eot_id``, ``seed``, ``shards`` (their :class:`ShardInfo`), ``offsets`` (int64[shards +
    1]: where each shard starts in the stream), ``total_tokens``, ``num_documents``.

    Raises:
        InputError: no version lists the source, or a file does not agree with it; the file is named. ``verify`` reads
            every byte and compares the SHA-256 too.
    """

    def __init__(self, path: str, *, verify: bool = False) -> None:
        if not storage.is_local(path):
            raise InputError(f"{path}: shards are memory-mapped; expected a folder on a local file system")
        self.path = os.path.abspath(storage.split(path)[1])
        self.root, self.source = os.path.split(self.path)
        version, listed = self._open()
        self.entry, self.manifest, self.version_encoding = listed.entry, listed.manifest, version["encoding"]
        manifest = listed.manifest
        self.version: int = version["version"]
        self.ranks_path = os.path.join(self.root, version["encoding"]["ranks"])
        self.encoding: str = manifest["encoding"]
        self.vocab_size: int = manifest["vocab_size"]
        self.dtype = np.dtype(manifest["dtype"])
        self.eot_id: int = manifest["eot_id"]
        self.seed: int = manifest["seed"]
        self.shards = listed.shards
        sizes = [shard.tokens for shard in self.shards]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.total_tokens = int(self.offsets[-1])
        self.num_documents = sum(shard.documents for shard in self.shards)
        self._check(verify)
        self._maps: dict[int, np.ndarray] = {}
        self._spans: OrderedDict[int, tuple[pa.Table, np.ndarray]] = OrderedDict()

    def _open(self) -> tuple[dict[str, Any], Listed]:
        """What the present version lists; from now on, until :meth:`close`, its files are not removed."""
        for _ in range(_OPEN_ATTEMPTS):
            version = read_version(self.root)
            try:
                listed = read_listed(self.root, version, self.source)
            except (InputError, FileNotFoundError):
                if read_version(self.root) == version:
                    raise
                continue  # replaced while it was read
            lock = reader_lock.share(os.path.join(self.root, listed.entry["manifest"]))
            self._release = weakref.finalize(self, reader_lock.release, lock)
            if read_version(self.root) == version:
                return version, listed
            self._release()
        raise InputError(f"{os.path.join(self.root, VERSION_FILE)}: changes all the time; try again later")

    def close(self) -> None:
        """Release the version that was opened, so that its files may be removed when superseded.

        What is not closed is let go with the last reference. Tokens that are in use stay readable.
        """
        self._release()
        self._maps.clear()

    def _check(self, verify: bool) -> None:
        for shard in self.shards:
            path, spans = self._file(shard.bin), self._file(shard.spans)
            expected = shard.tokens * self.dtype.itemsize
            actual = os.path.getsize(path) if os.path.exists(path) else None
            if actual != expected:
                found = "is missing" if actual is None else f"has {actual} bytes"
                raise InputError(f"{path}: {found}, expected {expected} ({shard.tokens} tokens of {self.dtype})")
            if not os.path.exists(spans):
                raise InputError(f"{spans}: is missing")
            for file, sha256 in ((path, shard.sha256), (spans, shard.spans_sha256)):
                if verify and storage.sha256(file) != sha256:
                    raise InputError(f"{file}: is damaged: its SHA-256 is not the one in the manifest")

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            path = self._file(self.shards[shard].bin)
            if self.shards[shard].tokens == 0:  # nothing can be mapped there
                return np.empty(0, self.dtype)
            try:
                self._maps[shard] = np.memmap(path, self.dtype.newbyteorder("<"), "r")
            except FileNotFoundError:
                raise InputError(f"{path}: is gone since the corpus was opened; open it again") from None
        return self._maps[shard]

    def _shard(self, shard: int) -> ShardInfo:
        if not 0 <= shard < len(self.shards):
            raise IndexError(f"{self.path}: has {len(self.shards)} shards, got shard {shard}")
        return self.shards[shard]

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, read-only, of :attr:`dtype`; a view where they lie in one shard."""
        if not 0 <= start <= stop <= self.total_tokens:
            raise IndexError(f"{self.path}: expected 0 ≤ start ≤ stop ≤ {self.total_tokens}, got [{start}, {stop})")
        parts = []
        shard = int(np.searchsorted(self.offsets, start, "right")) - 1
        while start < stop:
            end = min(stop, int(self.offsets[shard + 1]))
            origin = int(self.offsets[shard])
            parts.append(self._map(shard)[start - origin : end - origin])
            start, shard = end, shard + 1
        if len(parts) == 1:
            return parts[0].view(np.ndarray)
        joined = np.concatenate(parts) if parts else np.empty(0, self.dtype)
        joined.flags.writeable = False
        return joined

    def num_windows(self, seq_len: int) -> int:
        """Windows of ``seq_len + 1`` tokens at stride ``seq_len``: no token is a target twice."""
        return max(0, (self.total_tokens - 1) // seq_len)

    def window(self, index: int, seq_len: int) -> np.ndarray:
        """The ``seq_len + 1`` tokens of a window."""
        if not 0 <= index < self.num_windows(seq_len):
            raise IndexError(f"{self.path}: has {self.num_windows(seq_len)} windows, got window {index}")
        return self.tokens(index * seq_len, (index + 1) * seq_len + 1)

    def spans(self, shard: int) -> pa.Table:
        """The shard's spans (:data:`SPANS_SCHEMA`), checked to cover it without a gap."""
        return self._load_spans(shard)[0]

    def starts(self, shard: int) -> np.ndarray:
        """int64[documents]: where each of the shard's documents starts in it."""
        return self._load_spans(shard)[1]

    def _load_spans(self, shard: int) -> tuple[pa.Table, np.ndarray]:
        info = self._shard(shard)
        if shard in self._spans:
            self._spans.move_to_end(shard)
            return self._spans[shard]
        path = self._file(info.spans)
        with open_table(path, SPANS_SCHEMA.names) as file:
            table = file.read(SPANS_SCHEMA.names).cast(SPANS_SCHEMA).combine_chunks()
        starts, lengths = table["start"].to_numpy(), table["length"].to_numpy()
        ends = np.cumsum(lengths)
        whole = len(table) == info.documents and int(ends[-1] if len(ends) else 0) == info.tokens
        if not whole or (starts != ends - lengths).any():
            raise InputError(f"{path}: its spans do not cover the shard's {info.tokens} tokens without a gap")
        self._spans[shard] = table, starts
        if len(self._spans) > _SPANS_IN_MEMORY:
            self._spans.popitem(last=False)
        return table, starts

    def read_spans(self, shard: int, columns: Sequence[str], rows: int) -> Iterator[dict[str, pa.Array]]:
        """``columns`` of the shard's spans, ``start`` and ``length`` among them, ``rows`` at a time.

        Raises:
            InputError: the file is missing, is not what the manifest says, or does not cover the shard without a gap.
        """
        info = self._shard(shard)
        path = self._file(info.spans)
        try:
            digest = storage.sha256(path)
        except FileNotFoundError:
            raise InputError(f"{path}: is missing") from None
        if digest != info.spans_sha256:
            raise InputError(f"{path}: is damaged: its SHA-256 is not the expected {info.spans_sha256}")
        documents = end = 0
        for batch in read_batches(path, columns, rows, expected="a table of spans", missing="is missing"):
            found = {name: _cast(path, batch[name], SPANS_SCHEMA.field(name)) for name in columns}
            starts, lengths = found["start"].to_numpy(), found["length"].to_numpy()
            ends = end + np.cumsum(lengths)
            for row in np.flatnonzero((starts != ends - lengths) | (lengths < 1))[:1].tolist():
                raise InputError(
                    f"{path}: row {documents + row}: expected a document of 1 token or more right after the last one"
                )
            yield found
            documents, end = documents + len(starts), int(ends[-1]) if len(ends) else end
        if (documents, end) != (info.documents, info.tokens):
            expected = f"expected {info.documents} documents of {info.tokens} tokens together"
            raise InputError(f"{path}: {expected}, got {documents} of {end}")

    def span(self, shard: int, index: int) -> Span:
        """Where the shard's document ``index`` stands."""
        documents = self._shard(shard).documents
        if not 0 <= index < documents:
            raise IndexError(f"{self.path}: shard {shard} has {documents} documents, got document {index}")
        (row,) = self.spans(shard).slice(index, 1).to_pylist()
        return Span(shard, index, **row)

    def document(self, shard: int, index: int) -> np.ndarray:
        """All tokens of the shard's document ``index``, its EOT included."""
        span = self.span(shard, index)
        return self._map(shard)[span.start : span.start + span.length].view(np.ndarray)

    def locate(self, shard: int, offset: int) -> Span:
        """The document that holds token ``offset`` of a shard."""
        if not 0 <= offset < self._shard(shard).tokens:
            raise IndexError(f"{self.path}: shard {shard} has {self.shards[shard].tokens} tokens, got offset {offset}")
        return self.span(shard, int(np.searchsorted(self.starts(shard), offset, "right")) - 1)


def _cast(path: str, column: pa.Array, field: pa.Field) -> pa.Array:
    """A column as a table of spans has it."""
    try:
        cast = column.cast(field.type)
    except pa.ArrowException:
        raise InputError(f"{path}: {field.name}: expected {field.type}, got {column.type}") from None
    if cast.null_count:
        raise InputError(f"{path}: {field.name}: expected a value in every row, got null")
    return cast
