"""A sliding view of a file's decompressed bytes, one gzip member (or the one stream) at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import IO, Literal

from quern.data_pipeline.sources.containers.compression import compression_of, pieces
from quern.data_pipeline.sources.containers.gzip_members import GzipMembers, Note, Signs
from quern.data_pipeline.sources.containers.gzip_search import beginning, find_member, header_length

__all__ = ["Packing", "Window", "packing_of"]

#: How records lie in a file: in gzip members, as they are, or in a stream that can only be read from its beginning.
Packing = Literal["gzip", "plain", "stream"]

_COMPACT_BYTES = 1 << 18
_PEEK_BYTES = 4 << 10
_READ_BYTES = 1 << 17
_BLOCK_BYTES = 1 << 20
#: How much of a file is searched for what tells its packing; every range of it does so.
_SEARCHED_BYTES = 64 << 20


def packing_of(file: IO[bytes], name: str, signs: Signs, tick: Callable[[], None]) -> Packing:
    """How records lie in ``file``: as its first bytes say, if they lead to a record; else as the first record does."""
    file.seek(0)
    head = file.read(_PEEK_BYTES)
    if not head or signs.begins(head):
        return "plain"
    compression = compression_of(head)
    if compression == "gzip":
        length = header_length(head)
        if length is not None and signs.starts(beginning(head[length:])):
            return "gzip"
    elif compression is not None and signs.starts(next(pieces(BytesIO(head + file.read(_BLOCK_BYTES)), _ignore), b"")):
        return "stream"
    member = find_member(file, 0, _SEARCHED_BYTES, signs.starts, tick)
    if member is not None and (compression == "gzip" or name.endswith(".gz")):
        return "gzip"
    file.seek(0)
    before, offset, end = b"", 0, _SEARCHED_BYTES if member is None else member
    while offset < end and (block := file.read(_BLOCK_BYTES)):
        tick()
        if signs.holds((before + block)[: len(before) + end - offset]):
            return "plain"
        before, offset = block[-_PEEK_BYTES:], offset + len(block)
    if member is not None or compression == "gzip" or (compression is None and name.endswith(".gz") and offset >= end):
        return "gzip"
    return "plain" if compression is None else "stream"


def _ignore(offset: int, why: str) -> None:
    """Damage met in a trial reading is noted when it is met again."""


class Window:
    """Bytes at hand are ``data[cursor:]``; ``position`` is the cursor's offset in the decompressed stream.

    A *segment* is a gzip member, or all of a file that is not gzip. Filling stops at a segment's end (``ended``),
    unless the caller knows that what it reads goes on: then the next member is joined if its content does not begin
    with a record of its own (``joins`` counts that).
    """

    def __init__(
        self,
        file: IO[bytes],
        packing: Packing,
        note: Note,
        signs: Signs,
        *,
        begin: int = 0,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """A view from ``begin`` on, which is 0 or the place of a member or (in a plain file) any other."""
        self._size = file.seek(0, os.SEEK_END)
        file.seek(begin)
        self.data = bytearray()
        self.cursor = 0
        self.ended = True
        self.joins = 0
        self.in_member = packing == "gzip"
        self.member_start = 0
        self.member_end = 0
        self.broken: str | None = None
        self._base = begin if packing == "plain" else 0
        self._starts = signs.starts
        self._tick = tick
        self._members = GzipMembers(file, note, signs, begin=begin, tick=tick) if packing == "gzip" else None
        self._file = file if packing == "plain" else None
        if self._members is not None:
            self._piece: Callable[[], bytes] = self._members.piece
        elif packing == "plain":
            self._piece = partial(file.read, _READ_BYTES)
        else:
            self._piece = partial(next, pieces(file, note), b"")
        self._began = False
        self._ahead: bytes | None = None

    @property
    def reread(self) -> int:
        """The number of bytes decoded more than once because of damage."""
        return self._members.reread if self._members is not None else 0

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
        self._end_early()
        return True

    def fill(self, count: int, *, join: bool = False) -> int:
        """How many bytes are at hand, at least ``count`` unless the segment ends before."""
        while len(self.data) - self.cursor < count:
            if self.ended:
                if not (join and self._join()):
                    break
                continue
            self._more()
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
            self._tick()
            self._more()
        self.cursor += min(count, self.available)
        if self.cursor > _COMPACT_BYTES or self.cursor == len(self.data):
            del self.data[: self.cursor]
            self._base += self.cursor
            self.cursor = 0

    @property
    def left(self) -> int | None:
        """The number of bytes from the cursor to the end; None if unknown (compressed files)."""
        return None if self._file is None else self._size - self.position

    def peek_at(self, distance: int) -> bytes:
        """Like :meth:`peek` at any offset, without reading up to there; only if ``left`` is known."""
        assert self._file is not None
        here = self._file.tell()
        self._file.seek(self.position + distance)
        ahead = self._file.read(_PEEK_BYTES)
        self._file.seek(here)
        return ahead

    def _more(self) -> None:
        piece = self._piece()
        if piece:
            self.data += piece
            self._end_early()
        else:
            self._end()

    def _end_early(self) -> None:
        """A member whose end is known gives no more; if it is broken, what it gave of others' bytes must go at once."""
        if self._members is not None and self._members.end is not None:
            self._end()

    def _end(self) -> None:
        self.ended = True
        if self._members is not None:
            self.member_end = self._members.end or 0
            self.broken = self._members.broken
            excess, self._members.excess = self._members.excess, 0
            if excess:
                del self.data[max(self.cursor, len(self.data) - excess) :]

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
        self._end_early()
        return True
