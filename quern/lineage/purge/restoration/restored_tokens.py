"""Encodes restored documents as the run encoded its own, and stores their tokens in shard order."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.page.document import HASH, content_hash
from quern.data_pipeline.page.keys import contains, key_set, keys_of
from quern.errors import InputError
from quern.lineage.purge.tables.rows import by_partition, matching
from quern.storage.parquet import TableWriter, open_table
from quern.tokenize.encoding import Encoding, load_encoding

__all__ = ["TOKENS_SCHEMA", "Tokens", "read_tokens", "write_tokens"]

#: A restored document as it is inserted; sorted by stream, place key and ``doc_id``.
TOKENS_SCHEMA = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("place_key", pa.uint64(), nullable=False),
        pa.field("doc_id", HASH, nullable=False),
        pa.field("tokens", pa.binary(), nullable=False),  # little-endian ids of the corpus's dtype, EOT at the end
    ]
)

#: Bytes of tokens in a row group, and the most documents.
_GROUP_BYTES, _GROUP_ROWS = 16 << 20, 1 << 14
#: Documents whose texts are read, and whose tokens are written, at once.
_TEXTS, _TOKENS = 256, 16


@dataclass(frozen=True)
class Tokens:
    """One restored document."""

    place_key: int
    doc_id: bytes
    tokens: np.ndarray
    """Ids, EOT included, of the corpus's dtype."""


def write_tokens(run: str, restored: pa.Table, path: str) -> int:
    """Publish the tokens of ``restored`` (``restore.MOVED_SCHEMA``, in its order) as :data:`TOKENS_SCHEMA`.

    Gives back their number, EOTs included.
    The texts are read from ``documents/`` and compared with the hash of the verdict. Memory: a few hundred texts and
    one row group; the tokens pass through a temporary file.

    Raises:
        InputError: a text is missing, or is not the one that was judged; the encoding is not the corpus's own.
    """
    encoding = _encoding(run)
    dtype = np.dtype(encoding.dtype).newbyteorder("<")
    with tempfile.TemporaryFile(prefix="quern-restore-") as spool:
        starts, sizes = _spool(run, restored, encoding, dtype, spool)
        with (
            storage.publish(path) as file,
            TableWriter(file, TOKENS_SCHEMA, rows=_GROUP_ROWS, size=_GROUP_BYTES) as writer,
        ):
            for first in range(0, restored.num_rows, _TOKENS):
                own = slice(first, first + _TOKENS)
                tokens = map(partial(_read, spool), starts[own].tolist(), sizes[own].tolist())
                rows = restored.slice(first, _TOKENS).select(TOKENS_SCHEMA.names[:-1])
                writer.add(rows.append_column("tokens", pa.array(tokens, pa.binary())))
    return int(sizes.sum()) // dtype.itemsize


def read_tokens(path: str, stream: str, dtype: str, first: int = 0, last: int = 2**64 - 1) -> Iterator[Tokens]:
    """The documents of a stream with ``first`` ≤ place key ≤ ``last``, in their order, one row group at a time.

    Raises:
        InputError: the file is missing or damaged.
    """
    little = np.dtype(dtype).newbyteorder("<")
    with open_table(path, missing="is missing") as table:
        for group in range(table.num_row_groups):
            if not _may_hold(table.metadata.row_group(group), stream, first, last):
                continue
            for row in table.read_row_group(group).to_pylist():
                if row["stream"] == stream and first <= row["place_key"] <= last:
                    ids = np.frombuffer(row["tokens"], little).astype(dtype, copy=False)
                    yield Tokens(row["place_key"], row["doc_id"], ids)


def _may_hold(group: Any, stream: str, first: int, last: int) -> bool:
    """By the statistics of the row group."""
    streams, places = (group.column(index).statistics for index in range(2))
    if streams is None or places is None or not (streams.has_min_max and places.has_min_max):
        return True
    if not streams.min <= stream <= streams.max:
        return False
    return streams.min != streams.max or (places.min <= last and places.max >= first)


def _encoding(run: str) -> Encoding:
    """The corpus's, from its own ranks."""
    path = storage.join(run, "tokens", "VERSION.json")
    own = storage.read_json(path)["encoding"]
    encoding = load_encoding(own["name"], storage.join(run, "tokens", own["ranks"]))
    for name, found in (
        ("sha256", encoding.ranks_sha256),
        ("vocab_size", encoding.vocab_size),
        ("dtype", encoding.dtype),
        ("eot_id", encoding.eot_id),
    ):
        if own[name] != found:
            raise InputError(f"{path}: encoding.{name}: is {own[name]!r}, and {found!r} of the ranks beside it")
    return encoding


def _spool(
    run: str, restored: pa.Table, encoding: Encoding, dtype: np.dtype, spool: IO[bytes]
) -> tuple[np.ndarray, np.ndarray]:
    """Append every document's tokens to ``spool``; where each starts there and its bytes, in the order of the rows."""
    starts, sizes = np.zeros(restored.num_rows, np.int64), np.full(restored.num_rows, -1, np.int64)
    end = 0
    for source, partition, own in by_partition(restored.append_column("row", pa.array(np.arange(restored.num_rows)))):
        path = storage.join(run, "documents", source, f"{partition}.parquet")
        doc_ids = own["doc_id"].to_pylist()
        expected = dict(zip(doc_ids, own["post_filter_hash"].to_pylist(), strict=True))
        row_of = dict(zip(doc_ids, own["row"].to_pylist(), strict=True))
        wanted = key_set([keys_of(own["doc_id"])])
        for batch in matching(path, ["text"], partial(contains, wanted), _TEXTS):
            for doc_id, text in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if text is None or content_hash(text) != expected[doc_id]:
                    raise InputError(f"{path}: document {doc_id.hex()}: its text is not the one that was judged")
                ids = np.append(encoding.encode(text), np.asarray(encoding.eot_id, encoding.dtype))
                data = ids.astype(dtype, copy=False).tobytes()
                spool.write(data)
                starts[row_of[doc_id]], sizes[row_of[doc_id]] = end, len(data)
                end += len(data)
    for row in np.flatnonzero(sizes < 0)[:1].tolist():
        doc_id = restored["doc_id"][row].as_py().hex()
        raise InputError(f"{run}: document {doc_id}: its text is not in documents/, it cannot be restored")
    return starts, sizes


def _read(spool: IO[bytes], start: int, size: int) -> bytes:
    spool.seek(start)
    return spool.read(size)
