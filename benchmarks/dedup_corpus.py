"""Verdicts and signatures of a run with planted duplicates, for ``dedup_scale.py``: any document from its number alone.

A document has 40 to 64 shingles, pseudorandom functions of what it was planted as, and the MinHash signature of them.
Numbers are handed out plan by plan and dealt to the partitions in turn, so that every cluster is in all of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern.data_pipeline.dedup.signature import permutations
from quern.data_pipeline.page.document import HASH, SIGNATURE_SCHEMA, verdict_schema

NUM_PERM, ROWS, SLOTS = 128, 8, 64
PARTITION_DOCUMENTS = 50_000
#: Places that one chain's window moves on from document to document: neighbours have 58 of 70 in common, others less.
STEP = 6
#: A document has the text or the URL of one that is at most so many numbers before it.
MOST_BACK = 40
_ROWS_AT_ONCE = 1024


def mix(*words: np.ndarray | int) -> np.ndarray:
    """uint64: a pseudorandom function of the words (splitmix64's finaliser over their sums)."""
    state = np.uint64(0x1234567)
    with np.errstate(over="ignore"):
        for word in words:
            state = (state + np.asarray(word).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


@dataclass(frozen=True)
class Corpus:
    """What is planted among ``documents`` documents."""

    documents: int

    @property
    def partitions(self) -> int:
        return max(1, -(-self.documents // PARTITION_DOCUMENTS))

    @property
    def sharing(self) -> int:
        """The first documents: different, but of one band key."""
        return self.documents // 10

    @property
    def largest(self) -> int:
        """Members of the largest cluster; they follow."""
        return min(1_000_000, self.documents // 20)

    @property
    def longest_chain(self) -> int:
        return min(100_000, self.documents // 100)

    @property
    def first_free(self) -> int:
        """Documents from here on that are in no cluster."""
        return int(_starts(self)[-1])

    def name(self, index: int) -> str:
        return f"part-{index:05d}"

    def numbers(self, index: int) -> np.ndarray:
        """int64: the documents of a partition, in the order of its rows."""
        return np.arange(index, self.documents, self.partitions)

    def place(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(partition, row)`` of each document."""
        return numbers % self.partitions, numbers // self.partitions

    def cluster(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(cluster, place in it, whether it is a chain)``; the cluster of a document in none is −1."""
        starts = _starts(self)
        cluster = np.searchsorted(starts, numbers, side="right") - 1
        inside = (cluster >= 0) & (numbers < self.first_free) & (numbers >= self.sharing)
        place = numbers - starts[np.maximum(cluster, 0)]
        size = np.diff(np.append(starts, self.documents))[np.maximum(cluster, 0)]
        chain = inside & ((cluster == 1) | ((size >= 3) & (mix(7, cluster) % np.uint64(4) == 0) & (cluster > 1)))
        return np.where(inside, cluster, -1), place, chain

    def shingles(self, numbers: np.ndarray) -> np.ndarray:
        """uint64[documents, 64]: their shingles, some more than once."""
        cluster, place, chain = self.cluster(numbers)
        slot = np.arange(SLOTS)[None, :]
        # to begin with, everybody's own; those with fewer repeat their first
        count = (40 + mix(1, numbers) % np.uint64(25)).astype(np.int64)
        made = mix(2, numbers[:, None], slot)
        # members of a cluster: its shingles, but for up to four (of large ones) or seven
        rows = np.flatnonzero((cluster >= 0) & ~chain)
        common, own = cluster[rows], numbers[rows]
        size = 48 + mix(3, common) % np.uint64(17)
        changes = mix(4, own) % np.where(common <= 1, np.uint64(5), np.uint64(8))
        away = (slot.astype(np.uint64) + mix(5, own)[:, None]) % size[:, None] < changes[:, None]
        made[rows] = np.where(away, made[rows], mix(6, common[:, None], slot))
        count[rows] = size
        # members of a chain: a window that moves on
        made[chain] = mix(8, cluster[chain, None], place[chain, None] * STEP + slot)
        count[chain] = SLOTS
        made = np.where(slot < count[:, None], made, made[:, :1])
        hub = numbers < self.sharing
        made[hub, :ROWS] = _band_shingles()
        return made

    def signatures(self, shingles: np.ndarray) -> np.ndarray:
        """uint32[documents, 128]: MinHash, of many documents at once."""
        a, b = permutations(NUM_PERM, 1)
        signatures = np.empty((len(shingles), NUM_PERM), dtype=np.uint32)
        for start in range(0, len(shingles), _ROWS_AT_ONCE):
            hashes = _fmix32(np.ascontiguousarray(shingles[start : start + _ROWS_AT_ONCE].T).astype(np.uint32))
            buffer = np.empty_like(hashes)
            for perm in range(NUM_PERM):
                np.multiply(hashes, a[perm], out=buffer)
                np.add(buffer, b[perm], out=buffer)
                signatures[start : start + _ROWS_AT_ONCE, perm] = buffer.min(axis=0)
        return signatures

    def ids(self, numbers: np.ndarray) -> np.ndarray:
        """uint64[documents, 2]: big-endian halves."""
        return np.stack([mix(11, numbers), mix(12, numbers)], axis=1)

    def facts(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Words, time of fetching, and under whose number a text and a URL go: one of 50 is an earlier one's."""
        cluster, place, chain = self.cluster(numbers)
        back = 1 + (mix(13, numbers) % np.uint64(MOST_BACK)).astype(np.int64)
        first = numbers - np.minimum(numbers - self.first_free, back)
        free = numbers > self.first_free
        luck = mix(14, numbers) % np.uint64(50)
        # every other chain is in survivor order from one end to the other: its members wait for each other
        ordered = chain & (cluster % 2 == 1)
        return {
            "words": np.where(cluster >= 0, 100, 50 + (mix(15, numbers) % np.uint64(400)).astype(np.int64)),
            "fetched": np.where(ordered, place, (mix(16, numbers) % np.uint64(10**6)).astype(np.int64)),
            "text": np.where(free & (luck == 0), first, numbers),
            "url": np.where(free & (luck == 1), first, numbers),
        }

    def write(self, run_dir: str, index: int) -> None:
        """The two tables of a partition."""
        numbers = self.numbers(index)
        facts = self.facts(numbers)
        schema = verdict_schema(["text.num_words"])
        hashes = {name: np.stack([mix(21, facts[name]), mix(22, facts[name])], axis=1) for name in ("text", "url")}
        columns = {
            "doc_id": binary(self.ids(numbers)),
            "source": pa.array(["crawl"]).take(pa.array(np.zeros(len(numbers), dtype=np.int32))),
            "source_file": pa.array([self.name(index)]).take(pa.array(np.zeros(len(numbers), dtype=np.int32))),
            "canonical_url": pa.array(hashes["url"][:, 0]).cast(pa.string()),
            "fetched_at": pa.array(facts["fetched"] * 10**6).cast(pa.timestamp("us", tz="UTC")),
            "post_filter_hash": binary(hashes["text"]),
            "text.num_words": pa.array(facts["words"].astype(np.float64)),
        }
        nulls = {field.name: pa.nulls(len(numbers), field.type) for field in schema}
        table = pa.table([columns.get(name, null) for name, null in nulls.items()], schema=schema)
        _write(f"{run_dir}/verdicts/crawl/{self.name(index)}.parquet", table)
        shingles = np.sort(self.shingles(numbers), axis=1)
        signatures = self.signatures(shingles)
        new = np.ones(shingles.shape, dtype=bool)
        new[:, 1:] = shingles[:, 1:] != shingles[:, :-1]
        ends = np.concatenate(([0], np.cumsum(new.sum(axis=1)))).astype(np.int32)
        fixed = np.arange(len(numbers) + 1, dtype=np.int32) * NUM_PERM
        table = pa.table(
            [
                columns["doc_id"],
                pa.ListArray.from_arrays(pa.array(fixed), pa.array(signatures.ravel())),
                pa.ListArray.from_arrays(pa.array(ends), pa.array(shingles[new])),
            ],
            schema=SIGNATURE_SCHEMA,
        )
        _write(f"{run_dir}/signatures/crawl/{self.name(index)}.parquet", table)


@lru_cache(maxsize=4)
def _starts(corpus: Corpus) -> np.ndarray:
    """First documents of the clusters, in order; the last is the first that is in none."""
    documents = corpus.documents
    sizes = [corpus.largest, corpus.longest_chain]
    size = min(100_000, documents // 200)
    while size > 20:  # a ladder of them, three of each size
        sizes += [size] * 3
        size //= 4
    small = 2 + (mix(9, np.arange(documents // 40)) % np.uint64(9)).astype(np.int64)
    starts = corpus.sharing + np.cumsum([0, *sizes, *small.tolist()])
    return starts[starts < documents]


@lru_cache(maxsize=1)
def _band_shingles() -> np.ndarray:
    """uint64[8]: the shingles with the least values of all under the permutations of the first band."""
    a, b = (values[:ROWS, 0].tolist() for values in permutations(NUM_PERM, 1))
    found = [_unfmix32(pow(a[row], -1, 2**32) * (row - b[row]) % 2**32) for row in range(ROWS)]
    return np.array(found, dtype=np.uint64)


def _fmix32(hashes: np.ndarray) -> np.ndarray:
    hashes ^= hashes >> np.uint32(16)
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    hashes ^= hashes >> np.uint32(16)
    return hashes


def _unfmix32(value: int) -> int:
    value ^= value >> 16
    value = value * pow(0xC2B2AE35, -1, 2**32) % 2**32
    value ^= value >> 13 ^ value >> 26
    value = value * pow(0x85EBCA6B, -1, 2**32) % 2**32
    return value ^ value >> 16


def binary(halves: np.ndarray) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(HASH, len(halves), [None, pa.py_buffer(halves.astype(">u8").tobytes())])


def _write(path: str, table: pa.Table) -> None:
    """Under its name when it is whole; row groups as a partition leaves them."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pq.write_table(table, f"{path}.tmp", compression="zstd", row_group_size=8192)
    os.replace(f"{path}.tmp", path)
