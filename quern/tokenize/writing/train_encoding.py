"""Trains a byte-level BPE on the run's kept documents, and stores it as a tiktoken ranks file.

The same documents give the same bytes, whatever the partitions and their order: the sample is chosen by keyed hash,
and the training runs on one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.execution.engine import Engine
from quern.storage.parquet import publish_table, read_table
from quern.tokenize.byte_level import shown_bytes
from quern.tokenize.encoding import format_ranks
from quern.tokenize.place import PLACE, doc_ids, keyed_hashes
from quern.tokenize.writing.choose import TRAIN, chosen_documents

__all__ = ["SAMPLE_BYTES", "TRAINING_FORMAT", "train_on_documents", "train_ranks"]

#: Raised whenever the code would train other ranks from the same documents.
TRAINING_FORMAT = 1

#: UTF-8 bytes of text to train on: a vocabulary of 32,768 hardly changes beyond.
SAMPLE_BYTES = 64 << 20

#: What one document may add to the sample.
DOCUMENT_CHARS = 100_000

#: Pairs seen once are noise, not words.
MIN_FREQUENCY = 2

_SAMPLE = pa.schema([("key", pa.uint64()), ("doc_id", pa.binary(16)), ("text", pa.string())])


def train_ranks(texts: Iterable[str], vocab_size: int) -> bytes:
    """The ranks file of a byte-level BPE with GPT-2's pattern and at most ``vocab_size - 1`` ranks (EOT comes after).

    The same texts in the same order give the same bytes in any process.
    """
    with _one_thread():
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=MIN_FREQUENCY,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        vocabulary = tokenizer.get_vocab()
    byte_of = {shown: byte for byte, shown in shown_bytes().items()}
    return format_ranks({bytes(byte_of[c] for c in token): rank for token, rank in vocabulary.items()})


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep ``tokenizers`` on one thread: it reads the first variable at each call, the second when its pool starts."""
    settings = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def train_on_documents(
    run_dir: str,
    partitions: Sequence[tuple[str, str]],
    vocab_size: int,
    seed: int,
    engine: Engine,
    scratch: str,
    *,
    sample_bytes: int,
) -> bytes:
    """Train on a sample of the documents chosen for training (``quern.tokenize.writing.choose`` ran before).

    Documents enter by ascending keyed hash until ``sample_bytes`` are reached, held-out ones never.
    """
    tasks = [(run_dir, source, partition, seed, scratch, sample_bytes) for source, partition in partitions]
    best = np.empty(0, PLACE)
    lowest_key: dict[int, int] = {}
    for index, offered in engine.map(offer_documents, tasks, label="encoding: choose texts"):
        if len(offered):
            lowest_key[index] = int(offered["key"][0])
        best = _lowest(np.concatenate([best, offered]), sample_bytes)
    if not len(best):
        return train_ranks((), vocab_size)
    last = best[-1:]
    limit = (int(last["key"][0]), doc_ids(last).tobytes())
    held = [index for index in sorted(lowest_key) if lowest_key[index] <= limit[0]]
    fetches = [(*tasks[index][:5], limit, _sample_path(scratch, *partitions[index])) for index in held]
    samples = [fetches[index][-1] for index, _ in engine.map(fetch_texts, fetches, label="encoding: read texts")]
    ((_, ranks),) = engine.map(train_on_samples, [(sorted(samples), vocab_size)], label="encoding: train")
    return ranks


def offer_documents(
    run_dir: str, source: str, partition: str, seed: int, scratch: str, sample_bytes: int
) -> np.ndarray:
    """The partition's documents that could be in the sample: PLACE records by (hash, doc_id); lengths are bytes."""
    rows: list[tuple[int, int, int, int]] = []
    best = np.empty(0, PLACE)
    for doc_id, text, _ in chosen_documents(run_dir, source, partition, scratch, only=TRAIN):
        key = int(keyed_hashes(seed, "encoding", (doc_id,))[0])
        size = len(text[:DOCUMENT_CHARS].encode())
        rows.append((key, int.from_bytes(doc_id[:8], "big"), int.from_bytes(doc_id[8:], "big"), size))
        if len(rows) >= 1 << 16:
            best = _lowest(np.concatenate([best, np.array(rows, PLACE)]), sample_bytes)
            rows.clear()
    return _lowest(np.concatenate([best, np.array(rows, PLACE)]), sample_bytes)


def _lowest(records: np.ndarray, sample_bytes: int) -> np.ndarray:
    """The first records by (hash, doc_id) up to the one that reaches ``sample_bytes``."""
    records = records[np.lexsort((records["low"], records["high"], records["key"]))]
    return records[: int(np.searchsorted(np.cumsum(records["length"]), sample_bytes, "left")) + 1]


def fetch_texts(
    run_dir: str, source: str, partition: str, seed: int, scratch: str, limit: tuple[int, bytes], path: str
) -> None:
    """Write the partition's part of the sample: the documents whose (hash, doc_id) is at most ``limit``."""
    rows = []
    for doc_id, text, _ in chosen_documents(run_dir, source, partition, scratch, only=TRAIN):
        key = int(keyed_hashes(seed, "encoding", (doc_id,))[0])
        if (key, doc_id) <= limit:
            rows.append({"key": key, "doc_id": doc_id, "text": text[:DOCUMENT_CHARS]})
    publish_table(path, pa.Table.from_pylist(rows, _SAMPLE))


def train_on_samples(samples: Sequence[str], vocab_size: int) -> bytes:
    """Train on the texts of all sample files, by (hash, doc_id)."""
    table = pa.concat_tables([read_table(path) for path in samples])
    keys = list(zip(table["key"].to_pylist(), table["doc_id"].to_pylist(), strict=True))
    texts = table["text"].combine_chunks()
    return train_ranks((texts[i].as_py() for i in sorted(range(len(keys)), key=keys.__getitem__)), vocab_size)


def _sample_path(scratch: str, source: str, partition: str) -> str:
    return storage.join(scratch, "samples", source, f"{partition}.parquet")
