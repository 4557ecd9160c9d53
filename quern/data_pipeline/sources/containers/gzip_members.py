"""Iterates over the members of a gzip file, and finds the next sound one after damage.

A damaged member does not end where it ought to: its data may run over the beginning of the next members, or to the end
of the file, before anything shows. So a search begins just behind the damaged member's own first byte, and what the
member gave from bytes that turn out to be another's is taken back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import IO

from quern.data_pipeline.sources.containers.gzip_search import (
    PROBE_BYTES,
    Starts,
    beginning,
    find_member,
    header_length,
    inner_header,
    sound_end,
)

__all__ = ["REREAD_BYTES", "GzipMembers", "Note", "Signs"]

#: Takes (offset in the file, why).
Note = Callable[[int, str], None]

#: Bytes that may be decoded again in search of swallowed members before the search goes on behind what was decoded.
REREAD_BYTES = 256 << 20

_READ_BYTES = 1 << 17
_PIECE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 16
_HEADER_BYTES = 10
_STEP_BYTES = 64


class Signs:
    """What members hold: ``starts`` tells bytes that begin with a record, by a few of them, ``begins`` by more, and
    ``holds`` bytes in which one begins."""

    def __init__(self, starts: Starts, begins: Starts, holds: Starts) -> None:
        self.starts = starts
        self.begins = begins
        self.holds = holds


class GzipMembers:
    """The members of a gzip file one after another; ``advance`` to one, then take its pieces until there are none.

    ``start`` and ``end`` are the member's bytes in the file (``end`` once its last piece is taken, or before);
    ``broken`` says what is wrong with it (None, ``cut``, ``data``, ``checksum`` or ``header``); ``excess`` is how many
    of the bytes it gave came from the beginning of other members. With ``signs`` given, a search behind damage goes on
    at the next member that holds a record; without, damage ends the file. ``reread`` counts what was decoded again.
    """

    def __init__(
        self,
        file: IO[bytes],
        note: Note,
        signs: Signs | None = None,
        *,
        begin: int | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.start = 0
        self.end: int | None = 0
        self.broken: str | None = None
        self.excess = 0
        self.reread = 0
        self._file = file
        self._note = note
        self._signs = signs
        self._tick = tick
        self._raw = b""
        self._at = 0
        self._raw_offset = file.tell()
        self._go_on: int | None = begin
        """Where the next member surely is."""
        self._lost = False
        """Damage, and no member behind it."""

    def advance(self) -> bool:
        """Go to the next member; False at the end of the file."""
        while not self._lost:
            if self._go_on is not None:
                self._seek(self._go_on)
                self._go_on = None
            if not self._need(1):
                break
            offset = self._raw_offset + self._at
            self._need(_MAX_HEADER_BYTES if self._raw[self._at + 3 : self._at + 4] != b"\0" else _HEADER_BYTES)
            length = header_length(self._raw, self._at)
            broken = None
            if length is not None and length > _HEADER_BYTES and self._signs is not None:
                self._need(length + PROBE_BYTES)
                inner = inner_header(self._raw, self._at, length, self._signs.starts)
                if inner is not None:
                    self._note(offset, "not a gzip member")
                    self._go_on = self._raw_offset + inner
                    continue
            if length is None:
                self._need(PROBE_BYTES)
                ahead = self._raw[self._at : self._at + PROBE_BYTES]
                readable = self._signs is not None and self._signs.starts(beginning(ahead[_HEADER_BYTES:]))
                if not readable:
                    self._note(offset, "not a gzip member" if ahead.strip(b"\0") else "zero bytes")
                    self._look_behind(offset)
                    continue
                self._note(offset, "gzip member's header is damaged")
                length, broken = _HEADER_BYTES, "header"
            self.start, self.end, self.broken, self.excess = offset, None, broken, 0
            self._at += length
            self._content_offset = offset + length
            self._inflate = zlib.decompressobj(-15)
            self._crc = self._size = 0
            return True
        return False

    def piece(self) -> bytes:
        """The next decompressed bytes of the member; empty at its end."""
        while self.end is None:
            if not self._need(1):
                out = self._inflate.decompress(b"", _PIECE_BYTES)
                if not out and not self._inflate.eof:
                    self._cut("the file ends inside this gzip member")
                    break
            else:
                view = memoryview(self._raw)[self._at :]
                before = self._inflate.copy()
                try:
                    out = self._inflate.decompress(view, _PIECE_BYTES)
                except zlib.error as error:
                    return self._rescue(before, view, str(error))
                self._at += len(view) - len(self._inflate.unconsumed_tail or self._inflate.unused_data)
            self._crc = zlib.crc32(out, self._crc)
            self._size += len(out)
            if self._inflate.eof:
                self._check()
            if out:
                return out
        return b""

    def _check(self) -> None:
        """The eight bytes behind the data (RFC 1952, section 2.3.1): CRC-32 and length modulo 2**32."""
        if not self._need(8):
            self._cut("the file ends inside this gzip member's checksum")
            return
        trailer = self._raw[self._at : self._at + 8]
        self._at += 8
        self.end = end = self._raw_offset + self._at
        if trailer == self._crc.to_bytes(4, "little") + (self._size & 0xFFFFFFFF).to_bytes(4, "little"):
            return
        self.broken = "checksum"
        self._note(self.start, "gzip member's checksum is wrong")
        if self._need(3) and self._raw[self._at : self._at + 3] != b"\x1f\x8b\x08":
            # Damage made the data run over the member's end, and stop in the midst of another.
            self._behind(end)
        elif self._signs is not None and (found := self._swallowed(end)) is not None:
            self._resume(found, end)

    def _cut(self, why: str) -> None:
        self.broken = "cut"
        self.end = end = self._raw_offset + len(self._raw)
        self._note(self.start, why)
        self._behind(end)

    def _rescue(self, inflate: zlib._Decompress, view: memoryview, why: str) -> bytes:
        """What the failed call had decoded before the damage: zlib throws it away, so decode again in small steps."""
        out, at = bytearray(), 0
        for step in (_STEP_BYTES, 1):
            while at < len(view):
                trial = inflate.copy()
                try:
                    piece = trial.decompress(view[at : at + step])
                except zlib.error:
                    break
                inflate, at = trial, at + step
                out += piece
        self._size += len(out)
        self.broken = "data"
        self.end = self._raw_offset + self._at + min(at, len(view))
        self._note(self.start, f"gzip member is damaged: {why}")
        self._behind(self.end)
        return bytes(out)

    def _behind(self, end: int) -> None:
        """Go on behind this broken member, whose data were decoded up to ``end``."""
        allowed = self.reread <= REREAD_BYTES
        self._look_behind(self.start if allowed else max(end - 1, self.start))
        if self._go_on is not None:
            self._resume(self._go_on, end)

    def _resume(self, offset: int, end: int) -> None:
        self._go_on = offset
        if offset < end:
            self.excess = self._size - self._size_at(offset)
            self.reread += 2 * (end - offset) + self._size // 8
            self.end = offset

    def _size_at(self, offset: int) -> int:
        """How many bytes of this member's content the bytes of the file before ``offset`` make."""
        inflate, size, left = zlib.decompressobj(-15), 0, offset - self._content_offset
        self._file.seek(self._content_offset)
        try:
            while left > 0 and not inflate.eof:
                step = self._file.read(min(left, _READ_BYTES))
                if not step:
                    break
                left -= len(step)
                while step and not inflate.eof:
                    size += len(inflate.decompress(step, _PIECE_BYTES))
                    step = inflate.unconsumed_tail
            while left <= 0 and (more := inflate.decompress(b"", _PIECE_BYTES)):
                size += len(more)
        except zlib.error:
            return min(size, self._size)
        return min(size, self._size)

    def _swallowed(self, end: int) -> int | None:
        """The first member inside this one from which sound members lead exactly to ``end``.

        Data that ran over can meet another member's own (fixed codes fall into step) and end with it. A member that
        was stored in this one's content does not lead there, and stays content.
        """
        assert self._signs is not None
        fails: set[int] = set()
        offset: int | None = self.start + 1
        while offset is not None and self.reread <= REREAD_BYTES:
            offset = find_member(self._file, offset, end, self._signs.starts, self._tick)
            at: int | None = offset
            while at is not None and at != end and at not in fails:
                fails.add(at)
                at = sound_end(self._file, at, end, self._spend)
            if offset is not None and at == end:
                return self._back(offset)
            offset = offset and offset + 1
        return self._back(None)

    def _look_behind(self, offset: int) -> None:
        """Where the next member behind ``offset`` is that holds a record."""
        if self._signs is not None:
            self._go_on = find_member(self._file, offset + 1, None, self._signs.starts, self._tick, self._holds)
        self._lost = self._go_on is None

    def _holds(self, offset: int) -> bool:
        """Whether a sound member is there in which a record begins, behind the rest of another."""
        assert self._signs is not None
        tail, found = b"", False

        def look(piece: bytes) -> None:
            nonlocal tail, found
            assert self._signs is not None
            found = found or self._signs.holds(tail + piece)
            tail = piece[-PROBE_BYTES:]

        return sound_end(self._file, offset, None, self._spend, look) is not None and found

    def _spend(self, count: int) -> bool:
        self.reread += count
        self._tick()
        return self.reread <= REREAD_BYTES

    def _back(self, found: int | None) -> int | None:
        """``found``, with the file where reading stood."""
        self._file.seek(self._raw_offset + len(self._raw))
        return found

    def _need(self, count: int) -> bool:
        """At least ``count`` bytes of the file at hand."""
        while len(self._raw) - self._at < count:
            more = self._file.read(_READ_BYTES)
            if not more:
                return False
            self._raw_offset += self._at
            self._raw = self._raw[self._at :] + more
            self._at = 0
        return True

    def _seek(self, offset: int) -> None:
        self._file.seek(offset)
        self._raw, self._at, self._raw_offset = b"", 0, offset
