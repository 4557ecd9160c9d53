"""Stores a segment's sorted URLs in compressed blocks of 64, and searches them.

A block holds three texts a document, each kind in a frame of its own, for most questions are of one: its SURT
(documents are ordered by it), its URL as the crawl gave it, its host.
Documents without a SURT come last, by URL; those without a URL at the very end.

A look-up finds its block by *fences*, what each block begins with, and decodes that block alone. Frames are read, not
mapped: a mapped page brings fifteen neighbours into memory, and the documents of a step are in thousands of blocks.
"""

from __future__ import annotations

import functools
import os
import struct
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from quern.lineage.index.columns import I64, Column, ColumnWriter, DamagedIndexError, not_opened

__all__ = ["BLOCK", "Urls", "write_urls"]

BLOCK = 64
_NULL = 1 << 31
_LEVEL = 3
_CHUNK_BLOCKS = 256
_CACHED_BLOCKS = 128
#: A frame: where it ends in ``urls``, XXH3-64 of its bytes.
_FRAME = np.dtype([("end", "<u8"), ("sum", "<u8")])
_KINDS = 3
_TWO = struct.Struct("<2I")


def write_urls(folder: str, columns: tuple[pa.Array, pa.Array, pa.Array], order: I64) -> None:
    """Write ``urls``, ``url_frames`` and the fences: SURTs, URLs and hosts (large_string[n]) in ``order``."""
    codec = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    with (
        open(f"{folder}/urls", "xb") as file,
        ColumnWriter(f"{folder}/url_frames", _FRAME) as frames,
        ColumnWriter(f"{folder}/url_fences", "u1") as fences,
        ColumnWriter(f"{folder}/url_fence_ends", "<i8") as fence_ends,
    ):
        frames.append(np.zeros(1, _FRAME))
        fence_ends.append(np.zeros(1, np.int64))
        end = 0
        for start in range(0, len(order), BLOCK * _CHUNK_BLOCKS):
            rows = pa.array(order[start : start + BLOCK * _CHUNK_BLOCKS])
            parts = [_ends_and_bytes(column.take(rows)) for column in columns]
            written: list[tuple[int, int]] = []
            firsts: list[bytes] = []
            for first in range(0, len(rows), BLOCK):
                stop = min(first + BLOCK, len(rows))
                for ends, nulls, data in parts:
                    own = (ends[first : stop + 1] - ends[first]).astype("<u4")
                    own[1:] |= nulls[first:stop]
                    frame = codec.compress(b"".join((own.tobytes(), data[ends[first] : ends[stop]])))
                    file.write(frame)
                    end += len(frame)
                    written.append((end, xxhash.xxh3_64_intdigest(frame)))
                ends, nulls, data = parts[1 if parts[0][1][first] else 0]
                firsts.append(bytes(data[ends[first] : ends[first + 1]]))
            frames.append(np.array(written, _FRAME))
            fence_ends.append(fences.count + np.cumsum([len(text) for text in firsts]))
            fences.append(b"".join(firsts))


def _ends_and_bytes(texts: pa.Array) -> tuple[np.ndarray, np.ndarray, memoryview]:
    """int64[n + 1] where each starts, uint32[n] :data:`_NULL` for null, else 0, and the bytes of a large_string."""
    buffers = texts.buffers()
    ends = np.frombuffer(buffers[1], np.int64, len(texts) + 1, 8 * texts.offset)
    nulls = texts.is_null().to_numpy(zero_copy_only=False).astype("<u4") * np.uint32(_NULL)
    return ends, nulls, memoryview(buffers[2] if buffers[2] is not None else b"")


def _text(raw: bytes, row: int, base: int) -> bytes | None:
    """Text ``row`` of one kind of a block, whose texts begin at ``base``: before them stand their ends, from 0 on."""
    start, stop = _TWO.unpack_from(raw, 4 * row)
    if stop & _NULL:
        return None
    return raw[base + (start & ~_NULL) : base + stop]


class _Frames:
    """The frames of ``urls``, ``count`` of them; the file is closed when nobody holds this any more."""

    def __init__(self, folder: str, count: int) -> None:
        self.path = f"{folder}/urls"
        self.column = Column(f"{folder}/url_frames", _FRAME).sized(count + 1)
        self._codec = zstandard.ZstdDecompressor()
        try:
            file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (read from for as long as this is)
        except OSError as error:
            raise not_opened(self.path, error) from None
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        size, end = os.fstat(self._descriptor).st_size, int(self.column.slice(count, count + 1)["end"][0])
        if size != end:
            raise DamagedIndexError(self.path, f"has {size} bytes, expected {end}")

    def check(self) -> None:
        """Compare every checksum."""
        self.column.check()
        count = len(self.column) - 1
        for first in range(0, count, _KINDS * _CHUNK_BLOCKS):
            frames = self.column.slice(first, min(first + _KINDS * _CHUNK_BLOCKS, count) + 1)
            for start, stop, expected in zip(*_bounds(frames[:-1], frames[1:]), strict=True):
                self._bytes(start, stop, expected)

    def _bytes(self, start: int, stop: int, expected: int) -> bytes:
        """The bytes [start, stop) of the file, if this is their checksum."""
        data = os.pread(self._descriptor, stop - start, start)
        if xxhash.xxh3_64_intdigest(data) != expected:
            raise DamagedIndexError(self.path, f"is damaged: bytes {start} to {stop} have a wrong checksum")
        return data

    def read(self, block: int, which: int) -> bytes:
        """What one frame holds."""
        index = _KINDS * block + which
        frames = self.column.slice(index, index + 2)
        ((start, stop, expected),) = zip(*_bounds(frames[:1], frames[1:]), strict=True)
        return self._codec.decompress(self._bytes(start, stop, expected))

    def read_many(self, blocks: I64, which: int) -> Iterator[bytes]:
        """What the frames of one kind hold, block by block."""
        frames = _KINDS * blocks + which
        for start, stop, expected in zip(*_bounds(self.column.take(frames), self.column.take(frames + 1)), strict=True):
            yield self._codec.decompress(self._bytes(start, stop, expected))


class Urls:
    """The URLs of a segment of ``documents``, of which the first ``with_surt`` have a SURT and ``with_url`` a URL.

    ``plain_hosts``: no host has a character that also stands between the labels of a SURT (``a,b.com``, IPv6).
    """

    def __init__(self, folder: str, documents: int, with_surt: int, with_url: int, plain_hosts: bool) -> None:
        self.documents, self.with_surt, self.with_url = documents, with_surt, with_url
        self.plain_hosts = plain_hosts
        blocks = -(-documents // BLOCK)
        self._frames = _Frames(folder, _KINDS * blocks)
        self._fences = Column(f"{folder}/url_fences", "u1")
        self._fence_ends = Column(f"{folder}/url_fence_ends", "<i8").sized(blocks + 1)
        # not of a method of this: the cache and this would hold each other, and the files would stay open
        self._block = functools.lru_cache(_CACHED_BLOCKS)(self._frames.read)

    def check(self) -> None:
        """Compare every checksum."""
        for part in (self._frames, self._fences, self._fence_ends):
            part.check()

    def _base(self, number: int) -> int:
        """Where the texts of block ``number`` begin."""
        return 4 * (min(BLOCK, self.documents - number * BLOCK) + 1)

    def text(self, number: int, which: int) -> bytes | None:
        """The SURT (0), URL (1) or host (2) of a document."""
        return _text(self._block(number // BLOCK, which), number % BLOCK, self._base(number // BLOCK))

    def texts(self, numbers: I64, which: int) -> list[bytes | None]:
        """Those of many documents; each block is read once."""
        texts: list[bytes | None] = [None] * len(numbers)
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        blocks, firsts = np.unique(ordered // BLOCK, return_index=True)
        places, rows = order.tolist(), (ordered % BLOCK).tolist()
        bases = (4 * (np.minimum(BLOCK, self.documents - blocks * BLOCK) + 1)).tolist()
        edges = [*firsts.tolist(), len(rows)]
        for index, block in enumerate(self._frames.read_many(blocks, which)):
            base = bases[index]
            for place in range(edges[index], edges[index + 1]):
                texts[places[place]] = _text(block, rows[place], base)
        return texts

    def _fence(self, block: int) -> bytes:
        """The SURT of a block's first document, or its URL where that has none."""
        start, stop = self._fence_ends.slice(block, block + 2).tolist()
        return self._fences.slice(start, stop).tobytes()

    def _first(self, low: int, high: int, which: int, reached: Callable[[bytes], bool]) -> int:
        """The first document of [low, high) whose text satisfies what all later ones do too; ``high`` if none.

        ``which``: of SURTs (0) ``high`` is at most ``with_surt``; of URLs (1) ``low`` is at least that.
        """
        blocks = [low // BLOCK, (high - 1) // BLOCK] if low < high else [0, -1]
        while blocks[0] < blocks[1]:
            middle = (blocks[0] + blocks[1] + 1) // 2
            if reached(self._fence(middle)):
                blocks[1] = middle - 1
            else:
                blocks[0] = middle
        low, high = max(low, blocks[0] * BLOCK), min(high, (blocks[1] + 1) * BLOCK)
        while low < high:
            number = (low + high) // 2
            text = self.text(number, which)
            if text is None:
                raise DamagedIndexError(self._frames.path, f"document {number} has no text, expected one")
            if reached(text):
                high = number
            else:
                low = number + 1
        return low

    def surts_between(self, low: bytes, high: bytes) -> tuple[int, int]:
        """The documents [start, stop) whose SURT s has low ≤ s < high."""
        start = self._first(0, self.with_surt, 0, lambda text: text >= low)
        return start, self._first(start, self.with_surt, 0, lambda text: text >= high)

    def without_surt(self, url: bytes) -> tuple[int, int]:
        """The documents [start, stop) without a SURT whose URL is ``url``."""
        start = self._first(self.with_surt, self.with_url, 1, lambda text: text >= url)
        return start, self._first(start, self.with_url, 1, lambda text: text > url)


def _bounds(before: np.ndarray, own: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """Starts, stops and checksums of frames, given the records before theirs and their own."""
    return before["end"].tolist(), own["end"].tolist(), own["sum"].tolist()
