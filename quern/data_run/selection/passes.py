"""The tasks of a selection: features of texts, weights of documents, and a part of the table. Each writes one file, and
what stands in it depends on the arguments alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.dedup.exchange import record_blocks
from quern.data_pipeline.dedup.rows import made_of
from quern.data_pipeline.page.keys import column_of
from quern.data_run.selection.pool import read_texts
from quern.data_run.selection.targets import TargetFile, target_texts
from quern.mixtures.importance.draw import CANDIDATE
from quern.mixtures.importance.features import Features
from quern.mixtures.importance.weights import gumbel, log_sums
from quern.tokenize.place import doc_ids
from quern.tokenize.selection.measures import SCHEMA

__all__ = ["CHOSEN", "COUNTS", "candidates", "count_table", "count_target", "weigh", "write_part"]

#: A document with its weight; ``score`` is that with its noise, and -inf where it has too few words to be chosen.
_WEIGHED = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("log_weight", "<f8"), ("score", "<f8"), ("tokens", "<i8"), ("words", "<i8")]
)
CHOSEN = np.dtype([("row", "<i8"), ("rank", "<i8")])
COUNTS = ("documents", "short", "words", "tokens", "chosen", "chosen_tokens")
_BLOCK = 1 << 17

_features = lru_cache(maxsize=1)(Features)


def count_target(target: TargetFile, num_buckets: int, file: str) -> None:
    """Task: write how often each feature occurs in files of the target: int64[num_buckets]."""
    storage.publish_bytes(file, _features(num_buckets).count(target_texts(target)).tobytes())


def count_table(table: str, lengths: str, num_buckets: int, file: str) -> None:
    """Task: write the same of the documents in a table of texts."""
    texts = (text for _, own, _ in read_texts(table, lengths) for text in own)
    storage.publish_bytes(file, _features(num_buckets).count(texts).tobytes())


def weigh(table: str, lengths: str, ratio: str, seed: int, min_words: int, file: str) -> None:
    """Task: weigh each document in a table of texts. ``ratio``: a file of float64, by bucket."""
    log_ratio = np.frombuffer(storage.read_bytes(ratio), np.float64)
    features = _features(len(log_ratio))
    with storage.publish(file) as stream:
        for ids, texts, tokens in read_texts(table, lengths):
            rows = np.zeros(len(ids), _WEIGHED)
            rows["high"], rows["low"] = np.frombuffer(b"".join(ids), ">u8").reshape(-1, 2).T
            rows["log_weight"], rows["words"] = features.log_weights(texts, log_ratio)
            rows["tokens"] = tokens
            noisy = rows["log_weight"] + gumbel(seed, ids)
            rows["score"] = np.where(rows["words"] >= min_words, noisy, -np.inf)
            stream.write(rows.tobytes())


def _blocks(file: str) -> Iterator[tuple[int, np.ndarray]]:
    """What :func:`weigh` wrote, a bounded number of rows at a time with the number of the first."""
    return record_blocks(file, _WEIGHED, storage.describe([file])[0][0] // _WEIGHED.itemsize, _BLOCK)


def candidates(file: str, part: int) -> Iterator[np.ndarray]:
    """The documents that can be chosen of what :func:`weigh` wrote, as :data:`CANDIDATE`."""
    for first, block in _blocks(file):
        rows = np.flatnonzero(block["score"] > -np.inf)
        yield made_of(CANDIDATE, block[rows], part=part, row=first + rows)


def write_part(weighed: str, chosen: str, file: str) -> dict[str, Any]:
    """Task: write a part of the table; what the manifest says of it. ``chosen``: a file of :data:`CHOSEN`, by row."""
    ranked = np.frombuffer(storage.read_bytes(chosen), CHOSEN)
    sums, found = [], dict.fromkeys(COUNTS, 0)
    with storage.publish(file) as stream, pq.ParquetWriter(stream, SCHEMA, compression="zstd") as writer:
        for first, block in _blocks(weighed):
            begin, end = np.searchsorted(ranked["row"], [first, first + len(block)])
            ranks = np.full(len(block), -1)
            ranks[ranked["row"][begin:end] - first] = ranked["rank"][begin:end]
            taken = ranks >= 0
            columns = [
                column_of(doc_ids(block).tobytes()),
                pa.array(block["log_weight"]), pa.array(ranks, mask=~taken), pa.array(taken),
            ]  # fmt: skip
            writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
            enough = block["score"] > -np.inf
            sums.append(log_sums(block["log_weight"][enough]))
            tokens = block["tokens"]
            new = (len(block), (~enough).sum(), block["words"].sum(), tokens.sum(), taken.sum(), tokens[taken].sum())
            found = {name: found[name] + int(more) for name, more in zip(found, new, strict=True)}
    return {**found, "sums": sums, "sha256": storage.sha256(file)}
