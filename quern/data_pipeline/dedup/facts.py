"""What duplicate removal knows of each kept document, and the one order of all of them.

A document's *rank* is its place in survivor order over the whole run, 0 the first to be kept: the priority of its
source, then more words (the longer of two copies is more often the whole one), then earlier fetched (unknown last),
then the smallest ``doc_id``. From here on documents are ranks; their ids come back when the decisions are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.exact import url_keys
from quern.data_pipeline.dedup.exchange import read_array, read_part, write_array, write_run
from quern.data_pipeline.dedup.signature import NUM_WORDS
from quern.errors import QuernError

__all__ = [
    "FACTS",
    "RANK",
    "Ids",
    "Place",
    "Work",
    "id_words",
    "rank_documents",
    "read_facts",
    "read_ids",
    "read_ranks",
    "read_rows",
]

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
RANK = np.dtype("<i8")
_UNKNOWN_TIME = np.iinfo(np.int64).max
_COLUMNS = ["doc_id", "canonical_url", "fetched_at", "post_filter_hash", "stage", NUM_WORDS]


@dataclass(frozen=True)
class Place:
    """A partition; ``index`` is its place among the run's partitions, sorted by source and name."""

    index: int
    source: str
    name: str


@dataclass(frozen=True)
class Work:
    """What every task is given."""

    run_dir: str
    scratch: str
    config: DuplicatesConfig
    num_partitions: int
    records_per_task: int
    """How many records (documents, bands, pairs) one task takes, and an eighth of the shingles it may hold."""

    def table(self, kind: str, place: Place) -> str:
        """The committed table of a partition."""
        return storage.join(self.run_dir, kind, place.source, f"{place.name}.parquet")

    def file(self, kind: str, index: int) -> str:
        """A scratch file."""
        return storage.join(self.scratch, kind, f"{index:06d}")

    def files(self, kind: str) -> list[str]:
        """The scratch files of this kind of every partition, in order."""
        return [self.file(kind, index) for index in range(self.num_partitions)]

    def scope(self, place: Place) -> str | None:
        """What keeps the keys of a partition's documents apart from others: its source, or nothing."""
        return place.source if self.config.scope == "source" else None


def id_words(column: pa.Array, what: str) -> np.ndarray:
    """uint64[rows, 2] of a ``fixed_size_binary(16)`` column: big-endian halves, so that order is kept.

    Raises:
        QuernError: a value is null.
    """
    if column.null_count:
        raise QuernError(f"{what}: {column.null_count} values are null, expected 16 bytes for each kept document")
    if len(column) == 0:
        return np.empty((0, 2), dtype=np.uint64)
    buffer = np.frombuffer(column.buffers()[1], dtype=">u8", count=2 * len(column), offset=16 * column.offset)
    return buffer.reshape(-1, 2).astype(np.uint64)


def read_rows(path: str, columns: Sequence[str], batch_size: int = 1024) -> Iterator[pa.RecordBatch]:
    """The rows of a table, a bounded number at a time."""
    with storage.open_read(path) as file:
        table = pq.ParquetFile(file)
        missing = [name for name in columns if name not in table.schema_arrow.names]
        if missing:
            raise QuernError(f"{path}: has no column {missing[0]!r}, which duplicate removal needs")
        yield from table.iter_batches(batch_size=batch_size, columns=list(columns))


def read_facts(work: Work, place: Place) -> int:
    """Task: one partition's verdicts → its facts, in their order. Returns the number of kept documents."""
    path = work.table("verdicts", place)
    pieces = [_facts(batch, path) for batch in read_rows(path, _COLUMNS, 1 << 16)]
    facts = np.concatenate([np.empty(0, dtype=FACTS), *pieces])
    write_array(work.file("facts", place.index), facts)
    return len(facts)


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
    facts["fetched"] = microseconds.fill_null(_UNKNOWN_TIME).to_numpy(zero_copy_only=False)
    facts["words"] = kept.column(NUM_WORDS).fill_null(-1.0).to_numpy(zero_copy_only=False).astype(np.int64)
    return facts


def rank_documents(work: Work, priorities: tuple[int, ...]) -> None:
    """Task: the ranks of all documents, a part for each partition, and the ids by rank.

    ``priorities`` has one value a partition, greater is better. Takes about 100 bytes a document of the run.

    Raises:
        QuernError: two documents have the same id.
    """
    ids, keys, counts = [], [], []
    for path, priority in zip(work.files("facts"), priorities, strict=True):
        facts = read_array(path)
        counts.append(len(facts))
        ids.append(facts["id"])
        keys.append(np.stack([facts["fetched"], -facts["words"], np.full(len(facts), -priority)]))
    id_high, id_low = np.concatenate(ids).T
    by_id = np.lexsort((id_low, id_high))
    same = (id_high[by_id][1:] == id_high[by_id][:-1]) & (id_low[by_id][1:] == id_low[by_id][:-1])
    if same.any():
        first = by_id[:-1][same][0]
        raise QuernError(f"two documents have the same id {id_high[first]:016x}{id_low[first]:016x}")
    del by_id, same
    order = np.lexsort((id_low, id_high, *np.concatenate(keys, axis=1)))
    ranks = np.empty(len(order), dtype=RANK)
    ranks[order] = np.arange(len(order))
    write_array(storage.join(work.scratch, "ids"), np.stack([id_high[order], id_low[order]], axis=1))
    partition = np.repeat(np.arange(work.num_partitions), counts)
    write_array(storage.join(work.scratch, "partitions"), partition[order].astype(np.uint32))
    write_run(storage.join(work.scratch, "ranks"), ranks, partition, work.num_partitions)


def read_ranks(work: Work, place: Place) -> np.ndarray:
    """int64: the ranks of a partition's documents, in the order of its facts."""
    return read_part(storage.join(work.scratch, "ranks"), place.index, work.num_partitions, RANK)


def read_ids(work: Work) -> np.ndarray:
    """uint64[documents, 2]: the halves of each document's id, by rank."""
    return read_array(storage.join(work.scratch, "ids"))


class Ids:
    """The documents of a partition, to be found by id."""

    def __init__(self, ids: np.ndarray) -> None:
        self._order = np.lexsort((ids[:, 1], ids[:, 0]))
        self._high, self._low = ids[self._order].T
        self._repeats = int(np.unique(self._high, return_counts=True)[1].max(initial=0))

    def rows(self, wanted: np.ndarray) -> np.ndarray:
        """int64: the row of each id of ``wanted`` (uint64[n, 2]), or −1."""
        place = np.searchsorted(self._high, wanted[:, 0])
        rows = np.full(len(wanted), -1, dtype=np.int64)
        for _ in range(self._repeats):  # once, unless first halves repeat
            inside = np.minimum(place, len(self._order) - 1)
            found = (self._high[inside] == wanted[:, 0]) & (self._low[inside] == wanted[:, 1])
            rows[found] = self._order[inside[found]]
            place += 1
        return rows
