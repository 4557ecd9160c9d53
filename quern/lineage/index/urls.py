"""The URLs of a segment in their order, and how they are found: blocks of 64 documents, each compressed on its own.

A block holds three texts a document, each kind compressed apart, for most questions are of one: its SURT (documents are
ordered by it), its URL as the crawl gave it, its host.
Documents without a SURT come last, by URL; those without a URL at the very end.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from quern.lineage.index.columns import I64, Column, ColumnWriter, DamagedIndexError

__all__ = ["Urls", "write_urls"]

BLOCK = 64
_NULL = 1 << 31
_CHUNK_BLOCKS = 256
_CACHED_BLOCKS = 128
_HEAD = struct.Struct("<6I")
"""Of a block: raw and compressed bytes of each kind of text in turn."""
_TWO = struct.Struct("<2I")


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
            parts = [_ends_and_bytes(column.take(rows)) for column in columns]
            compressed = []
            for first in range(0, len(rows), BLOCK):
                frames: list[bytes] = []
                sizes: list[int] = []
                stop = min(first + BLOCK, len(rows))
                for ends, nulls, data in parts:
                    own = (ends[first : stop + 1] - ends[first]).astype("<u4")
                    own[1:] |= nulls[first:stop]
                    raw = b"".join((own.tobytes(), data[ends[first] : ends[stop]]))
                    frames.append(codec.compress(raw, asbytes=True))
                    sizes += [len(raw), len(frames[-1])]
                compressed.append(b"".join((_HEAD.pack(*sizes), *frames)))
            base = blocks.count
            blocks.append(b"".join(compressed))
            offsets.append(base + np.cumsum([len(block) for block in compressed]))


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

    def _read(self, number: int, which: int) -> bytes:
        start, stop = self._offsets.slice(number, number + 2).tolist()
        return self._decoded(self._data.slice(start, stop).tobytes(), which)

    def _decoded(self, data: bytes, which: int) -> bytes:
        """One kind of text of a block, given the block's bytes."""
        sizes = _HEAD.unpack_from(data)
        start = _HEAD.size + sum(sizes[1 : 2 * which : 2])
        raw: bytes = self._codec.decompress(data[start : start + sizes[2 * which + 1]], sizes[2 * which], asbytes=True)
        return raw

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
        starts, stops = self._offsets.take(blocks), self._offsets.take(blocks + 1)
        self._data.check_between(starts, stops)
        places, rows = order.tolist(), (ordered % BLOCK).tolist()
        edges = [*firsts.tolist(), len(rows)]
        for index, (number, start, stop) in enumerate(
            zip(blocks.tolist(), starts.tolist(), stops.tolist(), strict=True)
        ):
            block, base = self._decoded(self._data.items[start:stop].tobytes(), which), self._base(number)
            for place in range(edges[index], edges[index + 1]):
                texts[places[place]] = _text(block, rows[place], base)
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
