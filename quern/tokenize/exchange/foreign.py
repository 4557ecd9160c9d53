"""Reads token files of other trainers document by document: Megatron, datatrove, and raw ids.

A document is a range of bytes of its file. Where documents end is said by the file's index, by the sidecar that quern's
own export leaves, or by the EOT.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from quern.errors import InputError
from quern.tokenize.exchange.columns import I64, SourceFile
from quern.tokenize.exchange.megatron import MegatronIndex

__all__ = [
    "BATCH_TOKENS",
    "FORMATS",
    "MAX_DOCUMENT_TOKENS",
    "SUFFIXES",
    "Batch",
    "Format",
    "TokenFile",
    "data_path",
    "stem",
]

Format = Literal["megatron", "datatrove", "bin"]
FORMATS: tuple[Format, ...] = get_args(Format)

BATCH_TOKENS = 1 << 22
"""Tokens that are held at once, but for a longer document."""
MAX_DOCUMENT_TOKENS = 1 << 27
_ENDS = 1 << 16
#: Ids other than 0, each with a 0 behind it, from which on a file is taken for uint32.
_UINT32_IDS = 16
SUFFIXES = {"megatron": ".bin", "datatrove": ".ds", "bin": ".bin"}

Bounds = Iterator[tuple[I64, I64]]
"""First byte and end of documents, chunk by chunk, ascending."""


@dataclass(frozen=True)
class Batch:
    """Some documents of a file, in its order."""

    offsets: I64
    """The byte at which each starts."""
    lengths: I64
    """Tokens of each, as in the file."""
    tokens: np.ndarray
    """All of them, in the file's dtype."""


def data_path(format: Format, path: str) -> str:
    """The file of tokens that ``path`` names: either file of Megatron's pair, or their common stem."""
    base, suffix = os.path.splitext(path)
    if format == "megatron":
        return f"{base}.bin" if suffix in (".bin", ".idx") else f"{path}.bin"
    if format == "datatrove" and path.endswith((".ds.index", ".ds.metadata")):
        return base
    return path


class TokenFile:
    """A file of tokens, opened; ``path``, ``dtype`` (little-endian), ``size`` in bytes, ``assumed``: whether nobody
    said what the type is.

    ``dtype``: of ids in a file that does not say so itself; where that is None too, ``default``.

    Raises:
        InputError: a file is missing, is not of this format, its size is no number of tokens, or uint16 is assumed of
            what looks like uint32.
    """

    def __init__(self, format: Format, path: str, dtype: str | None, default: str) -> None:
        self.format, self.path = format, path
        self._index: MegatronIndex | None = None
        self._ends: SourceFile | None = None
        if format == "datatrove" and os.path.lexists(f"{path}.loss"):
            raise InputError(f"{path}.loss: loss masks cannot be imported; remove the file to import without them")
        self._source = SourceFile(path)
        self.size = self._source.size
        try:
            stated = self._open_beside(dtype)
            self.assumed = stated is None
            self.dtype = np.dtype(stated or default).newbyteorder("<")
            if self.size % self.dtype.itemsize:
                raise InputError(
                    f"{path}: has {self.size} bytes, expected a multiple of {self.dtype.itemsize} ({self.dtype.name})"
                )
            if self.assumed and self.dtype == np.uint16:
                self._refuse_uint32()
        except BaseException:
            self.close()
            raise

    def _open_beside(self, dtype: str | None) -> np.dtype | str | None:
        """Open what the format has beside the file; the type of ids that it states, else ``dtype``."""
        if self.format == "megatron":
            self._index = MegatronIndex(f"{os.path.splitext(self.path)[0]}.idx")
            return self._index.dtype
        if self.format != "datatrove":
            return dtype
        if os.path.lexists(f"{self.path}.index"):
            self._ends = SourceFile(f"{self.path}.index")
        return _metadata_dtype(self.path) or dtype

    def _refuse_uint32(self) -> None:
        """Whether every second id of the first :data:`BATCH_TOKENS` is 0: the upper half of uint32. Ids of uint16 that
        are 0 now and then, or for long, stand at even places too, and have others at odd ones."""
        pairs = self._source.column(0, min(self.size // 4, BATCH_TOKENS // 2) * 2, "<u2").reshape(-1, 2)
        if self.size % 4 == 0 and np.count_nonzero(pairs[:, 0]) >= _UINT32_IDS and not pairs[:, 1].any():
            raise InputError(
                f"{self.path}: every second id is 0 if they are uint16; the file is very probably uint32: give --dtype "
                f"uint32, or --dtype uint16 if it is not"
            )

    def close(self) -> None:
        """Close the files."""
        for part in (self._source, self._index, self._ends):
            if part is not None:
                part.close()

    def finish(self) -> str:
        """The hex SHA-256 of the file of tokens, after the last batch."""
        return self._source.finish()

    @property
    def indexed(self) -> bool:
        """Whether a file beside it says where documents end."""
        return self._index is not None or self._ends is not None

    def bounds(self) -> Bounds:
        """Where documents stand, as the index says.

        Raises:
            InputError: the index cannot be; its record is named.
        """
        if self._index is not None:
            return self._index.bounds(self.size)
        assert self._ends is not None
        return _read_ends(self._ends, self.size // self.dtype.itemsize, self.dtype.itemsize)

    def batches(self, bounds: Bounds) -> Iterator[Batch]:
        """The documents that stand where ``bounds`` says."""
        itemsize = self.dtype.itemsize
        for starts, ends in bounds:
            lengths = (ends - starts) // itemsize
            self._refuse_long(starts, lengths)
            for first, last in _groups(lengths):
                own = slice(first, last)
                yield Batch(starts[own], lengths[own], self._gather(starts[own], ends[own]))

    def batches_by_eot(self, eot: int) -> Iterator[Batch]:
        """The documents that end with ``eot``; what comes after the last one is a document too."""
        itemsize = self.dtype.itemsize
        held: list[np.ndarray] = []
        start = num_held = 0
        for offset in range(0, self.size, BATCH_TOKENS * itemsize):
            tokens = self._tokens(offset, min(BATCH_TOKENS * itemsize, self.size - offset))
            ends = np.flatnonzero(tokens == eot) + 1
            if len(ends):
                whole = np.concatenate([*held, tokens[: ends[-1]]])
                edges = np.concatenate([[0], ends + num_held])
                held, num_held = [], 0
                yield from self._whole(start, edges, whole)
                start += int(edges[-1]) * itemsize
                tokens = tokens[ends[-1] :]
            held.append(tokens)
            num_held += len(tokens)
            if num_held > MAX_DOCUMENT_TOKENS:
                self._refuse_long(np.array([start]), np.array([num_held]), f"; none of them is {eot}, the EOT")
        if num_held:
            yield from self._whole(start, np.array([0, num_held]), np.concatenate(held))

    def _whole(self, start: int, edges: np.ndarray, tokens: np.ndarray) -> Iterator[Batch]:
        """Documents between ``edges`` of ``tokens``, which begin at byte ``start``; a record takes room too."""
        lengths = np.diff(edges)
        offsets = start + edges[:-1] * self.dtype.itemsize
        self._refuse_long(offsets, lengths)
        for first in range(0, len(lengths), _ENDS):
            own = edges[first : first + _ENDS + 1]
            yield Batch(offsets[first : first + _ENDS], lengths[first : first + _ENDS], tokens[own[0] : own[-1]])

    def _tokens(self, offset: int, size: int) -> np.ndarray:
        return np.frombuffer(self._source.read_on(offset, size), self.dtype)

    def _gather(self, starts: I64, ends: I64) -> np.ndarray:
        """The tokens of documents; one read for each piece of the file without a gap."""
        if not len(starts):
            return np.empty(0, self.dtype)
        gaps = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        firsts = np.concatenate([[0], gaps])
        lasts = np.concatenate([gaps, [len(starts)]]) - 1
        pieces = zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True)
        return np.concatenate([self._tokens(start, end - start) for start, end in pieces])

    def _refuse_long(self, offsets: I64, lengths: I64, told: str = "") -> None:
        wrong = np.flatnonzero(lengths > MAX_DOCUMENT_TOKENS)
        if len(wrong):
            first = int(wrong[0])
            raise InputError(
                f"{self.path}: document at byte {int(offsets[first])}: expected {MAX_DOCUMENT_TOKENS:,} tokens at "
                f"most, got {int(lengths[first]):,} or more{told}"
            )


def _groups(lengths: I64) -> Iterator[tuple[int, int]]:
    """Cut documents into groups of up to :data:`BATCH_TOKENS` tokens, each of one document at least."""
    edges = np.concatenate([[0], np.cumsum(lengths)])
    first = 0
    while first < len(lengths):
        last = int(np.searchsorted(edges, edges[first] + BATCH_TOKENS, "right")) - 1
        last = min(max(last, first + 1), len(lengths))
        yield first, last
        first = last


def _read_ends(source: SourceFile, tokens: int, itemsize: int) -> Bounds:
    """datatrove's index: uint64, the token after each document's last."""
    if source.size % 8:
        raise InputError(f"{source.path}: has {source.size} bytes, expected a multiple of 8 (uint64)")
    count, end = source.size // 8, 0
    for first in range(0, count, _ENDS):
        found = source.column(8 * first, min(_ENDS, count - first), "<u8")
        before = np.concatenate([np.array([end], np.uint64), found[:-1]])
        wrong = np.flatnonzero((found < before) | (found > tokens))
        if len(wrong):
            number = int(wrong[0])
            raise InputError(
                f"{source.path}: document {first + number}: end: expected a token from {int(before[number])} to "
                f"{tokens}, got {int(found[number])}"
            )
        yield before.astype(np.int64) * itemsize, found.astype(np.int64) * itemsize
        end = int(found[-1])
    if end != tokens:
        raise InputError(f"{source.path}: ends at token {end}, expected {tokens}, as many as the file of tokens has")


def _metadata_dtype(path: str) -> str | None:
    """What datatrove's ``.ds.metadata`` says of the size of ids; None if it is not there or says nothing."""
    beside = f"{path}.metadata"
    if not os.path.lexists(beside):
        return None
    with closing(SourceFile(beside)) as source:
        line = source.read(0, min(source.size, 4096)).split(b"\n")[0]
    _, bar, size = line.rpartition(b"|")
    if not bar:
        return None
    if size.strip() not in (b"2", b"4"):
        raise InputError(f"{beside}: line 1: expected <tokenizer>|2 or |4, the bytes of an id, got {line[:80]!r}")
    return "uint16" if size.strip() == b"2" else "uint32"


def stem(format: Format, path: str) -> str:
    """The path without the format's ending: what the files beside it begin with."""
    return path.removesuffix(SUFFIXES[format])
