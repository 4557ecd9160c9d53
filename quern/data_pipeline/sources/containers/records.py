"""Reads the records of a WARC or ARC file, damaged or not: framing, addresses, and recovery after damage.

warcio's parser reads the WARC header blocks and so defines what a record says; ARC header lines are those of the "Arc
File Format" (archive.org), versions 1 and 2. The framing around them is our own, because warcio stops at the first
damage, warns on stderr, and has no bound on a line or a payload.

An address is (offset, length) of the record's gzip member where the member holds this record alone, else of the record
in the decompressed stream (header, blank line and content, without the newlines behind it).
"""

from __future__ import annotations

import base64
import hashlib
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import IO

from warcio.recordloader import ArcWarcRecordLoader
from warcio.statusandheaders import StatusAndHeadersParser, StatusAndHeadersParserException

from quern.data_pipeline.sources.containers.gzip_members import Note
from quern.data_pipeline.sources.containers.gzip_search import find_member
from quern.data_pipeline.sources.containers.ranges import Edges, FileRange
from quern.data_pipeline.sources.containers.record_signs import (
    ARC_FIRST,
    ARC_LINE,
    END_OF_HEAD,
    SIGNS,
    WARC_START,
    Kind,
    find_record,
    starts,
)
from quern.data_pipeline.sources.containers.window import Packing, Window, packing_of

__all__ = ["PAGE_TYPES", "Records", "WarcRecord"]

#: WARC-Type of records that carry a page. ARC documents are given as ``response``.
PAGE_TYPES = frozenset({"response", "resource", "conversion"})

_MAX_HEAD_BYTES = 256 << 10
_MAX_LINE_BYTES = 64 << 10
_SCAN_BYTES = 256 << 10
_OVERLAP_BYTES = 4 << 10
_WARC = StatusAndHeadersParser(ArcWarcRecordLoader.WARC_TYPES)


@dataclass(slots=True)
class WarcRecord:
    """One record. ``headers`` has lower-case names, the first value of each; ``block`` is its content as stored."""

    type: str
    headers: dict[str, str]
    offset: int
    length: int
    block: bytes
    """Empty for types that carry no page, and where ``too_large``."""
    is_arc: bool = False
    too_large: bool = False
    damaged: bool = False
    """The gzip member is broken, and no block digest vouches for the content."""


class Records:
    """Every recognisable record, in file order; addresses are unique. Damage is noted, never raised.

    ``name`` is the file's; it decides only how a file is taken whose first bytes are neither a record nor compressed.
    Blocks above ``max_bytes`` are skipped and marked. With ``part`` only the records that begin in that range are
    read; ``edges`` then says, when they have been, where it met its neighbours. ``tick`` is called while nothing
    is found for long: the reader is at work.
    """

    def __init__(
        self,
        file: IO[bytes],
        name: str,
        note: Note,
        max_bytes: int,
        *,
        part: FileRange | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.edges: Edges | None = None
        self._file = file
        self._name = name
        self._note = note
        self._tick = tick
        self._part = part
        self._max_block = max_bytes + _MAX_HEAD_BYTES
        self._kind: Kind = part.kind if part is not None else None
        self._has_read = False
        self._kind_mattered = False
        self._by_stream = False
        self._place = 0
        self._member_offsets = array("Q")
        self._stream_offsets: set[int] = set()

    def __iter__(self) -> Iterator[WarcRecord]:
        packing = packing_of(self._file, self._name, SIGNS, self._tick)
        part, begin = self._part, 0
        if part is not None:
            found_at = part.first if part.first is not None else self._first(part, packing)
            self._kind_mattered = False
            if found_at is None or found_at >= part.end:
                self.edges = self._edges(part, found_at, part.end if found_at is None else found_at, 0)
                return
            begin = found_at
        self._window = Window(self._file, packing, self._note, SIGNS, begin=begin, tick=self._tick)
        end = part.end if part is not None and packing != "stream" else None
        records, stop = 0, None
        for found in self._walk(end):
            if isinstance(found, int):
                stop = found
                break
            records += 1
            yield found
        if part is not None:
            self.edges = self._edges(part, begin, part.size if stop is None else stop, records)
        if not records and (part is None or (part.end >= part.size and not begin)):
            self._note(0, "no WARC or ARC record found")

    def _walk(self, end: int | None) -> Iterator[WarcRecord | int]:
        """The records; last, where there is one, the place at or behind ``end`` at which the next would begin."""
        window = self._window
        while window.next_segment():
            if end is not None and window.in_member and window.member_start >= end:
                yield window.member_start
                return
            alone = window.in_member
            while True:
                self._skip_newlines()
                if not window.fill(1):
                    break
                if end is not None and not window.in_member and window.position >= end:
                    yield window.position
                    return
                record = self._record(alone)
                alone = False
                if record is not None:
                    yield record

    def _first(self, part: FileRange, packing: Packing) -> int | None:
        """Where a record seems to begin first in a range, by the signs a search goes by."""
        if part.start == 0:
            return 0
        if packing == "stream":
            return None
        if packing == "gzip":
            return find_member(self._file, part.start, part.end, starts, self._tick)
        # From one byte before: a record begins behind a newline.
        self._window = window = Window(self._file, packing, self._note, SIGNS, begin=part.start - 1)
        window.next_segment()
        while window.fill(1) and window.position < part.end:
            self._tick()
            found = self._find(1, min(window.fill(_SCAN_BYTES), part.end - window.position))
            if found is not None:
                return window.position + found
            if window.ended:
                break
            window.skip(window.available - _OVERLAP_BYTES)
        return None

    def _edges(self, part: FileRange, first: int | None, stop: int, records: int) -> Edges:
        window = getattr(self, "_window", None)
        return Edges(
            end=part.end,
            first=first,
            stop=stop,
            kind=part.kind,
            kind_mattered=self._kind_mattered,
            stop_kind=self._kind,
            records=records,
            by_stream=self._by_stream,
            reread=window.reread if window is not None else 0,
        )

    def _damage(self, why: str) -> None:
        """Note damage at the record in work: its member, or (in a file that is not gzip) its own beginning."""
        self._note(self._place, why)

    def _record(self, first: bool) -> WarcRecord | None:
        """The record at the cursor, or None behind damage (the cursor then stands at the next record)."""
        window, start = self._window, self._window.position
        self._place = window.member_start if window.in_member else start
        joins = window.joins
        parsed = self._head()
        if isinstance(parsed, str):
            self._damage(parsed)
            self._resync()
            return None
        headers, kind, is_arc, declared = parsed
        size, complete = self._block_size(declared)
        keep = kind in PAGE_TYPES and size <= self._max_block
        block = window.take(size) if keep else b""
        if not keep:
            content = window.position
            window.skip(size)
            if window.position - content < size:
                self._damage(f"record is cut off: {window.position - content} of {size} bytes")
        length = window.position - start
        self._skip_newlines()
        self._skip_junk()
        alone = first and joins == window.joins and not window.fill(1)
        record = WarcRecord(kind, headers, start, length, block, is_arc, too_large=not keep and kind in PAGE_TYPES)
        if alone:
            record.offset, record.length = window.member_start, window.member_end - window.member_start
        if (alone or not complete) and window.broken in ("data", "checksum"):
            record.damaged = not (complete and _digest_fits(headers, block))
        self._make_unique(record, alone)
        return record

    def _head(self) -> tuple[dict[str, str], str, bool, int | None] | str:
        """(headers, type, is it ARC, Content-Length) and the cursor behind the header block; or what is wrong."""
        window = self._window
        if window.fill(5, join=True) and WARC_START.match(window.data, window.cursor):
            return self._warc_head()
        end = -1
        while end < 0:
            before = window.available
            end = window.data.find(b"\n", window.cursor, window.cursor + _MAX_LINE_BYTES)
            if end < 0 and (before >= _MAX_LINE_BYTES or window.fill(before + _OVERLAP_BYTES, join=True) == before):
                end = min(len(window.data), window.cursor + _MAX_LINE_BYTES) - 1
        line = bytes(window.data[window.cursor : end + 1])
        match = ARC_LINE.match(line)
        if match is None:
            return f"no record begins here, but {line[:40]!r}"
        url, address, date, media, length = (field.decode("utf-8", "replace") for field in match.groups())
        window.skip(len(line))
        self._kind, self._has_read = "arc", True
        headers = {"uri": url, "ip-address": address, "archive-date": date, "content-type": media}
        return headers, "arc_header" if ARC_FIRST.match(line) else "response", True, _number(length)

    def _warc_head(self) -> tuple[dict[str, str], str, bool, int | None] | str:
        window = self._window
        end = None
        while end is None:
            before = window.available
            end = END_OF_HEAD.search(window.data, window.cursor, window.cursor + _MAX_HEAD_BYTES)
            if end is None:
                if before > _MAX_HEAD_BYTES:
                    return f"record header is longer than {_MAX_HEAD_BYTES} bytes"
                if window.fill(before + _OVERLAP_BYTES, join=True) == before:
                    break
        size = (end.end() if end else len(window.data)) - window.cursor
        try:
            pairs = _WARC.parse(BytesIO(window.data[window.cursor : window.cursor + size])).headers
        except StatusAndHeadersParserException as error:
            return f"not a WARC header ({error})"
        window.skip(size)
        self._kind, self._has_read = "warc", True
        headers = {name.lower(): value for name, value in reversed(pairs)}  # of a repeated name the first stays
        kind = headers.get("warc-type", "").strip().lower() or "none"
        return headers, kind, False, _number(headers.get("content-length"))

    def _block_size(self, declared: int | None) -> tuple[int, bool]:
        """How many bytes from the cursor are this record's content, and whether all of it is there.

        The declared length holds where a record (or the end) follows it. Where not, and the next record begins inside
        it, the content ends there; a missing length means up to the next record.
        """
        window = self._window
        if declared is not None and declared > self._max_block:
            left = window.left
            if left is None:  # believed, unless the segment is over before so large a length could even matter
                if window.fill(self._max_block + 1, join=True) > self._max_block:
                    return declared, True
            elif declared <= left and self._follows(window.peek_at(declared), ended=True):
                return declared, True
            else:
                self._damage(f"Content-Length {declared} does not lead to a record")
                declared = None
        elif declared is None:
            self._damage("no valid Content-Length")
        if declared is None:
            marker = self._scan(0)
            return min(window.available, self._max_block + 1) if marker is None else self._trimmed(marker), True
        available = min(declared, window.fill(declared, join=True))
        if available == declared and self._follows(window.peek(declared), window.ended):
            return declared, True
        marker = self._find(0, available)
        if marker is not None:
            self._damage(f"Content-Length {declared} runs into the next record")
            return self._trimmed(marker), True
        if available < declared:
            self._damage(f"record is cut off: {available} of {declared} bytes")
        return available, available == declared

    def _follows(self, content: bytes, ended: bool) -> bool:
        content = content.lstrip(b"\r\n")
        return starts(content) or (not content and ended)

    def _trimmed(self, size: int) -> int:
        """``size`` without the two newlines that stand behind every block."""
        window = self._window
        block = bytes(window.data[window.cursor + max(0, size - 4) : window.cursor + size])
        for newlines in (b"\r\n\r\n", b"\n\n", b"\r\n", b"\n"):
            if block.endswith(newlines):
                return size - len(newlines)
        return size

    def _find(self, start: int, stop: int) -> int | None:
        """Where, counted from the cursor, a record surely begins inside [start, stop)."""
        window = self._window
        self._kind_mattered |= not self._has_read
        cursor = window.cursor
        found = find_record(
            window.data, cursor + start, cursor + stop, self._kind, lambda end: window.fill(end - cursor)
        )
        return None if found is None else found - cursor

    def _scan(self, start: int) -> int | None:
        """As :meth:`_find`, to the segment's end or as far as a block may be."""
        window, at = self._window, start
        while True:
            available = min(window.fill(at + _SCAN_BYTES), self._max_block)
            found = self._find(at, available)
            if found is not None or window.ended or available == self._max_block:
                return found
            self._tick()
            at = max(at, available - _OVERLAP_BYTES)

    def _resync(self) -> None:
        """Move on to the next sure beginning of a record, or the end of the segment."""
        window = self._window
        if window.in_member:  # what a broken member swallowed of others must not be taken for its own
            window.fill(self._max_block)
        while True:
            found = self._scan(1)
            if found is not None:
                window.skip(found)
                return
            if window.ended and window.available <= self._max_block:
                window.skip(window.available)
                return
            window.skip(min(window.available, self._max_block) - _OVERLAP_BYTES)

    def _skip_junk(self) -> None:
        """Behind a record: move on if no other follows at once, so that what stands alone in its member shows."""
        window = self._window
        ahead = window.peek(0)
        if ahead and not starts(ahead):
            self._place = window.member_start if window.in_member else window.position
            self._damage(f"no record begins here, but {ahead[:40]!r}")
            self._resync()

    def _skip_newlines(self) -> None:
        while ahead := self._window.peek(0):
            newlines = len(ahead) - len(ahead.lstrip(b"\r\n"))
            self._window.skip(newlines)
            if newlines < len(ahead):
                break

    def _make_unique(self, record: WarcRecord, alone: bool) -> None:
        """A file may mix members of one record and members of many: a place in it and one in its stream may meet."""
        if alone and not self._stream_offsets:
            self._member_offsets.append(record.offset)
        elif alone or self._window.in_member:
            taken = record.offset
            while record.offset in self._stream_offsets or _holds(self._member_offsets, record.offset):
                record.offset += 1
            if record.offset != taken:
                self._note(taken, f"two records have the address {taken}; one is given {record.offset}")
            self._stream_offsets.add(record.offset)
            self._by_stream |= not alone


def _holds(offsets: array[int], offset: int) -> bool:
    at = bisect_left(offsets, offset)
    return at < len(offsets) and offsets[at] == offset


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\s*[0-9]{1,18}\s*", text) else None


def _digest_fits(headers: dict[str, str], block: bytes) -> bool:
    algorithm, _, value = headers.get("warc-block-digest", "").partition(":")
    if algorithm.lower() not in ("sha1", "sha256", "md5"):
        return False
    digest = hashlib.new(algorithm.lower(), block).digest()
    return value.upper() == base64.b32encode(digest).decode() or value.lower() == digest.hex()
