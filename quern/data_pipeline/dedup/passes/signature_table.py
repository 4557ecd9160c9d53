"""Reads a partition's table of signatures together with its documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from quern.data_pipeline.dedup.exchange import read_records, record_blocks
from quern.data_pipeline.dedup.passes.facts import FACTS, Ids, id_words, read_rows
from quern.data_pipeline.dedup.work import DedupInputs, PartitionPlace

__all__ = ["signature_batches"]

_BLOCK = 1 << 16


def signature_batches(
    work: DedupInputs, place: PartitionPlace, documents: int, columns: Sequence[str]
) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
    """``(row among the partition's documents of each row or −1, rows)``, a bounded number at a time.

    While the table has the documents in their order, as it is written, nothing of them is held; from the first that
    stands elsewhere on, all ids of the partition are, about 50 bytes a document.
    """
    path, path_of_facts = work.table("signatures", place), work.file("facts", place.index)
    index: Ids | None = None
    row, first, held = 0, 0, np.empty((0, 2), dtype=np.uint64)
    for batch in read_rows(path, ["doc_id", *columns]):
        ids = id_words(batch.column("doc_id"), f"{path}: doc_id")
        if index is None:
            if row + len(ids) > first + len(held):
                first, held = row, read_records(path_of_facts, FACTS, row, min(row + _BLOCK, documents))["id"]
            here = held[row - first : row - first + len(ids)]
            if len(here) == len(ids) and (here == ids).all():
                yield np.arange(row, row + len(ids)), batch
                row += len(ids)
                continue
            index = Ids(_all_ids(path_of_facts, documents))
        yield index.rows(ids), batch


def _all_ids(path_of_facts: str, documents: int) -> np.ndarray:
    ids = (block["id"].copy() for _, block in record_blocks(path_of_facts, FACTS, documents))
    return np.concatenate([np.empty((0, 2), dtype=np.uint64), *ids])
