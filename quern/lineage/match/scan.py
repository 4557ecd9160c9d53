"""Streams a corpus in chunks against the index of a benchmark, which stays in memory.

A chunk is whole documents, or a part of a long one; the next part begins early enough to hold every gram that the last
one could not. Memory is that of a chunk. (Where n words of one document take more tokens than a chunk, the chunk grows
until they fit.) Keys propose, and the words are compared: nothing is found or missed by a hash.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from quern.data_pipeline.dedup.rows import key_starts
from quern.errors import InputError, QuernError
from quern.lineage.match.index import GramIndex, Grams, gram_keys
from quern.lineage.match.pieces import Pieces, Words, flat_index, token_bytes
from quern.tokenize.encoding import load_encoding
from quern.tokenize.shards import ShardReader

__all__ = ["CHUNK_TOKENS", "MatchedSpans", "scan_streams"]

CHUNK_TOKENS = 1 << 17
#: Tokens a process is given at a time.
JOB_TOKENS = 1 << 24


@dataclass(frozen=True)
class _Arrays:
    """Parallel int64 arrays."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """One after the other."""
        empty = [np.empty(0, np.int64)]
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts] or empty) for f in fields(cls)))


@dataclass(frozen=True)
class MatchedSpans(_Arrays):
    """Parallel int64 arrays, a row a span of a document that holds text of an item; by stream, document, item, start.

    ``streams``: index of the path; ``documents``: where the document starts in the stream; ``starts``, ``stops``:
    the fewest tokens that cover the matched text, in stream coordinates, merged where they overlap; ``items``;
    ``grams``: how many different grams of the item the document holds.
    """

    streams: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    items: np.ndarray
    grams: np.ndarray


def scan_streams(
    paths: Sequence[str], index: GramIndex, *, workers: int = 1, chunk_tokens: int = CHUNK_TOKENS
) -> MatchedSpans:
    """The matches of ``index`` in the streams at ``paths`` (``RUN/tokens/<source>``), the same for any ``workers``.

    Raises:
        InputError: a stream that cannot be read.
        QuernError: a worker process died.
    """
    jobs = list(_jobs(paths)) if index.grams else []
    if workers <= 1 or len(jobs) <= 1:
        scanner = _Scanner(paths, index, chunk_tokens)
        return MatchedSpans.joined([scanner.run(*job) for job in jobs])
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(
            min(workers, len(jobs)), context, initializer=_start_worker, initargs=(paths, index, chunk_tokens)
        ) as pool:
            return MatchedSpans.joined(list(pool.map(_run_in_worker, jobs)))
    except BrokenProcessPool:
        raise QuernError("a worker process died (out of memory?); use fewer --workers") from None


Job = tuple[int, int, int, int]
"""Stream, shard, first document, one past the last."""


def _jobs(paths: Sequence[str]) -> Iterator[Job]:
    for stream, path in enumerate(paths):
        reader = ShardReader(path)
        for shard, info in enumerate(reader.shards):
            cuts = np.searchsorted(reader.starts(shard), np.arange(0, info.tokens, JOB_TOKENS)).tolist()
            for first, last in zip(cuts, [*cuts[1:], info.documents], strict=True):
                if first < last:
                    yield stream, shard, first, last


_worker: list[_Scanner] = []


def _start_worker(paths: Sequence[str], index: GramIndex, chunk_tokens: int) -> None:
    _worker.append(_Scanner(paths, index, chunk_tokens))


def _run_in_worker(job: Job) -> MatchedSpans:
    return _worker[0].run(*job)


class _Scanner:
    """One process: the tables, and the streams it has opened."""

    def __init__(self, paths: Sequence[str], index: GramIndex, chunk_tokens: int) -> None:
        self._paths = paths
        self._index = index
        self._chunk_tokens = chunk_tokens
        self._readers: dict[int, ShardReader] = {}
        self._pieces: dict[str, Pieces] = {}

    def _open(self, stream: int) -> tuple[ShardReader, Pieces]:
        if stream not in self._readers:
            self._readers[stream] = ShardReader(self._paths[stream])
        reader = self._readers[stream]
        if reader.ranks_path not in self._pieces:
            self._pieces[reader.ranks_path] = Pieces(token_bytes(load_encoding(reader.encoding, reader.ranks_path)))
        return reader, self._pieces[reader.ranks_path]

    def run(self, stream: int, shard: int, first: int, last: int) -> MatchedSpans:
        """The matches in documents [first, last) of a shard."""
        reader, pieces = self._open(stream)
        origin = int(reader.offsets[shard])
        starts = reader.starts(shard)
        purged = reader.spans(shard)["purged"].to_numpy()
        end = int(starts[last]) if last < len(starts) else reader.shards[shard].tokens
        done: list[MatchedSpans] = []
        open_hits: list[Hits] = []  # of the document that the chunk ends in
        at, size, cut_before = int(starts[first]), self._chunk_tokens, False
        while at < end:
            stop = min(at + size, end)
            boundary = int(starts[np.searchsorted(starts, stop, "right") - 1])
            cut = stop < end and boundary <= at
            if stop < end and not cut:
                stop = boundary
            ids = reader.tokens(origin + at, origin + stop)
            words = self._read(reader, pieces, ids, shard)
            if cut_before:  # the first may be the end of another word
                words = words.between(int(np.searchsorted(words.starts, 1)), len(words))
            if cut:
                # The last word may go on. Grams from the word `later` on are the next chunk's.
                later = len(words) - self._index.n
                onward = int(words.starts[later]) - 1 if later > 0 else 0
                words = words.between(0, len(words) - 1)
                if onward < max(1, len(ids) // 2):
                    size *= 2
                    continue
            hits = find(words, self._index, pieces, starts - at).moved(at)
            open_hits.append(hits)
            if cut:
                at += onward
            else:
                at = stop
                whole = Hits.joined(open_hits)
                owner = np.searchsorted(starts, whole.starts, "right") - 1
                whole, owner = whole.where(~purged[owner]), owner[~purged[owner]]
                done.append(_by_item(whole, starts[owner], self._index, stream, origin))
                open_hits = []
            cut_before, size = cut, self._chunk_tokens
        return MatchedSpans.joined(done)

    def _read(self, reader: ShardReader, pieces: Pieces, ids: np.ndarray, shard: int) -> Words:
        try:
            return pieces.read(ids)
        except ValueError as error:
            raise InputError(f"{reader.path}/{reader.shards[shard].bin}: {error}") from None


@dataclass(frozen=True)
class Hits(_Arrays):
    """Grams in tokens: parallel int64 arrays ``grams`` (numbers), ``starts``, ``stops``."""

    grams: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def where(self, which: np.ndarray) -> Hits:
        """The hits that the mask ``which`` selects."""
        return Hits(self.grams[which], self.starts[which], self.stops[which])

    def moved(self, by: int) -> Hits:
        """The hits shifted ``by`` tokens."""
        return Hits(self.grams, self.starts + by, self.stops + by)


def find(words: Words, index: GramIndex, pieces: Pieces, documents: np.ndarray) -> Hits:
    """Every gram of ``index`` in ``words`` that lies in one document; ``documents``: int64, where they start."""
    keys = gram_keys(words.hashes, [kind.anchor for kind in index.grams])
    return Hits.joined([
        _verified(words, index, pieces, documents, kind, *kind.proposed(own))
        for kind, own in zip(index.grams, keys, strict=True)
    ])  # fmt: skip


def _verified(
    words: Words,
    index: GramIndex,
    pieces: Pieces,
    documents: np.ndarray,
    kind: Grams,
    places: np.ndarray,
    rows: np.ndarray,
) -> Hits:
    """The proposals (word, row of the kind) whose words are the gram's, and in one document."""
    lengths = kind.lengths[rows]
    inside = places + lengths <= len(words)
    places, rows, lengths = places[inside], rows[inside], lengths[inside]
    starts, stops = words.starts[places], words.stops[places + lengths - 1]
    same = np.searchsorted(documents, starts, "right") == np.searchsorted(documents, stops - 1, "right")
    places, rows, lengths = places[same], rows[same], lengths[same]
    if len(places) == 0:
        return Hits.joined([])
    covered = np.zeros(len(words) + 1, np.int64)
    np.add.at(covered, places, 1)
    np.subtract.at(covered, places + lengths, 1)
    which = np.flatnonzero(np.cumsum(covered)[:-1] > 0)
    numbers = np.full(len(words), -1, np.int64)
    numbers[which] = _in_vocabulary(words, which, index, pieces)
    right = np.ones(len(places), bool)
    for place in range(kind.spelled.shape[1]):
        expected = kind.spelled[rows, place]
        actual = numbers[np.minimum(places + place, len(words) - 1)]
        right &= (expected < 0) | (expected == actual)
    places, rows, lengths = places[right], rows[right], lengths[right]
    return Hits(rows + kind.first, words.starts[places], words.stops[places + lengths - 1])


def _in_vocabulary(words: Words, which: np.ndarray, index: GramIndex, pieces: Pieces) -> np.ndarray:
    """int64[m]: the number in the index's vocabulary of each word, −1 for a word that is not in it."""
    found = np.full(len(which), -1, np.int64)
    hashes = words.hashes[which]
    left = np.searchsorted(index.hashes, hashes, "left")
    counts = np.searchsorted(index.hashes, hashes, "right") - left
    of, expected = np.repeat(np.arange(len(which)), counts), flat_index(left, counts)
    equal = pieces.spelled(words, which[of], index.vocabulary, expected)
    found[of[equal]] = expected[equal]
    return found


def _by_item(hits: Hits, documents: np.ndarray, index: GramIndex, stream: int, origin: int) -> MatchedSpans:
    """Hits (positions in a shard that begins at ``origin``) of documents → a row a span."""
    first = index.item_starts[hits.grams]
    counts = index.item_starts[hits.grams + 1] - first
    of = np.repeat(np.arange(len(counts)), counts)
    items = index.item_of[flat_index(first, counts)]
    documents, grams = documents[of], hits.grams[of]
    order = np.lexsort((hits.starts[of], items, documents))
    of, items, documents, grams = of[order], items[order], documents[order], grams[order]
    starts, stops = hits.starts[of], hits.stops[of]
    new = key_starts(documents, items)
    group = np.cumsum(new) - 1
    pairs = np.lexsort((grams, group))
    different = key_starts(group[pairs], grams[pairs])
    num_grams = np.bincount(group[pairs][different], minlength=1)
    # Spans of a group by start: one that begins behind all before it opens a new one.
    reach = _running_max(stops, group)
    opens = new.copy()
    opens[1:] |= starts[1:] >= reach[:-1]
    opening = np.flatnonzero(opens)
    closing = np.append(opening[1:], len(opens))[: len(opening)] - 1
    return MatchedSpans(
        streams=np.full(len(opening), stream, np.int64),
        documents=documents[opening] + origin,
        starts=starts[opening] + origin,
        stops=reach[closing] + origin,
        items=items[opening],
        grams=num_grams[group[opening]],
    )


def _running_max(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The greatest value so far within each group (groups ascend)."""
    if len(values) == 0:
        return values
    low = int(values.min())
    width = int(values.max()) - low + 1
    return np.maximum.accumulate(values - low + group * width) - group * width + low
