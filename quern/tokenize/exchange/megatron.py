"""Reads Megatron's index of a token file (``.idx``) as its ``IndexedDataset`` does.

Little-endian, one part after the other: the magic ``MMIDIDX\\0\\0``; version 1 (uint64); the code of the tokens' dtype
(uint8); the number of sequences n and the number of entries d of the last part (uint64 each); int32[n] tokens of each
sequence; int64[n] the byte at which each starts in the ``.bin``; int64[d] the sequence at which each document starts,
and at last n. Documents of quern are one sequence each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import IO

import numpy as np

from quern.errors import InputError
from quern.tokenize.exchange.columns import I64, SourceFile

__all__ = ["DTYPES", "MAX_SEQUENCES", "MegatronIndex", "write_index"]

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Code → dtype, of those that can hold ids."""
_FLOATS = {6: "float64", 7: "float32"}
MAX_SEQUENCES = 1 << 22
"""Of one document."""
_DOCUMENTS = 1 << 16


def write_index(file: IO[bytes], dtype: str, num_documents: int, lengths: Callable[[], Iterable[I64]]) -> None:
    """Write the index of documents that stand one after the other, a sequence each.

    ``lengths()`` gives their lengths in tokens from the beginning, chunk by chunk; it is called twice.
    """
    code = next(code for code, name in DTYPES.items() if name == dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, num_documents, num_documents + 1))
    for chunk in lengths():
        file.write(chunk.astype("<i4").tobytes())
    itemsize, position = np.dtype(dtype).itemsize, 0
    for chunk in lengths():
        ends = position + np.cumsum(chunk * itemsize)
        file.write((ends - chunk * itemsize).astype("<i8").tobytes())
        position = int(ends[-1]) if len(ends) else position
    for first in range(0, num_documents + 1, _DOCUMENTS):
        file.write(np.arange(first, min(first + _DOCUMENTS, num_documents + 1), dtype="<i8").tobytes())


class MegatronIndex:
    """An index, opened; ``dtype`` of the tokens, ``num_documents``.

    Raises:
        InputError: it is no index, or its parts do not make up the file; what is wrong is named.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._source = SourceFile(path)
        try:
            self._read_header()
        except BaseException:
            self._source.close()
            raise

    def _read_header(self) -> None:
        path, size = self.path, self._source.size
        if size < HEADER.size:
            raise InputError(f"{path}: has {size} bytes, expected a header of {HEADER.size}")
        magic, version, code, sequences, entries = HEADER.unpack(self._source.read(0, HEADER.size))
        if magic != MAGIC:
            raise InputError(f"{path}: expected the magic {MAGIC!r} of a Megatron index, got {magic!r}")
        if version != VERSION:
            raise InputError(f"{path}: version: expected {VERSION}, got {version}")
        if code not in DTYPES:
            told = _FLOATS.get(code, "none that Megatron knows")
            raise InputError(f"{path}: dtype: expected a code of integers ({', '.join(map(str, DTYPES))}), "
                             f"got {code} ({told})")  # fmt: skip
        if entries < 1:
            raise InputError(f"{path}: number of documents: expected one entry or more, got 0")
        expected = HEADER.size + 12 * sequences + 8 * entries
        if size != expected:
            modes = "; modes of a multimodal dataset cannot be imported" if size == expected + sequences else ""
            raise InputError(
                f"{path}: has {size} bytes, expected {expected} for {sequences} sequences and {entries} document "
                f"entries{modes}"
            )
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self.num_sequences, self.num_documents = int(sequences), int(entries) - 1
        self._lengths = HEADER.size
        self._pointers = self._lengths + 4 * self.num_sequences
        self._documents = self._pointers + 8 * self.num_sequences

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def bounds(self, size: int) -> Iterator[tuple[I64, I64]]:
        """First byte and end of each document in a data file of ``size`` bytes, chunk by chunk, ascending.

        Raises:
            InputError: a sequence or document is not where it can be; its number is named.
        """
        first, end = 0, 0  # the sequence to come, and where the last one ended
        document = 0
        while document < self.num_documents or document == 0:
            entries = self._source.column(
                self._documents + 8 * document, min(_DOCUMENTS, self.num_documents - document) + 1, "<i8"
            )
            self._check_entries(entries, document, first)
            taken = max(1, int(np.searchsorted(entries, entries[0] + MAX_SEQUENCES, "right")) - 1)
            entries = entries[: taken + 1]
            if len(entries) > 1 and int(entries[1] - entries[0]) > MAX_SEQUENCES:
                raise InputError(
                    f"{self.path}: document {document}: expected {MAX_SEQUENCES} sequences at most, "
                    f"got {int(entries[1] - entries[0])}"
                )
            starts, ends = self._sequences(first, int(entries[-1]) - first, end, size)
            yield self._join(entries - first, starts, ends, end, document)
            end = int(ends[-1]) if len(ends) else end
            first = int(entries[-1])
            document += len(entries) - 1
            if self.num_documents == 0:
                break
        if first != self.num_sequences:
            raise InputError(
                f"{self.path}: document entry {self.num_documents}: expected the number of sequences, "
                f"{self.num_sequences}, got {first}"
            )

    def _check_entries(self, entries: I64, document: int, first: int) -> None:
        """They begin at ``first``, ascend, and name sequences that there are."""
        steps = np.diff(entries, prepend=entries[:1])
        wrong = np.flatnonzero((steps < 0) | (entries < 0) | (entries > self.num_sequences))
        if int(entries[0]) != first:
            wrong = np.zeros(1, np.int64)
        if len(wrong):
            number = int(wrong[0])
            least = first if number == 0 else int(entries[number - 1])
            most = f" to {self.num_sequences}" if number or document else ""
            raise InputError(
                f"{self.path}: document entry {document + number}: expected a sequence from {least}{most}, "
                f"got {int(entries[number])}"
            )

    def _sequences(self, first: int, count: int, end: int, size: int) -> tuple[I64, I64]:
        """Where ``count`` sequences from ``first`` start and end (bytes); the one before them ended at ``end``."""
        lengths = self._source.column(self._lengths + 4 * first, count, "<i4").astype(np.int64)
        starts = self._source.column(self._pointers + 8 * first, count, "<i8")
        if count == 0:
            return starts, starts
        sizes = lengths * self.dtype.itemsize
        self._refuse(lengths < 0, first, "length: expected tokens ≥ 0, got {}", lengths)
        told = f"pointer: expected a multiple of {self.dtype.itemsize} from 0 to {size} less its tokens, got {{}}"
        outside = (starts < 0) | (starts > size) | (starts % self.dtype.itemsize != 0)
        outside |= sizes > size - np.clip(starts, 0, size)
        self._refuse(outside, first, told, starts)
        ends = starts + sizes
        before = np.concatenate([[end], ends[:-1]])
        self._refuse(starts < before, first, "pointer: expected no byte of the sequence before it, got {}", starts)
        return starts, ends

    def _refuse(self, wrong: np.ndarray, first: int, told: str, values: I64) -> None:
        found = np.flatnonzero(wrong)
        if len(found):
            number = int(found[0])
            raise InputError(f"{self.path}: sequence {first + number}: {told.format(int(values[number]))}")

    def _join(self, edges: I64, starts: I64, ends: I64, end: int, document: int) -> tuple[I64, I64]:
        """Documents of sequences [edges[i], edges[i + 1]); each must be one piece of the file."""
        before = np.concatenate([[end], ends])  # where a document without sequences stands
        full = edges[1:] > edges[:-1]
        begins = np.zeros(len(starts), bool)
        begins[edges[:-1][full]] = True
        torn = np.flatnonzero((starts != before[:-1]) & ~begins)
        if len(torn):
            number = document + int(np.searchsorted(edges, torn[0], "right")) - 1
            raise InputError(f"{self.path}: document {number}: expected its sequences one right after the other")
        firsts = before[edges[:-1]]
        firsts[full] = starts[edges[:-1][full]]
        lasts = np.where(full, before[edges[1:]], firsts)
        return firsts, lasts
