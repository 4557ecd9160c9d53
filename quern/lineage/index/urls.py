"""The URLs of a segment in their order, and how they are found: blocks of 64 documents, each compressed on its own.

A block holds three texts a document, each kind compressed apart, for most questions are of one: its SURT (documents are
ordered by it), its URL as the crawl gave it, its host.
Documents without a SURT come last, by URL; those without a URL at the very end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quern.lineage.index.columns import I64, Column, ColumnWriter, DamagedIndexError

__all__ = ["Urls", "write_urls"]

BLOCK = 64
_NULL = 0xFFFFFFFF
_CHUNK_BLOCKS = 256
_CACHED_BLOCKS = 128
_HEAD = np.dtype(("<u4", (3, 2)))
"""Of a block: raw and compressed bytes of each kind of text."""


def _codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=3)


def write_urls(folder: str, columns: tuple[pa.Array, pa.Array, pa.Array], order: I64) -> None:
    """Write ``urls`` and ``url_offsets``: SURTs, URLs and hosts (large_string[n]) in ``order``."""
    codec = _codec()
    with (
        ColumnWriter(f"{folder}/urls", "u1") as blocks,
        ColumnWriter(f"{folder}/url_offsets", "<i8") as offsets,
    ):
        offsets.append(np.zeros(1, np.int64))
        for start in range(0, len(order), BLOCK * _CHUNK_BLOCKS):
            rows = pa.array(order[start : start + BLOCK * _CHUNK_BLOCKS])
            parts = [_lengths_and_bytes(column.take(rows)) for column in columns]
            compressed = []
            for first in range(0, len(rows), BLOCK):
                frames, sizes = [], np.empty((3, 2), "<u4")
                for kind, (lengths, ends, data) in enumerate(parts):
                    texts = data[ends[first] : ends[min(first + BLOCK, len(rows))]]
                    raw = b"".join((lengths[first : first + BLOCK].tobytes(), texts))
                    frames.append(codec.compress(raw, asbytes=True))
                    sizes[kind] = len(raw), len(frames[-1])
                compressed.append(b"".join((sizes.tobytes(), *frames)))
            base = blocks.count
            blocks.append(b"".join(compressed))
            offsets.append(base + np.cumsum([len(block) for block in compressed]))


def _lengths_and_bytes(texts: pa.Array) -> tuple[np.ndarray, np.ndarray, memoryview]:
    """uint32[n] lengths (:data:`_NULL` for null), int64[n + 1] where each starts, and the bytes of a large_string."""
    buffers = texts.buffers()
    ends = np.frombuffer(buffers[1], np.int64, len(texts) + 1, 8 * texts.offset)
    lengths = np.diff(ends).astype("<u4")
    lengths[texts.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return lengths, ends, memoryview(buffers[2] if buffers[2] is not None else b"")


Block = tuple[bytes, list[int], list[bool] | None]
"""One kind of text of a block: its bytes behind the lengths, where each text ends, and which are null."""


def _text(block: Block, row: int) -> bytes | None:
    raw, ends, null = block
    if null is not None and null[row]:
        return None
    return raw[ends[row - 1] if row else 4 * len(ends) : ends[row]]


class Urls:
    """The URLs of a segment of ``documents``, of which the first ``with_surt`` have a SURT and ``with_url`` a URL.

    ``plain_hosts``: no host has a character that also stands between the labels of a SURT (``a,b.com``, IPv6).
    """

    def __init__(self, folder: str, documents: int, with_surt: int, with_url: int, plain_hosts: bool) -> None:
        self.documents, self.with_surt, self.with_url = documents, with_surt, with_url
        self.plain_hosts = plain_hosts
        self._data = Column(f"{folder}/urls", "u1")
        self._offsets = Column(f"{folder}/url_offsets", "<i8")
        if len(self._offsets) != -(-documents // BLOCK) + 1:
            raise DamagedIndexError(self._offsets.path, f"has {len(self._offsets)} items for {documents} documents")
        self._codec = _codec()
        self._block = functools.lru_cache(_CACHED_BLOCKS)(self._read)

    def check(self) -> None:
        """Compare every checksum."""
        self._data.check()
        self._offsets.check()

    def _read(self, number: int, which: int) -> Block:
        start, stop = self._offsets.slice(number, number + 2).tolist()
        return self._decoded(self._data.slice(start, stop), number, which)

    def _decoded(self, data: NDArray[np.uint8], number: int, which: int) -> Block:
        """One kind of text of block ``number``, given the block's bytes."""
        sizes = np.frombuffer(data, "<u4", 6).tolist()
        start = _HEAD.itemsize + sum(sizes[1 : 2 * which : 2])
        frame = data[start : start + sizes[2 * which + 1]].tobytes()
        raw = self._codec.decompress(frame, sizes[2 * which], asbytes=True)
        size = min(BLOCK, self.documents - number * BLOCK)
        lengths = np.frombuffer(raw, "<u4", size)
        null = lengths == _NULL
        ends = np.cumsum(np.where(null, 0, lengths), dtype=np.int64) + 4 * size
        return raw, ends.tolist(), null.tolist() if null.any() else None

    def text(self, number: int, which: int) -> bytes | None:
        """The SURT (0), URL (1) or host (2) of a document."""
        return _text(self._block(number // BLOCK, which), number % BLOCK)

    def texts(self, numbers: I64, which: int) -> list[bytes | None]:
        """Those of many documents; each block is read once."""
        texts: list[bytes | None] = [None] * len(numbers)
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        blocks, firsts = np.unique(ordered // BLOCK, return_index=True)
        starts, stops = self._offsets.take(blocks), self._offsets.take(blocks + 1)
        self._data.check_between(starts, stops)
        places, rows = order.tolist(), (ordered % BLOCK).tolist()
        edges = [*firsts.tolist(), len(rows)]
        for index, (number, start, stop) in enumerate(
            zip(blocks.tolist(), starts.tolist(), stops.tolist(), strict=True)
        ):
            block = self._decoded(self._data.items[start:stop], number, which)
            for place in range(edges[index], edges[index + 1]):
                texts[places[place]] = _text(block, rows[place])
        return texts

    def _first(self, low: int, high: int, which: int, reached: Callable[[bytes], bool]) -> int:
        """The first document of [low, high) whose text satisfies what all later ones do too; ``high`` if none."""

        def at(number: int) -> bool:
            text = self.text(number, which)
            if text is None:
                raise DamagedIndexError(self._data.path, f"document {number} has no text, expected one")
            return reached(text)

        # by the first documents of blocks at first: each needs its block, the next ones are in it
        blocks = [low // BLOCK, (high - 1) // BLOCK] if low < high else [0, -1]
        while blocks[0] < blocks[1]:
            middle = (blocks[0] + blocks[1] + 1) // 2
            if at(middle * BLOCK):
                blocks[1] = middle - 1
            else:
                blocks[0] = middle
        low, high = max(low, blocks[0] * BLOCK), min(high, (blocks[1] + 1) * BLOCK)
        while low < high:
            number = (low + high) // 2
            if at(number):
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
