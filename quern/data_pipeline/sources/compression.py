"""Compressed files as bytes that come piece by piece, whatever state the file is in.

:class:`GzipMembers` knows where each member begins and ends, survives damage and finds the next member behind it.
Nothing here raises for damage: it is noted, with its offset in the file, and reading goes on where that is possible.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import IO

import pyarrow as pa
import zstandard

__all__ = ["GzipMembers", "Note", "Starts", "compression_of", "pieces"]

#: Takes (offset in the file, why).
Note = Callable[[int, str], None]
#: Whether decompressed bytes are the beginning of what members of this file hold.
Starts = Callable[[bytes], bool]

_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
)
_READ_BYTES = 1 << 17
_PIECE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 16
_PROBE_BYTES = 1 << 12


def compression_of(head: bytes) -> str | None:
    """The compression a file's first six bytes tell: gzip, zstd, bz2, xz, lz4 or None."""
    return next((name for magic, name in _MAGIC if head.startswith(magic)), None)


def pieces(file: IO[bytes], note: Note) -> Iterator[bytes]:
    """The decompressed content (of a plain file: the content), in pieces of at most about a megabyte."""
    kind = compression_of(file.read(6))
    file.seek(0)
    if kind == "gzip":
        members = GzipMembers(file, note, None)
        while members.advance():
            while piece := members.piece():
                yield piece
        return
    try:
        yield from _decompressed(file, kind)
    except (zstandard.ZstdError, lzma.LZMAError, pa.ArrowException, EOFError, OSError) as error:
        # bz2 and lz4 report damage as OSError; one that has an errno is the store's and not the content's.
        if getattr(error, "errno", None) is not None:
            raise
        # Arrow closes what it reads.
        note(0 if file.closed else file.tell(), f"{kind} stream is damaged, the rest cannot be read: {error}")


def _decompressed(file: IO[bytes], kind: str | None) -> Iterator[bytes]:
    if kind == "zstd":
        yield from _zstd_frames(file)
    elif kind == "bz2":
        yield from _streams(file, bz2.BZ2Decompressor)
    elif kind == "xz":
        yield from _streams(file, lzma.LZMADecompressor)
    elif kind == "lz4":
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "lz4") as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece
    else:
        while piece := file.read(_READ_BYTES):
            yield piece


def _streams(file: IO[bytes], make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> Iterator[bytes]:
    """As the standard library's file classes, but what comes before damage is given, not lost with the error."""
    decompressor = None
    while step := file.read(_READ_BYTES):
        while True:
            if decompressor is None:
                step = step.lstrip(b"\0")  # padding between and behind streams
                if not step:
                    break
                decompressor = make()
            piece = decompressor.decompress(step, _PIECE_BYTES)
            step = b""
            if piece:
                yield piece
            if decompressor.eof:
                step, decompressor = decompressor.unused_data, None
            elif decompressor.needs_input:
                break
    if decompressor is not None:
        raise EOFError("the file ends inside a stream")


def _zstd_frames(file: IO[bytes]) -> Iterator[bytes]:
    """zstandard's own stream reader takes a file that is cut off for a whole one; this one raises EOFError."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    # Small steps bound the memory of a step's output: a zstd block of four bytes can stand for 128 KiB.
    while step := file.read(1 << 11):
        while step:
            frame = frame or decompressor.decompressobj()
            piece = frame.decompress(step)
            step = b""
            if frame.eof:
                step, frame = frame.unused_data, None
            if piece:
                yield piece
    if frame is not None:
        raise EOFError("the file ends inside a frame")


class GzipMembers:
    """The members of a gzip file one after another; ``advance`` to one, then take its pieces until there are none.

    ``start`` and ``end`` are the member's bytes in the file (``end`` once its last piece is taken); ``broken`` says
    what is wrong with it (None, ``cut``, ``data`` or ``checksum``). With ``starts`` given, a search behind damage goes
    on at the next member whose content starts right; without, damage ends the file.
    """

    def __init__(self, file: IO[bytes], note: Note, starts: Starts | None) -> None:
        self.start = 0
        self.end: int | None = 0
        self.broken: str | None = None
        self._file = file
        self._note = note
        self._starts = starts
        self._raw = b""
        self._at = 0
        self._raw_offset = file.tell()
        self._search_from: int | None = None

    def advance(self) -> bool:
        """Go to the next member; False at the end of the file."""
        while True:
            if self._search_from is not None:
                found, self._search_from = self._search(self._search_from), None
                if found is None:
                    return False
                self._seek(found)
            if not self._need(1):
                return False
            offset = self._raw_offset + self._at
            self._need(_MAX_HEADER_BYTES if self._raw[self._at + 3 : self._at + 4] != b"\0" else 10)
            length = _header_length(self._raw, self._at)
            if length is not None:
                self.start, self.end, self.broken = offset, None, None
                self._at += length
                self._content_offset = offset + length
                self._inflate = zlib.decompressobj(-15)
                self._crc = self._size = 0
                return True
            only_zeros = not self._raw[self._at : self._at + _READ_BYTES].strip(b"\0")
            self._note(offset, "zero bytes" if only_zeros else "not a gzip member")
            self._search_from = offset + 1

    def piece(self) -> bytes:
        """The next decompressed bytes of the member; empty at its end."""
        while self.end is None:
            if not self._need(1):
                out = self._inflate.decompress(b"", _PIECE_BYTES)
                if not out and not self._inflate.eof:
                    self._break("cut", "the file ends inside this gzip member", None)
                    break
            else:
                view = memoryview(self._raw)[self._at :]
                try:
                    out = self._inflate.decompress(view, _PIECE_BYTES)
                except zlib.error as error:
                    out = self._rescue()
                    self._break("data", f"gzip member is damaged: {error}", self.start + 1)
                    return out
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
            self._break("cut", "the file ends inside this gzip member's checksum", None)
            return
        trailer = self._raw[self._at : self._at + 8]
        self._at += 8
        self.end = self._raw_offset + self._at
        if trailer != self._crc.to_bytes(4, "little") + (self._size & 0xFFFFFFFF).to_bytes(4, "little"):
            self.broken = "checksum"
            self._note(self.start, "gzip member's checksum is wrong")
            # Damage can make the data run over the member's end and swallow the beginning of the next.
            if self._need(3) and self._raw[self._at : self._at + 3] != b"\x1f\x8b\x08":
                self._search_from = self.start + 1

    def _break(self, broken: str, why: str, search_from: int | None) -> None:
        self.broken = broken
        self.end = self._raw_offset + self._at
        self._note(self.start, why)
        self._search_from = search_from

    def _rescue(self) -> bytes:
        """What the failed call had decoded before the damage: zlib throws it away, so decode again in small steps."""
        inflate = zlib.decompressobj(-15)
        self._file.seek(self._content_offset)
        skip, out = self._size, bytearray()
        while step := self._file.read(64):
            try:
                piece = inflate.decompress(step)
            except zlib.error:
                break
            if skip >= len(piece):
                skip -= len(piece)
            else:
                out += piece[skip:]
                skip = 0
        self._seek(self._raw_offset + len(self._raw))
        return bytes(out)

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

    def _search(self, offset: int) -> int | None:
        """The offset of the next member at or behind ``offset`` whose content starts right."""
        if self._starts is None:
            return None
        self._file.seek(offset)
        block = b""
        while more := self._file.read(1 << 20):
            block += more
            at = block.find(b"\x1f\x8b\x08")
            while at >= 0:
                probe = block[at : at + _PROBE_BYTES]
                if len(probe) < _PROBE_BYTES:
                    self._file.seek(offset + at)
                    probe = self._file.read(_PROBE_BYTES)
                    self._file.seek(offset + len(block))
                if self._starts(_beginning(probe)):
                    return offset + at
                at = block.find(b"\x1f\x8b\x08", at + 1)
            offset += max(0, len(block) - 2)
            block = block[-2:]
        return None


def _beginning(member: bytes) -> bytes:
    length = _header_length(member, 0)
    if length is None:
        return b""
    try:
        return zlib.decompressobj(-15).decompress(member[length:], 2048)
    except zlib.error:
        return b""


def _header_length(raw: bytes, at: int) -> int | None:
    """Length of the gzip header at ``at`` (RFC 1952, section 2.3); None when there is none."""
    if raw[at : at + 3] != b"\x1f\x8b\x08" or len(raw) < at + 10 or raw[at + 3] & 0xE0:
        return None
    flags, end = raw[at + 3], at + 10
    if flags & 4:
        if len(raw) < end + 2:
            return None
        end += 2 + int.from_bytes(raw[end : end + 2], "little")
    for flag in (8, 16):
        if flags & flag:
            end = raw.find(b"\0", end) + 1
            if end == 0:
                return None
    end += 2 if flags & 2 else 0
    return end - at if end <= len(raw) else None
