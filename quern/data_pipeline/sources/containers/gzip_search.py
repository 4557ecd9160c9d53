"""Finds gzip members in untrusted bytes, and checks whether they are sound.

A search takes time proportional to the bytes it skips: each place that looks like a header is decoded for a few bytes
only. The caller budgets what costs more (decoding whole members to check whether they are sound).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import IO

__all__ = ["PROBE_BYTES", "Starts", "beginning", "find_member", "header_length", "inner_header", "sound_end"]

#: Whether decompressed bytes are the beginning of what members of this file hold.
Starts = Callable[[bytes], bool]

PROBE_BYTES = 1 << 12
_BLOCK_BYTES = 1 << 20
_STEP_BYTES = 1 << 16
_BEGINNING_BYTES = 2048
_FIRST_BYTES = 64
_HEADER_BYTES = 10

#: RFC 1952, 2.3: no reserved flag is set; RFC 1951, 3.2.3: without flags (a header of ten bytes) the first deflate
#: block is of one of three kinds.
_BLOCK_HEADS = b"".join(b"\\x%02x" % byte for byte in range(256) if byte & 6 != 6)
_CANDIDATE = re.compile(rb"\x1f\x8b\x08(?=[\x01-\x1f]|\x00.{6}[" + _BLOCK_HEADS + rb"]|\x00.{0,6}\Z)", re.DOTALL)


def header_length(raw: bytes, at: int = 0) -> int | None:
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


def inner_header(raw: bytes, at: int, length: int, starts: Starts) -> int | None:
    """The offset, inside the header at ``at`` of ``length`` bytes, of another header whose member starts right.

    Junk that ends in a magic makes a header of flags and names that are the bytes of the true one.
    """
    inner = raw.find(b"\x1f\x8b\x08", at + 1, at + length + 2) if length > _HEADER_BYTES else -1
    found = None
    while inner >= 0:
        own = header_length(raw[inner : inner + PROBE_BYTES])
        if own is not None and starts(beginning(raw[inner + own : inner + PROBE_BYTES])):
            found = inner
        inner = raw.find(b"\x1f\x8b\x08", inner + 1, at + length + 2)
    return found


def beginning(deflated: bytes) -> bytes:
    """The first bytes, up to two thousand, of a deflate stream's content; what comes before damage counts."""
    inflate = zlib.decompressobj(-15)
    try:
        first = inflate.decompress(deflated, _FIRST_BYTES)
    except zlib.error:
        return b""
    stripped = first.lstrip(b"\r\n")
    if stripped and not stripped[:1].isalpha():  # no record of any kind; most false headers end here
        return first
    try:
        return first + inflate.decompress(inflate.unconsumed_tail, _BEGINNING_BYTES)
    except zlib.error:
        return first


def _no_stored(raw: bytes, at: int) -> bool:
    """Whether a stored block's length does not fit its complement (RFC 1951, 3.2.4)."""
    if at + 5 > len(raw) or raw[at] & 6:
        return False
    return raw[at + 1] ^ raw[at + 3] != 0xFF or raw[at + 2] ^ raw[at + 4] != 0xFF


def find_member(
    file: IO[bytes],
    offset: int,
    stop: int | None,
    starts: Starts,
    tick: Callable[[], None],
    otherwise: Callable[[int], bool] | None = None,
) -> int | None:
    """The first offset in [``offset``, ``stop``) of a member whose content starts right; None if there is none.

    A member whose content starts otherwise is taken where ``otherwise(its offset)`` says so; it may move the file's
    position. ``tick`` is called every megabyte.
    """
    file.seek(offset)
    block, more = b"", b"\0"
    while more and (stop is None or offset < stop):
        more = file.read(_BLOCK_BYTES)
        tick()
        block += more
        usable = len(block) - (PROBE_BYTES if more else 0)
        for match in _CANDIDATE.finditer(block):
            at = match.start()
            if at >= usable or (stop is not None and offset + at >= stop):
                break
            if block[at + 3]:
                length = header_length(block[at : at + PROBE_BYTES])
            else:  # seen at a glance, as there can be hundreds of thousands a megabyte
                length = None if _no_stored(block, at + _HEADER_BYTES) else _HEADER_BYTES
            content = beginning(block[at + length : at + PROBE_BYTES]) if length is not None else b""
            if not content:
                continue
            if starts(content):
                inner = inner_header(block, at, length or 0, starts)
                return offset + (at if inner is None else inner)
            if otherwise is not None:
                accepted = otherwise(offset + at)
                file.seek(offset + len(block))
                if accepted:
                    return offset + at
        if usable > 0:
            offset += usable
            block = block[usable:]
    return None


def sound_end(
    file: IO[bytes],
    offset: int,
    limit: int | None,
    cost: Callable[[int], bool],
    look: Callable[[bytes], None] | None = None,
) -> int | None:
    """Where the member at ``offset`` ends, if it is whole, its checksum is right, and it ends at or before ``limit``.

    ``cost(bytes)`` is told of the work as it is done, and says whether there may be more. ``look`` is given the
    content piece by piece.
    """
    file.seek(offset)
    raw = file.read(1 << 16)
    length = header_length(raw)
    if length is None:
        return None
    inflate, crc, size = zlib.decompressobj(-15), 0, 0
    raw, at = raw[length:], offset + length
    while not inflate.eof:
        if limit is not None and at > limit:
            return None
        try:
            out = inflate.decompress(raw, 1 << 20)
        except zlib.error:
            cost(len(raw))
            return None
        left = inflate.unconsumed_tail or inflate.unused_data
        at += len(raw) - len(left)
        if not cost(len(raw) - len(left) + len(out) // 8):
            return None
        if look is not None and out:
            look(out)
        crc, size = zlib.crc32(out, crc), size + len(out)
        if inflate.eof:
            raw = left
            break
        raw = left or file.read(_STEP_BYTES)
        if not raw and not out:
            return None
    raw += file.read(max(0, 8 - len(raw)))
    if raw[:8] != crc.to_bytes(4, "little") + (size & 0xFFFFFFFF).to_bytes(4, "little"):
        return None
    end = at + 8
    return end if limit is None or end <= limit else None
