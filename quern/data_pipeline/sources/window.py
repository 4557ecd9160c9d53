"""A sliding view of a file's decompressed bytes, one gzip member (or the one stream) at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO

from quern.data_pipeline.sources.compression import GzipMembers, Note, Starts, compression_of, pieces

__all__ = ["Window"]

_COMPACT_BYTES = 1 << 18
_PEEK_BYTES = 4 << 10


class Window:
    """Bytes at hand are ``data[cursor:]``; ``position`` is the cursor's offset in the decompressed stream.

    A *segment* is a gzip member, or all of a file that is not gzip. Filling stops at a segment's end (``ended``),
    unless the caller knows that what it reads goes on: then the next member is joined if its content does not begin
    with a record of its own (``joins`` counts that).
    """

    def __init__(self, file: IO[bytes], name: str, note: Note, starts: Starts) -> None:
        head = file.read(_PEEK_BYTES)
        self._size = file.seek(0, os.SEEK_END)
        file.seek(0)
        compression = compression_of(head)
        is_gzip = compression == "gzip" or (
            compression is None and name.endswith(".gz") and bool(head) and not starts(head)
        )
        self.data = bytearray()
        self.cursor = 0
        self.ended = True
        self.joins = 0
        self.in_member = is_gzip
        self.member_start = 0
        self.member_end = 0
        self.broken: str | None = None
        self._base = 0
        self._starts = starts
        self._members = GzipMembers(file, note, starts) if is_gzip else None
        self._pieces: Iterator[bytes] | None = None if is_gzip else pieces(file, note)
        self._file = file if not is_gzip and compression is None else None
        self._began = False
        self._ahead: bytes | None = None

    @property
    def available(self) -> int:
        return len(self.data) - self.cursor

    @property
    def position(self) -> int:
        return self._base + self.cursor

    def next_segment(self) -> bool:
        """Go to the next segment (what is left of this one is dropped); False at the end of the file."""
        self.skip(self.available)
        if self._members is None:
            began, self._began = self._began, True
            self.ended = began
            return not began
        if self._ahead is not None:
            self.data += self._ahead
            self._ahead = None
        elif not self._members.advance():
            return False
        self.ended = False
        self.member_start = self._members.start
        return True

    def fill(self, count: int, *, join: bool = False) -> int:
        """How many bytes are at hand, at least ``count`` unless the segment ends before."""
        while len(self.data) - self.cursor < count:
            if self.ended:
                if not (join and self._join()):
                    break
                continue
            piece = self._piece()
            if piece:
                self.data += piece
            else:
                self._end()
        return len(self.data) - self.cursor

    def peek(self, distance: int) -> bytes:
        """A few bytes of this segment from ``distance`` behind the cursor, which stays; fewer at the segment's end."""
        self.fill(distance + _PEEK_BYTES)
        start = self.cursor + distance
        return bytes(memoryview(self.data)[start : start + _PEEK_BYTES])

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes, which are at hand, and the cursor behind them."""
        out = bytes(memoryview(self.data)[self.cursor : self.cursor + count])
        self.skip(count)
        return out

    def skip(self, count: int) -> None:
        """Move the cursor on, over bytes that need not be at hand; memory stays bounded."""
        while count > self.available and not self.ended:
            count -= self.available
            self._base += len(self.data)
            self.data, self.cursor = bytearray(), 0
            piece = self._piece()
            if piece:
                self.data += piece
            else:
                self._end()
        self.cursor += min(count, self.available)
        if self.cursor > _COMPACT_BYTES or self.cursor == len(self.data):
            del self.data[: self.cursor]
            self._base += self.cursor
            self.cursor = 0

    @property
    def left(self) -> int | None:
        """How many bytes there are from the cursor to the end; None where the file cannot tell (it is compressed)."""
        return None if self._file is None else self._size - self.position

    def peek_at(self, distance: int) -> bytes:
        """As :meth:`peek`, from anywhere in the file and without reading up to there; only where ``left`` is known."""
        assert self._file is not None
        here = self._file.tell()
        self._file.seek(self.position + distance)
        ahead = self._file.read(_PEEK_BYTES)
        self._file.seek(here)
        return ahead

    def _piece(self) -> bytes:
        if self._members is not None:
            return self._members.piece()
        assert self._pieces is not None
        return next(self._pieces, b"")

    def _end(self) -> None:
        self.ended = True
        if self._members is not None:
            self.member_end = self._members.end or 0
            self.broken = self._members.broken

    def _join(self) -> bool:
        """Whether the next member goes on with what this one began; it is then at hand."""
        if self._members is None or self.broken or self._ahead is not None or not self._members.advance():
            return False
        piece = self._members.piece()
        if self._starts(piece):
            self._ahead = piece
            return False
        self.data += piece
        self.ended = False
        self.joins += 1
        return True
