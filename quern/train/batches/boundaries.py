"""Builds the document boundaries of a source's whole stream, in constant memory.

One file a source: little-endian int64, one number a document in the order of the stream, ``start << 1 | purged``. It is
made once from the spans of every shard and memory-mapped from then on. Its name holds a digest of what it was made
from, so that a file of another corpus version is never taken for it.

Shape legend: N windows, M documents that touch them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quern import storage
from quern.config import digest
from quern.parallel.planning.segments import ranges
from quern.tokenize.selection.chosen import Chosen
from quern.tokenize.shards import ShardReader
from quern.train.batches.corpus import exclusive

__all__ = ["Boundaries", "Documents", "boundaries_path", "open_boundaries"]

_FORMAT = "quern boundaries 1"
_ROWS = 1 << 16
_COLUMNS = ["start", "length", "purged"]


def boundaries_path(reader: ShardReader, folder: str, chosen: Chosen | None = None) -> str:
    """The file of ``reader``'s source, or of documents ``chosen`` from it, in ``folder``; its name is keyed by all that
    decides its content."""
    told = [] if chosen is None else [chosen.identity]
    key = digest([_FORMAT, [[shard.spans_sha256, shard.tokens, shard.documents] for shard in reader.shards], *told])
    return os.path.join(folder, f"{reader.source}.{key}.boundaries")


def open_boundaries(
    readers: Sequence[ShardReader], folder: str, chosen: Sequence[Chosen | None] | None = None
) -> tuple[Boundaries, ...]:
    """The boundaries of every source, or of the documents ``chosen`` from it, built where ``folder`` does not hold them
    yet.

    Any number of processes may call it at once: those of a node wait for the first, others build the same bytes.

    Raises:
        InputError: a spans file is missing, damaged, or does not cover its shard.
    """
    each = [None] * len(readers) if chosen is None else chosen
    return tuple(Boundaries.open(reader, folder, own) for reader, own in zip(readers, each, strict=True))


@dataclass(frozen=True)
class Documents:
    """The documents that touch each of N windows, window by window: M rows in all.

    A window is touched by the documents of its ``seq_len`` inputs and by the one of its last target.
    """

    counts_N: NDArray[np.int64]
    """Documents of each window, ≥ 1."""
    starts_M: NDArray[np.int64]
    """Where each starts, counted from its window's first token; ≤ 0 for the first of a window, at most ``seq_len``."""
    purged_M: NDArray[np.bool_]


class Boundaries:
    """Start and state of every document of a source's stream."""

    def __init__(self, path: str, num_documents: int) -> None:
        self.path = path
        shape = (num_documents,)
        # A plain view: slices of a np.memmap cost several times more.
        self._marks = np.memmap(path, "<i8", "r", shape=shape).view(np.ndarray) if num_documents else np.empty(0, "<i8")

    @classmethod
    def open(cls, reader: ShardReader, folder: str, chosen: Chosen | None = None) -> Boundaries:
        """The boundaries of ``reader``'s stream, or of that of documents ``chosen`` from it, built first if ``folder``
        does not hold them."""
        documents = reader.num_documents if chosen is None else chosen.documents
        path, size = boundaries_path(reader, folder, chosen), 8 * documents
        if not _is_whole(path, size):
            with exclusive(os.path.join(folder, f".{reader.source}.lock")):
                if not _is_whole(path, size):
                    with storage.publish(path) as file:
                        for marks in _read_marks(reader, chosen):
                            file.write(marks.astype("<i8", copy=False).tobytes())
        return cls(path, documents)

    def __len__(self) -> int:
        return len(self._marks)

    def between(self, starts_N: NDArray[np.int64], seq_len: int) -> Documents:
        """The documents that touch the tokens ``[start, start + seq_len]`` of each window.

        ``starts_N``: first tokens in the stream; the last token of every window is in the stream too. Ascending starts
        are found fastest: neighbouring searches read the same part of the file.
        """
        queries = np.concatenate([starts_N, starts_N + seq_len])
        ends = np.searchsorted(self._marks, queries << 1 | 1, "right")
        first_N = ends[: len(starts_N)] - 1
        counts_N = ends[len(starts_N) :] - first_N
        marks_M = self._marks[ranges(first_N, counts_N)]
        return Documents(counts_N, (marks_M >> 1) - np.repeat(starts_N, counts_N), (marks_M & 1).astype(bool))


def _is_whole(path: str, size: int) -> bool:
    return os.path.exists(path) and os.path.getsize(path) == size


def _read_marks(reader: ShardReader, chosen: Chosen | None) -> Iterator[NDArray[np.int64]]:
    for shard in range(len(reader.shards)):
        for spans in reader.read_spans(shard, _COLUMNS, _ROWS):
            starts, purged = spans["start"].to_numpy(), spans["purged"].to_numpy(zero_copy_only=False)
            starts = starts + int(reader.offsets[shard])
            if chosen is not None:
                starts = chosen.place(starts)
                starts, purged = starts[starts >= 0], purged[starts >= 0]
            yield starts << 1 | purged
