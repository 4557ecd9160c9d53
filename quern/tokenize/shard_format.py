"""The on-disk format of tokens: names, schemas, and the writer of a shard. :mod:`.shards` has the reader.

``RUN/tokens/<source>/shard_00000.bin`` holds raw little-endian ids, one EOT after each document, and
``shard_00000.spans.parquet`` says which document stands where. ``RUN/tokens/VERSION.json`` is the only list of files a
reader trusts; it names every file with its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.page.keys import column_of

if TYPE_CHECKING:
    from quern.tokenize.encoding import Encoding

__all__ = [
    "ENCODING_FILE",
    "MANIFEST",
    "SPANS_SCHEMA",
    "VERSION_FILE",
    "ShardInfo",
    "ShardWriter",
    "first_version",
    "shard_name",
    "spans_file",
    "version_entry",
    "write_manifest",
    "write_manifests",
]

VERSION_FILE = "VERSION.json"
MANIFEST = "manifest.json"
ENCODING_FILE = "encoding.tiktoken"
"""The ranks that every run keeps beside its tokens, so that they can be read wherever they go."""

SPANS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.binary(16), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("purged", pa.bool_(), nullable=False),
    ]
)
_SPANS_ROW_GROUP = 1 << 16


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


def version_entry(folder: str, manifest: str, manifest_sha256: str, shards: Iterable[ShardInfo]) -> dict[str, Any]:
    """What VERSION.json says of one source; paths are below ``tokens/``."""
    kept = ("sha256", "spans_sha256", "tokens", "documents")
    entries: list[dict[str, Any]] = [
        {name: f"{folder}/{getattr(shard, name)}" for name in ("bin", "spans")}
        | {name: getattr(shard, name) for name in kept}
        for shard in shards
    ]
    return {
        "manifest": f"{folder}/{manifest}",
        "sha256": manifest_sha256,
        "tokens": sum(entry["tokens"] for entry in entries),
        "documents": sum(entry["documents"] for entry in entries),
        "shards": entries,
    }


def write_manifest(
    tokens: str, stream: str, name: str, shards: Sequence[ShardInfo], told: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the manifest of a stream's shards, with what is ``told`` of it besides; return its :func:`version_entry`
    of the folder ``tokens``."""
    path = storage.join(tokens, stream, name)
    sums = {count: sum(getattr(shard, count) for shard in shards) for count in ("tokens", "documents")}
    storage.write_json(path, {**told, **sums, "shards": list(map(asdict, shards))})
    return version_entry(stream, name, storage.sha256(path), shards)


def first_version(encoding: Mapping[str, Any], sources: Mapping[str, Any]) -> dict[str, Any]:
    """``VERSION.json`` of a new corpus. ``sources``: each stream's :func:`version_entry`."""
    return {"version": 1, "parent": None, "kind": "initial", "encoding": encoding, "sources": sources}


def write_manifests(
    tokens: str, encoding: Encoding, eot_id: int, streams: Mapping[str, Sequence[ShardInfo]], **told: Any
) -> dict[str, Any]:
    """Write the manifests of a new corpus, with what is ``told`` of each stream; return its ``VERSION.json``."""
    ids = {"vocab_size": encoding.vocab_size, "dtype": encoding.dtype, "eot_id": eot_id}
    about = {**told, **ids, "encoding": encoding.name, "ranks_sha256": encoding.ranks_sha256}
    entries = {
        stream: write_manifest(tokens, stream, MANIFEST, shards, {**about, "source": stream})
        for stream, shards in streams.items()
    }
    ranks = {"name": encoding.name, "ranks": ENCODING_FILE, "sha256": encoding.ranks_sha256}
    return first_version({**ranks, **ids}, entries)


def spans_file(doc_ids: bytes, lengths: np.ndarray, purged: np.ndarray) -> bytes:
    """The spans file of documents that stand one after the other; equal spans are equal bytes.

    ``doc_ids``: 16 bytes a document; ``lengths``: int64[n], EOT included; ``purged``: bool[n].
    """
    starts = np.cumsum(lengths) - lengths
    table = pa.table([column_of(doc_ids), starts, lengths, purged], schema=SPANS_SCHEMA)
    sink = io.BytesIO()
    pq.write_table(
        table, sink, row_group_size=_SPANS_ROW_GROUP, compression="zstd", use_dictionary=False, version="2.6"
    )
    return sink.getvalue()


class ShardWriter:
    """Writes one shard of version 1; its files appear whole at :meth:`finish`, or not at all."""

    def __init__(self, folder: str, number: int, dtype: str) -> None:
        self.bin, self.spans = f"{shard_name(number)}.bin", f"{shard_name(number)}.spans.parquet"
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

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
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
