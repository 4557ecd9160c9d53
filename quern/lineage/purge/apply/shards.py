"""Writes the shards of a new corpus version, without purged documents and with restored ones.

A shard is copied in blocks, its old bytes compared with their checksum on the way; memory is that of a block and of the
shard's spans, whatever the size of a shard.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from quern import storage
from quern.data_pipeline.page.keys import KEY, keys_of
from quern.errors import InputError
from quern.lineage.purge.restoration.restored_tokens import Tokens
from quern.storage.parquet import table_in
from quern.tokenize.place import keyed_hashes
from quern.tokenize.shard_format import SPANS_SCHEMA, ShardInfo, shard_name, spans_file

__all__ = ["ShardChange", "SpanTable", "read_spans", "write_generation"]

BLOCK_BYTES = 16 << 20
"""Copied at once."""

_NUMBER = re.compile(r"shard_([0-9]{5,9})(?:\.v[0-9]+)?\.bin")


@dataclass(frozen=True)
class SpanTable:
    """The documents of a shard, in their order."""

    doc_ids: np.ndarray
    """S16[n]."""
    lengths: np.ndarray
    """int64[n], EOT included."""
    purged: np.ndarray
    """bool[n]."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class ShardChange:
    """One shard to rewrite, or (``info`` None) to create."""

    stream: str
    position: int
    """In the manifest's list."""
    info: ShardInfo | None
    rows: np.ndarray
    """int64: the spans that go, in ascending order."""
    arriving: tuple[int, int] | None = None
    """Restored documents whose place keys lie from the first to the second come in; None: there are none."""


def read_spans(folder: str, info: ShardInfo) -> SpanTable:
    """The spans of a shard, compared with their checksum.

    Raises:
        InputError: the file is missing or damaged, or does not cover the shard.
    """
    path = storage.join(folder, info.spans)
    try:
        data = storage.read_bytes(path)
    except FileNotFoundError:
        raise InputError(f"{path}: is missing") from None
    if hashlib.sha256(data).hexdigest() != info.spans_sha256:
        raise InputError(f"{path}: is damaged: its SHA-256 is not the one in the manifest")
    try:
        table = table_in(data, SPANS_SCHEMA).combine_chunks()
    except InputError as error:
        raise InputError(f"{path}: is damaged: {error}") from None
    lengths, starts = table["length"].to_numpy(), table["start"].to_numpy()
    ends = np.cumsum(lengths)
    whole = len(table) == info.documents and int(ends[-1] if len(ends) else 0) == info.tokens
    if not whole or (starts != ends - lengths).any():
        raise InputError(f"{path}: its spans do not cover the shard's {info.tokens} tokens without a gap")
    return SpanTable(keys_of(table["doc_id"]), lengths, table["purged"].to_numpy())


def write_generation(
    folder: str, change: ShardChange, arrivals: Sequence[Tokens], *, mode: str, version: int, dtype: str, eot_id: int,
    seed: int,
) -> ShardInfo:  # fmt: skip
    """Write the shard's files of ``version`` beside the old ones, whole or not at all; the new manifest entry.

    ``mode`` ``mask``: tokens of the rows become EOT where they stand, and the rows are marked purged. ``rewrite``: the
    rows, and those purged before, are left out, and ``arrivals``, which are in order, stand where their place key puts
    them.

    Raises:
        InputError: a file of the shard is missing or damaged.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    old = change.info
    none = SpanTable(np.empty(0, KEY), np.empty(0, np.int64), np.empty(0, bool))
    spans = read_spans(folder, old) if old is not None else none
    going = np.zeros(len(spans), bool)
    going[change.rows] = True
    if mode == "mask":
        new = SpanTable(spans.doc_ids, spans.lengths, spans.purged | going)
        steps = list(_runs(spans.lengths, going, "blank"))
    else:
        going |= spans.purged
        places = _places(spans, arrivals, seed)
        new = _joined(spans, going, arrivals, places)
        steps = list(_with_arrivals(_runs(spans.lengths, going, "drop"), spans, arrivals, places, stored))
    number = int(_NUMBER.fullmatch(old.bin)[1]) if old is not None else change.position  # type: ignore[index]
    name = f"{shard_name(number)}.v{version}"
    source = storage.join(folder, old.bin) if old is not None else None
    with storage.publish(storage.join(folder, f"{name}.bin")) as file:
        sha256 = _copy(source, old, steps, file, stored, eot_id)
    data = spans_file(new.doc_ids.tobytes(), new.lengths, new.purged)
    storage.publish_bytes(storage.join(folder, f"{name}.spans.parquet"), data)
    keys = [arrival.place_key for arrival in arrivals]
    bounds = [int(old.first_key, 16), int(old.last_key, 16)] if old is not None else []
    return ShardInfo(
        bin=f"{name}.bin",
        spans=f"{name}.spans.parquet",
        tokens=int(new.lengths.sum()),
        documents=len(new),
        sha256=sha256,
        spans_sha256=hashlib.sha256(data).hexdigest(),
        first_key=f"{min(keys + bounds[:1]):016x}",
        last_key=f"{max(keys + bounds[1:]):016x}",
    )


@dataclass(frozen=True)
class _Step:
    """What becomes of the next tokens of the old shard: ``keep``, ``drop`` or ``blank`` them; or ``insert`` others."""

    what: str
    tokens: int
    data: bytes = b""


def _runs(lengths: np.ndarray, going: np.ndarray, what: str) -> Iterator[_Step]:
    """Neighbours with one fate are one step."""
    if not len(lengths):
        return
    first = np.concatenate([[0], np.flatnonzero(np.diff(going)) + 1])
    for start, tokens in zip(first.tolist(), np.add.reduceat(lengths, first).tolist(), strict=True):
        yield _Step(what if going[start] else "keep", tokens)


def _places(spans: SpanTable, arrivals: Sequence[Tokens], seed: int) -> list[int]:
    """Before which row of the shard each arrival stands."""
    if not arrivals:
        return []
    ids = spans.doc_ids.tobytes()
    keys = keyed_hashes(seed, "place", (ids[at : at + 16] for at in range(0, len(ids), 16)))
    if (keys[1:] < keys[:-1]).any():
        raise InputError(
            "documents do not stand by their place keys here, as they do in imported tokens; use mode mask"
        )
    found = []
    for arrival in arrivals:
        low, high = (int(np.searchsorted(keys, np.uint64(arrival.place_key), side)) for side in ("left", "right"))
        found.append(low + sum(ids[16 * row : 16 * row + 16] < arrival.doc_id for row in range(low, high)))
    return found


def _joined(spans: SpanTable, going: np.ndarray, arrivals: Sequence[Tokens], places: Sequence[int]) -> SpanTable:
    ids = np.array([arrival.doc_id for arrival in arrivals], KEY)
    lengths = np.array([len(arrival.tokens) for arrival in arrivals], np.int64)
    stay = np.insert(~going, places, True) if len(arrivals) else ~going
    doc_ids = np.insert(spans.doc_ids, places, ids) if len(arrivals) else spans.doc_ids
    all_lengths = np.insert(spans.lengths, places, lengths) if len(arrivals) else spans.lengths
    return SpanTable(doc_ids[stay], all_lengths[stay], np.zeros(int(stay.sum()), bool))


def _with_arrivals(
    steps: Iterator[_Step], spans: SpanTable, arrivals: Sequence[Tokens], places: Sequence[int], stored: np.dtype[Any]
) -> Iterator[_Step]:
    """The steps, cut where an arrival comes between."""
    ends = np.concatenate([[0], np.cumsum(spans.lengths)])
    waiting = [(int(ends[place]), arrival) for place, arrival in zip(places, arrivals, strict=True)]
    waiting.reverse()
    at = 0
    for step in steps:
        left = step.tokens
        while waiting and waiting[-1][0] < at + left:
            place, arrival = waiting.pop()
            if place > at:
                yield _Step(step.what, place - at)
            left, at = left - (place - at), place
            yield _insert(arrival, stored)
        yield _Step(step.what, left)
        at += left
    while waiting:
        yield _insert(waiting.pop()[1], stored)


def _insert(arrival: Tokens, stored: np.dtype[Any]) -> _Step:
    data = arrival.tokens.astype(stored, casting="equiv", copy=False).tobytes()
    return _Step("insert", len(arrival.tokens), data)


def _copy(
    source: str | None,
    old: ShardInfo | None,
    steps: Sequence[_Step],
    file: IO[bytes],
    stored: np.dtype[Any],
    eot_id: int,
) -> str:
    """Carry out the steps; the new SHA-256. What is read is all of the old file, and compared with its SHA-256."""
    size = stored.itemsize
    longest = max((step.tokens for step in steps if step.what == "blank"), default=0)
    blank = np.full(min(longest, BLOCK_BYTES // size), eot_id, stored).tobytes()
    reader = _Reader(source)
    try:
        for step in steps:
            if step.what == "insert":
                reader.insert(file, step.data)
                continue
            for part in reader.take(step.tokens * size):
                if step.what == "keep":
                    reader.keep(file, part)
                elif step.what == "blank":
                    reader.write(file, blank[: len(part)])
                else:
                    reader.fork()
        if old is not None and (not reader.at_end() or reader.old.hexdigest() != old.sha256):
            raise InputError(f"{source}: is damaged: its SHA-256 is not the one in the manifest; nothing was purged")
    finally:
        reader.close()
    return reader.new_hash()


class _Reader:
    """The old shard from its start to its end, hashed; and the hash of what is written, which is the same for as long
    as the same was written."""

    def __init__(self, source: str | None) -> None:
        self._source = source
        try:
            self._file = storage.open_read(source) if source is not None else io.BytesIO()
        except FileNotFoundError:
            raise InputError(f"{source}: is missing") from None
        self.old = hashlib.sha256()
        self._before = self.old.copy()
        self._block = memoryview(b"")
        self._at = 0
        self._from = 0
        """Where in the block the part begins that was taken last."""
        self._new: Any = None

    def take(self, size: int) -> Iterator[memoryview]:
        """The next ``size`` bytes, in parts."""
        while size:
            if self._at == len(self._block):
                self._before = self.old.copy()
                data = self._file.read(BLOCK_BYTES)
                if not data:
                    raise InputError(f"{self._source}: is damaged: it ends too early; nothing was purged")
                self.old.update(data)
                self._block, self._at = memoryview(data), 0
            part = self._block[self._at : self._at + size]
            self._from, self._at = self._at, self._at + len(part)
            size -= len(part)
            yield part

    def fork(self) -> None:
        """Branch the hash: the part taken last is not written as it was read."""
        self._fork(self._from)

    def _fork(self, at: int) -> None:
        if self._new is None:
            self._new = self._before.copy()
            self._new.update(self._block[:at])

    def keep(self, file: IO[bytes], part: memoryview) -> None:
        """Write the part that was taken last."""
        file.write(part)
        if self._new is not None:
            self._new.update(part)

    def write(self, file: IO[bytes], data: bytes) -> None:
        """Write something else in place of the part that was taken last."""
        self.fork()
        self.keep(file, memoryview(data))

    def insert(self, file: IO[bytes], data: bytes) -> None:
        """Write something after all that was taken."""
        self._fork(self._at)
        self.keep(file, memoryview(data))

    def at_end(self) -> bool:
        return self._at == len(self._block) and not self._file.read(1)

    def new_hash(self) -> str:
        return str((self._new or self.old).hexdigest())

    def close(self) -> None:
        self._file.close()
