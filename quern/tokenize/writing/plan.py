"""Plans where shards are cut, from summed document lengths in place order, one key range at a time.

Tasks bring together the indexes of all runs, a stretch of key ranges each; the driver adds up their sums and looks
into one key range for each cut. It never holds the lengths of all documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quern import storage
from quern.data_pipeline.dedup.exchange import read_records
from quern.errors import QuernError
from quern.tokenize.place import NUM_BUCKETS, PLACE, doc_ids
from quern.tokenize.writing.sorted_runs import prefix_sums, read_places

__all__ = ["GATHER_DOCUMENTS", "Cut", "Gathered", "bucket_ranges", "find_cuts", "gather"]

#: Documents of which one task brings the index together: 32 bytes each.
GATHER_DOCUMENTS = 4_000_000


@dataclass(frozen=True)
class Cut:
    """One shard: the documents after ``after`` up to and with ``last``, by (place key, doc_id)."""

    after: tuple[int, bytes] | None
    """None: from the first document on."""
    last: tuple[int, bytes]
    documents: int
    tokens: int


@dataclass(frozen=True)
class Gathered:
    """The index of a stretch of key ranges, from all runs, in order."""

    path: str
    """PLACE records."""
    first_bucket: int
    documents: tuple[int, ...]
    """Documents of each key range."""
    tokens: tuple[int, ...]


def bucket_ranges(documents: int, limit: int) -> list[tuple[int, int]]:
    """Stretches of key ranges, [first, end), of about ``limit`` documents each (keys are uniform)."""
    parts = min(NUM_BUCKETS, max(1, -(-documents // limit)))
    edges = [NUM_BUCKETS * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def gather(runs_file: str, first_bucket: int, end_bucket: int, path: str) -> Gathered:
    """Write the merged index of the key ranges [first, end) of all runs named in ``runs_file`` to ``path``.

    Raises:
        QuernError: two documents have the same doc_id.
    """
    runs = storage.read_json(runs_file)
    places = np.concatenate([np.empty(0, PLACE), *(read_places(run, first_bucket, end_bucket)[0] for run in runs)])
    places = places[np.lexsort((places["low"], places["high"], places["key"]))]
    ids = doc_ids(places)
    if len(ids) > 1 and (same := np.flatnonzero(ids[1:] == ids[:-1])).size:
        raise QuernError(f"two documents of the run have the doc_id {ids[same[0] : same[0] + 1].tobytes().hex()}")
    storage.publish_bytes(path, places.tobytes())
    documents, tokens = np.diff(prefix_sums(places, first_bucket, end_bucket)).tolist()
    return Gathered(path, first_bucket, tuple(documents), tuple(tokens))


def find_cuts(parts: Sequence[Gathered], shard_tokens: int) -> Iterator[Cut]:
    """The shards of a stream in order: each closes at the first document end at or above ``shard_tokens``.

    ``parts`` cover all key ranges in order. Exact: equal to walking over all documents one by one.
    """
    ends = np.cumsum([tokens for part in parts for tokens in part.tokens])
    documents_before = np.concatenate([[0], np.cumsum([count for part in parts for count in part.documents])])
    if not len(ends) or not ends[-1]:
        return
    total = int(ends[-1])
    start_token = start_document = 0
    after: tuple[int, bytes] | None = None
    held: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0, PLACE), np.empty(0, np.int64))
    while start_token < total:
        goal = min(start_token + shard_tokens, total)
        bucket = int(np.searchsorted(ends, goal, "left"))
        if held[0] != bucket:
            places = _read_bucket(parts, bucket)
            before = int(ends[bucket - 1]) if bucket else 0
            held = (bucket, places, before + np.cumsum(places["length"]))
        _, places, token_ends = held
        at = int(np.searchsorted(token_ends, goal, "left"))
        end_token, end_document = int(token_ends[at]), int(documents_before[bucket]) + at + 1
        last = (int(places["key"][at]), doc_ids(places[at : at + 1]).tobytes())
        yield Cut(after, last, end_document - start_document, end_token - start_token)
        start_token, start_document, after = end_token, end_document, last


def _read_bucket(parts: Sequence[Gathered], bucket: int) -> np.ndarray:
    part = next(part for part in reversed(parts) if part.first_bucket <= bucket)
    inside = bucket - part.first_bucket
    start, count = sum(part.documents[:inside]), part.documents[inside]
    return read_records(part.path, PLACE, start, start + count)
