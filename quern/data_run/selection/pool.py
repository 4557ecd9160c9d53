"""The documents of a data run that training reads: those with a span in the present stream of their source.

Held-out documents, duplicates and what was purged have none. Which rows of the tables of texts they are is found by a
join with the spans, a bounded number of documents at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quern import storage
from quern.data_pipeline.committed import missing_tables, named
from quern.data_pipeline.execution.run_directory import is_complete, read_id
from quern.data_pipeline.page.keys import KEY, keys_of, places
from quern.errors import InputError
from quern.storage.parquet import open_table, read_batches
from quern.tokenize.corpus_version import read_listed, read_version
from quern.tokenize.shard_format import VERSION_FILE
from quern.tokenize.writing.choose import group_partitions, marked_texts

__all__ = ["Pool", "open_pool", "place", "place_tasks", "read_texts"]

#: Rows of tables of texts that a task joins at once, about 100 MB; the spans of a source are read once for so many.
JOIN_DOCUMENTS = 2_000_000
_JOIN_ROWS = 1 << 18


@dataclass(frozen=True)
class Pool:
    """The present corpus version of some sources of a run."""

    run: str
    record: dict[str, object]
    """``path``, ``run_id``, ``corpus_version``, and the ``sha256`` of its VERSION.json."""
    spans: dict[str, list[str]]
    """Source → its spans files."""
    texts: tuple[tuple[str, str, int], ...]
    """Source, table of texts and its rows of each partition, by source and name."""


def open_pool(run: str, sources: Sequence[str] = ()) -> Pool:
    """The pool of some sources of a run; none: of all.

    Raises:
        InputError: it is no complete data run, has no such source, or a table of texts is missing.
    """
    if not is_complete(run):
        raise InputError(f"{run}: expected a complete data run")
    tokens = storage.join(run, "tokens")
    version = read_version(tokens)
    known = sorted(name for name in version["sources"] if not name.endswith(".val"))
    if unknown := [name for name in sources if name not in known]:
        raise InputError(f"--source: {run} has no source {unknown[0]!r:.99} (it has {', '.join(known) or 'none'})")
    if missing := missing_tables(run, {"documents"}):
        raise InputError(f"{run}: expected all tables of texts; missing: {named(missing)}")
    spans, texts = {}, []
    for source in sorted({*sources} or known):
        shards = read_listed(tokens, version, source).shards
        spans[source] = [storage.join(tokens, source, shard.spans) for shard in shards]
        paths = storage.list_files(storage.join(run, "documents", source))
        if shards and not paths:
            raise InputError(f"{run}: source {source}: has no texts; expected some in documents/{source}/")
        for path in paths:
            with open_table(path, ["doc_id", "text"], expected="texts of a data run") as table:
                texts.append((source, path, table.metadata.num_rows))
    record = {
        "path": run, "run_id": read_id(run),
        "corpus_version": version["version"], "sha256": storage.sha256(storage.join(tokens, VERSION_FILE)),
    }  # fmt: skip
    return Pool(run, record, spans, tuple(texts))


def place_tasks(pool: Pool, files: Sequence[str]) -> list[tuple[list[tuple[str, int]], list[str], list[str]]]:
    """Arguments of :func:`place` for the partitions of a pool, whose answers go to ``files``."""
    tasks = []
    for source, spans in pool.spans.items():
        mine = [(own[1:], file) for own, file in zip(pool.texts, files, strict=True) if own[0] == source]
        for group in group_partitions([rows for (_, rows), _ in mine], JOIN_DOCUMENTS):
            tasks.append(([mine[at][0] for at in group], spans, [mine[at][1] for at in group]))
    return tasks


def place(tables: Sequence[tuple[str, int]], spans: Sequence[str], files: Sequence[str]) -> None:
    """Task: write of each row of some tables of texts, all of one source, how many tokens its document has in training
    (EOT included), 0 where it is not read: int64, one file a table."""
    ids = [keys_of(batch["doc_id"]) for path, _ in tables for batch in read_batches(path, ["doc_id"], _JOIN_ROWS)]
    everything = np.concatenate([np.empty(0, KEY), *ids])
    order = np.argsort(everything, kind="stable")
    everything = everything[order]
    lengths = np.zeros(len(everything), np.int64)
    for path in spans:
        for batch in read_batches(path, ["doc_id", "length", "purged"], _JOIN_ROWS):
            at = places(everything, keys_of(batch["doc_id"]))
            found = (at >= 0) & ~batch["purged"].to_numpy(zero_copy_only=False)
            lengths[order[at[found]]] = batch["length"].to_numpy()[found]
    ends = np.cumsum([rows for _, rows in tables])
    for own, file in zip(np.split(lengths, ends[:-1]), files, strict=True):
        storage.publish_bytes(file, own.tobytes())


def read_texts(table: str, lengths: str) -> Iterator[tuple[list[bytes], list[str], np.ndarray]]:
    """doc_ids, texts and tokens of the documents in a table of texts that training reads, some at a time. ``lengths``:
    the file that :func:`place` wrote of it."""
    tokens = np.frombuffer(storage.read_bytes(lengths), np.int64)
    return marked_texts(table, tokens, tokens > 0)
