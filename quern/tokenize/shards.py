"""The on-disk format of tokens: shards, spans, manifests, versions; their writer and their reader.

``RUN/tokens/<source>/shard_00000.bin`` holds raw little-endian ids, one EOT after each document, and
``shard_00000.spans.parquet`` says which document stands where. ``RUN/tokens/VERSION.json`` is the only list of files a
reader trusts; it names every file with its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern import storage
from quern.errors import InputError
from quern.tokenize.place import place_key

__all__ = [
    "MANIFEST",
    "SPANS_SCHEMA",
    "VERSION_FILE",
    "ShardInfo",
    "ShardReader",
    "ShardWriter",
    "Span",
    "shard_name",
    "version_entry",
]

VERSION_FILE = "VERSION.json"
MANIFEST = "manifest.json"

SPANS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.binary(16), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("purged", pa.bool_(), nullable=False),
    ]
)
#: What a reader needs of VERSION.json, of a source in it, of a manifest, of a shard in that.
_VERSION = {"version": int, "sources": dict, "encoding.ranks": str}
_LISTED = {"manifest": str, "sha256": str, "shards": list}
_MANIFEST = {"encoding": str, "vocab_size": int, "dtype": str, "eot_id": int, "seed": int, "shards": list}
_SHARD = {
    **dict.fromkeys(("bin", "spans", "sha256", "spans_sha256", "first_key", "last_key"), str),
    **dict.fromkeys(("tokens", "documents"), int),
}
_SPANS_ROW_GROUP = 1 << 16
_SPANS_IN_MEMORY = 8


def shard_name(number: int) -> str:
    """``shard_00000``."""
    return f"shard_{number:05d}"


@dataclass(frozen=True)
class ShardInfo:
    """A shard's entry in the manifest of its source."""

    bin: str
    spans: str
    tokens: int
    documents: int
    sha256: str
    spans_sha256: str
    first_key: str
    """Place key of the first document, 16 hex digits."""
    last_key: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in the manifest."""
        return asdict(self)


def _fields(path: str, value: Any, kinds: Mapping[str, type], below: str = "") -> dict[str, Any]:
    """What ``value`` (``below`` of the file) has under dotted names, each of its type; other keys are left out."""
    fields = {}
    for dotted, kind in kinds.items():
        found = value
        for name in dotted.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, kind):
            expected = {dict: "a mapping", list: "a list", int: "an integer", str: "text"}[kind]
            raise InputError(f"{path}: {below}{dotted}: expected {expected}, got {found!r:.60}")
        fields[dotted] = found
    return fields


def version_entry(folder: str, manifest: str, manifest_sha256: str, shards: Iterable[ShardInfo]) -> dict[str, Any]:
    """What VERSION.json says of one source; paths are below ``tokens/``."""
    entries = [
        {
            "bin": f"{folder}/{shard.bin}",
            "sha256": shard.sha256,
            "spans": f"{folder}/{shard.spans}",
            "spans_sha256": shard.spans_sha256,
            "tokens": shard.tokens,
            "documents": shard.documents,
        }
        for shard in shards
    ]
    return {
        "manifest": f"{folder}/{manifest}",
        "sha256": manifest_sha256,
        "tokens": sum(entry["tokens"] for entry in entries),
        "documents": sum(entry["documents"] for entry in entries),
        "shards": entries,
    }


def spans_file(doc_ids: bytes, lengths: np.ndarray, purged: np.ndarray) -> bytes:
    """The spans file of documents that stand one after the other; equal spans are equal bytes.

    ``doc_ids``: 16 bytes a document; ``lengths``: int64[n], EOT included; ``purged``: bool[n].
    """
    starts = np.cumsum(lengths) - lengths
    ids = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(lengths), [None, pa.py_buffer(doc_ids)])
    columns = [ids, pa.array(starts, pa.int64()), pa.array(lengths, pa.int64()), pa.array(purged, pa.bool_())]
    table = pa.Table.from_arrays(columns, schema=SPANS_SCHEMA)
    sink = io.BytesIO()
    pq.write_table(
        table, sink, row_group_size=_SPANS_ROW_GROUP, compression="zstd", use_dictionary=False, version="2.6"
    )
    return sink.getvalue()


class ShardWriter:
    """Writes one shard; its files appear whole at :meth:`finish`, or not at all.

    ``suffix`` is empty for version 1 and ``.v<V>`` for a shard of a later version.
    """

    def __init__(self, folder: str, number: int, dtype: str, *, suffix: str = "") -> None:
        self.bin = f"{shard_name(number)}{suffix}.bin"
        self.spans = f"{shard_name(number)}{suffix}.spans.parquet"
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._hash = hashlib.sha256()
        self._ids: list[bytes] = []
        self._lengths: list[np.ndarray] = [np.empty(0, np.int64)]
        self._purged: list[np.ndarray] = [np.empty(0, bool)]
        self._publish = storage.publish(storage.join(folder, self.bin))
        self._open = False

    def __enter__(self) -> Self:
        self._file = self._publish.__enter__()
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open = False
            unfinished = error or RuntimeError(f"{self.bin}: left without finish()")
            self._publish.__exit__(type(unfinished), unfinished, trace)

    def add(self, doc_ids: bytes, lengths: np.ndarray, tokens: np.ndarray, purged: np.ndarray | None = None) -> None:
        """Append documents: 16 bytes each, their lengths (EOT included) and all of their tokens one after the other."""
        if len(doc_ids) != 16 * len(lengths) or int(lengths.sum()) != len(tokens):
            raise ValueError(f"expected {len(lengths)} ids and {int(lengths.sum())} tokens, got {len(tokens)} tokens")
        data = tokens.astype(self._dtype, casting="equiv", copy=False).tobytes()
        self._hash.update(data)
        self._file.write(data)
        self._ids.append(doc_ids)
        self._lengths.append(lengths.astype(np.int64))
        self._purged.append(np.zeros(len(lengths), bool) if purged is None else purged)

    def finish(self, *, first_key: int, last_key: int) -> ShardInfo:
        """Publish both files; the place keys of the first and the last document go into the manifest entry."""
        lengths = np.concatenate(self._lengths)
        spans = spans_file(b"".join(self._ids), lengths, np.concatenate(self._purged))
        self._open = False
        self._publish.__exit__(None, None, None)
        storage.publish_bytes(storage.join(self._folder, self.spans), spans)
        return ShardInfo(
            bin=self.bin,
            spans=self.spans,
            tokens=int(lengths.sum()),
            documents=len(lengths),
            sha256=self._hash.hexdigest(),
            spans_sha256=hashlib.sha256(spans).hexdigest(),
            first_key=f"{first_key:016x}",
            last_key=f"{last_key:016x}",
        )


@dataclass(frozen=True)
class Span:
    """Where a document stands: ``length`` tokens from ``start`` of a shard, the EOT included."""

    shard: int
    index: int
    """Its number in the shard."""
    doc_id: bytes
    start: int
    length: int
    purged: bool


class ShardReader:
    """The tokens of one source, as its corpus version lists them: one logical stream over all shards.

    ``path`` is ``RUN/tokens/<source>`` or ``….val``, on a local file system. A shard is memory-mapped at first use.

    Attributes: ``source``, ``version`` (of the corpus), ``encoding`` (name), ``ranks_path``, ``vocab_size``, ``dtype``,
    ``eot_id``, ``seed``, ``shards`` (their :class:`ShardInfo`), ``offsets`` (int64[shards + 1]: where each shard starts
    in the stream), ``total_tokens``, ``num_documents``.

    Raises:
        InputError: no version lists the source, or a file does not agree with it; the file is named. ``verify`` reads
            every byte and compares the SHA-256 too.
    """

    def __init__(self, path: str, *, verify: bool = False) -> None:
        if not storage.is_local(path):
            raise InputError(f"{path}: shards are memory-mapped; expected a folder on a local file system")
        self.path = os.path.abspath(storage.split(path)[1])
        self.root, self.source = os.path.split(self.path)
        version_path = os.path.join(self.root, VERSION_FILE)
        version = _fields(version_path, storage.read_json(version_path), _VERSION)
        self.version: int = version["version"]
        self.ranks_path = os.path.join(self.root, version["encoding.ranks"])
        if self.source not in version["sources"]:
            known = ", ".join(sorted(version["sources"])) or "none"
            raise InputError(f"{path}: the corpus version has no source {self.source!r} (it has {known})")
        listed = _fields(version_path, version["sources"][self.source], _LISTED, f"sources.{self.source}.")
        manifest_path = os.path.join(self.root, listed["manifest"])
        manifest = self._read_manifest(listed)
        self.encoding: str = manifest["encoding"]
        self.vocab_size: int = manifest["vocab_size"]
        self.dtype = np.dtype(manifest["dtype"])
        self.eot_id: int = manifest["eot_id"]
        self.seed: int = manifest["seed"]
        entries = enumerate(manifest["shards"])
        self.shards = tuple(ShardInfo(**_fields(manifest_path, e, _SHARD, f"shards.{n}.")) for n, e in entries)
        sizes = [shard.tokens for shard in self.shards]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.total_tokens = int(self.offsets[-1])
        self.num_documents = sum(shard.documents for shard in self.shards)
        self._check(listed, verify)
        self._maps: dict[int, np.ndarray] = {}
        self._spans: OrderedDict[int, tuple[pa.Table, np.ndarray]] = OrderedDict()

    def _read_manifest(self, listed: Mapping[str, Any]) -> dict[str, Any]:
        path = os.path.join(self.root, listed["manifest"])
        if not os.path.exists(path) or storage.sha256(path) != listed["sha256"]:
            raise InputError(f"{path}: missing or changed; its SHA-256 is not the one in {VERSION_FILE}")
        manifest = _fields(path, storage.read_json(path), _MANIFEST)
        if manifest["dtype"] not in ("uint16", "uint32"):
            raise InputError(f"{path}: dtype: expected uint16 or uint32, got {manifest['dtype']!r}")
        return manifest

    def _check(self, listed: Mapping[str, Any], verify: bool) -> None:
        agreed = ("sha256", "spans_sha256", "tokens", "documents")
        own = [[getattr(shard, name) for name in agreed] for shard in self.shards]
        if own != [isinstance(entry, dict) and [*map(entry.get, agreed)] for entry in listed["shards"]]:
            raise InputError(f"{self.path}: the manifest's shards are not those of {VERSION_FILE}")
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
        try:
            table = pq.read_table(path, schema=SPANS_SCHEMA).combine_chunks()
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: is damaged: {' '.join(str(error).split())[:120]}") from None
        starts, lengths = table["start"].to_numpy(), table["length"].to_numpy()
        ends = np.cumsum(lengths)
        whole = len(table) == info.documents and int(ends[-1] if len(ends) else 0) == info.tokens
        if not whole or (starts != ends - lengths).any():
            raise InputError(f"{path}: its spans do not cover the shard's {info.tokens} tokens without a gap")
        self._spans[shard] = table, starts
        if len(self._spans) > _SPANS_IN_MEMORY:
            self._spans.popitem(last=False)
        return table, starts

    def spans_between(self, start: int, stop: int) -> list[Span]:
        """The documents that overlap tokens [start, stop) of the stream, in order (starts count from their shard's)."""
        found: list[Span] = []
        if start >= stop:
            return found
        shard = max(0, int(np.searchsorted(self.offsets, start, "right")) - 1)
        while shard < len(self.shards) and int(self.offsets[shard]) < stop:
            origin = int(self.offsets[shard])
            starts = self.starts(shard)
            first = max(0, int(np.searchsorted(starts, start - origin, "right")) - 1)
            end = int(np.searchsorted(starts, stop - origin, "left"))
            found += [self.span(shard, index) for index in range(first, end)]
            shard += 1
        return found

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

    def locate_document(self, doc_id: bytes) -> Span | None:
        """Where a document stands, or None when this source has no token of it; looks only where it can be."""
        key = f"{place_key(self.seed, doc_id):016x}"
        wanted = pa.scalar(doc_id, pa.binary(16))
        for shard, info in enumerate(self.shards):
            if info.first_key <= key <= info.last_key:
                index = pc.index(self.spans(shard)["doc_id"], wanted).as_py()
                if index >= 0:
                    return self.span(shard, index)
        return None
