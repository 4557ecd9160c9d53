"""Reads what duplicate removal needs of each kept document from the tables of its partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.dedup.exact import url_keys
from quern.data_pipeline.dedup.exchange import record_blocks
from quern.data_pipeline.dedup.signature import NUM_WORDS
from quern.data_pipeline.dedup.work import DedupInputs, Done, PartitionGroup, PartitionPlace
from quern.data_pipeline.page.keys import KEY, bytes_of, places
from quern.errors import QuernError
from quern.storage.parquet import open_table

__all__ = ["FACTS", "UNKNOWN_TIME", "Ids", "fact_blocks", "id_words", "read_facts", "read_rows"]

#: One kept document; 128-bit values as big-endian halves, so that they sort like the bytes.
FACTS = np.dtype(
    [
        ("id", "<u8", 2),
        ("text", "<u8", 2),
        ("url", "<u8", 2),
        ("has_url", "?"),
        ("fetched", "<i8"),
        ("words", "<i8"),
    ]
)
UNKNOWN_TIME = np.iinfo(np.int64).max
_COLUMNS = ["doc_id", "canonical_url", "fetched_at", "post_filter_hash", "stage", NUM_WORDS]
#: Rows of verdicts at once: equal texts, such as a long URL, take no room in a file and all of it in memory.
_VERDICTS = 1 << 13
#: What a batch of a table may take, by the mean of its rows.
_BATCH_BYTES = 32 << 20


def id_words(column: pa.Array, what: str) -> np.ndarray:
    """uint64[rows, 2] of a ``fixed_size_binary(16)`` column: big-endian halves, so that order is kept.

    Raises:
        QuernError: a value is null.
    """
    if column.null_count:
        raise QuernError(f"{what}: {column.null_count} values are null, expected 16 bytes for each kept document")
    return np.frombuffer(bytes_of(column), dtype=">u8").reshape(-1, 2).astype(np.uint64)


def read_rows(path: str, columns: Sequence[str], batch_size: int = 1024) -> Iterator[pa.RecordBatch]:
    """The rows of a table, at most ``batch_size`` at a time, and fewer where documents are large."""
    with open_table(path, columns, expected="what duplicate removal needs") as table:
        groups = (table.metadata.row_group(index) for index in range(table.num_row_groups))
        fitting = (group.num_rows * _BATCH_BYTES // max(group.total_byte_size, 1) for group in groups)
        yield from table.iter_batches(batch_size=max(1, min([batch_size, *fitting])), columns=columns)


def read_facts(work: DedupInputs, place: PartitionPlace) -> Done:
    """Task: one partition's verdicts → its facts, in their order. Gives back the number of kept documents."""
    path = work.table("verdicts", place)
    count = 0
    with storage.publish(work.file("facts", place.index)) as file:
        for batch in read_rows(path, _COLUMNS, _VERDICTS):
            facts = _facts(batch, path)
            file.write(facts.tobytes())
            count += len(facts)
    return Done((count,))


def fact_blocks(work: DedupInputs, shard: PartitionGroup) -> Iterator[tuple[PartitionPlace, int, np.ndarray]]:
    """``(partition, row in the shard of the first, facts)`` of a shard's documents, a bounded number at a time."""
    before = 0
    for place, documents in zip(shard.places, shard.documents, strict=True):
        for start, facts in record_blocks(work.file("facts", place.index), FACTS, documents):
            yield place, before + start, facts
        before += documents


def _facts(batch: pa.RecordBatch, path: str) -> np.ndarray:
    kept = batch.filter(pc.is_null(batch.column("stage")))
    facts = np.zeros(kept.num_rows, dtype=FACTS)
    facts["id"] = id_words(kept.column("doc_id"), f"{path}: doc_id")
    facts["text"] = id_words(kept.column("post_filter_hash"), f"{path}: post_filter_hash")
    urls = kept.column("canonical_url")
    has_url = urls.is_valid().to_numpy(zero_copy_only=False)
    facts["has_url"] = has_url
    facts["url"][has_url] = url_keys(urls.drop_null().to_pylist())
    microseconds = kept.column("fetched_at").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    facts["fetched"] = microseconds.fill_null(UNKNOWN_TIME).to_numpy(zero_copy_only=False)
    facts["words"] = kept.column(NUM_WORDS).fill_null(-1.0).to_numpy(zero_copy_only=False).astype(np.int64)
    return facts


class Ids:
    """The documents of a partition, searchable by id."""

    def __init__(self, ids: np.ndarray) -> None:
        keys = _keys(ids)
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def rows(self, wanted: np.ndarray) -> np.ndarray:
        """int64: the row of each id of ``wanted`` (uint64[n, 2]), or −1."""
        return np.append(self._order, -1)[places(self._keys, _keys(wanted))]


def _keys(ids: np.ndarray) -> np.ndarray:
    return np.frombuffer(ids.astype(">u8").tobytes(), KEY)
