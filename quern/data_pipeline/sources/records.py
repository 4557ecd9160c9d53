"""The records of a WARC or ARC file, in any state: framing, addresses, and the way on behind damage.

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
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import IO

from warcio.recordloader import ArcWarcRecordLoader
from warcio.statusandheaders import StatusAndHeadersParser, StatusAndHeadersParserException

from quern.data_pipeline.sources.compression import Note
from quern.data_pipeline.sources.window import Window

__all__ = ["PAGE_TYPES", "Record", "read_records"]

#: WARC-Type of records that carry a page. ARC documents are given as ``response``.
PAGE_TYPES = frozenset({"response", "resource", "conversion"})

_MAX_HEAD_BYTES = 256 << 10
_SCAN_BYTES = 256 << 10
_OVERLAP_BYTES = 4 << 10
_END_OF_HEAD = re.compile(rb"\n[ \t\r]*\n")
_WARC_START = re.compile(rb"WARC/", re.IGNORECASE)
# URL, IP address, date, media type (may be empty), five more fields in version 2, length.
_ARC_LINE = re.compile(
    rb"^((?:https?|ftp|gopher|dns|whois|nntp|news|mailto|mms|rtsp|filedesc):[^\r\n]*) "
    rb"(\d{1,3}(?:\.\d{1,3}){3}|0|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{1,40}) "
    rb"(\d{8,20}) ([^ \r\n]*)(?:(?: [^ \r\n]+){5})? ([^ \r\n]+)[ \t\r]*(?:\n|\Z)",
    re.MULTILINE | re.IGNORECASE,
)
# The beginning of an ARC line that is longer than a look ahead.
_ARC_LONG = re.compile(rb"https?://[^\r\n]{2000}")
_ARC_FIRST = re.compile(rb"filedesc://", re.IGNORECASE)
_MARKER = re.compile(rb"^WARC/[01]\.\d+[ \t\r]*\n(?=[^\s:]+[ \t]*:)", re.MULTILINE | re.IGNORECASE)
_TYPE_FIELD = re.compile(rb"^WARC-Type[ \t]*:", re.MULTILINE | re.IGNORECASE)
_WARC = StatusAndHeadersParser(ArcWarcRecordLoader.WARC_TYPES)


@dataclass(slots=True)
class Record:
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


def read_records(file: IO[bytes], name: str, note: Note, max_bytes: int) -> Iterator[Record]:
    """Every record that can be made out, in file order; addresses are unique. Damage is noted, never raised.

    ``name`` is the file's; it decides only how a file is taken whose first bytes are neither a record nor compressed.
    Blocks above ``max_bytes`` are skipped and marked.
    """
    return iter(_Reader(Window(file, name, note, _starts), note, max_bytes))


def _starts(content: bytes) -> bool:
    """Whether bytes begin with a record (or the first part of one)."""
    content = content.lstrip(b"\r\n")
    return any(start.match(content) for start in (_WARC_START, _ARC_FIRST, _ARC_LINE, _ARC_LONG))


class _Reader:
    def __init__(self, window: Window, note: Note, max_bytes: int) -> None:
        self._window = window
        self._note = note
        self._max_block = max_bytes + _MAX_HEAD_BYTES
        self._marker = _MARKER
        self._member_offsets = array("Q")
        self._stream_offsets: set[int] = set()

    def __iter__(self) -> Iterator[Record]:
        window, found = self._window, 0
        while window.next_segment():
            alone = window.in_member
            while True:
                self._skip_newlines()
                if not window.fill(1):
                    break
                record = self._record(alone)
                alone = False
                if record is not None:
                    found += 1
                    yield record
        if not found:
            self._note(0, "no WARC or ARC record found")

    def _record(self, first: bool) -> Record | None:
        """The record at the cursor, or None behind damage (the cursor then stands at the next record)."""
        window, start = self._window, self._window.position
        joins = window.joins
        parsed = self._head()
        if isinstance(parsed, str):
            self._note(start, parsed)
            self._resync()
            return None
        headers, kind, is_arc, declared = parsed
        size, complete = self._block_size(start, declared)
        keep = kind in PAGE_TYPES and size <= self._max_block
        block = window.take(size) if keep else b""
        if not keep:
            window.skip(size)
        length = window.position - start
        self._skip_newlines()
        self._skip_junk()
        alone = first and joins == window.joins and not window.fill(1)
        record = Record(kind, headers, start, length, block, is_arc, too_large=not keep and kind in PAGE_TYPES)
        if alone:
            record.offset, record.length = window.member_start, window.member_end - window.member_start
        if (alone or not complete) and window.broken in ("data", "checksum"):
            record.damaged = not (complete and _digest_fits(headers, block))
        self._make_unique(record, alone)
        return record

    def _head(self) -> tuple[dict[str, str], str, bool, int | None] | str:
        """(headers, type, is it ARC, Content-Length) and the cursor behind the header block; or what is wrong."""
        window = self._window
        if window.fill(5, join=True) and _WARC_START.match(window.data, window.cursor):
            return self._warc_head()
        end = -1
        while end < 0 and window.available <= _OVERLAP_BYTES * 16:
            before = window.available
            end = window.data.find(b"\n", window.cursor)
            if end < 0 and window.fill(before + _OVERLAP_BYTES, join=True) == before:
                end = len(window.data) - 1
        line = bytes(window.data[window.cursor : end + 1])
        match = _ARC_LINE.match(line)
        if match is None:
            return f"no record begins here, but {bytes(window.data[window.cursor : window.cursor + 40])!r}"
        url, address, date, media, length = (field.decode("utf-8", "replace") for field in match.groups())
        window.skip(len(line))
        self._marker = _ARC_LINE
        headers = {"uri": url, "ip-address": address, "archive-date": date, "content-type": media}
        return headers, "arc_header" if _ARC_FIRST.match(line) else "response", True, _number(length)

    def _warc_head(self) -> tuple[dict[str, str], str, bool, int | None] | str:
        window = self._window
        end = None
        while end is None:
            before = window.available
            end = _END_OF_HEAD.search(window.data, window.cursor)
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
        headers: dict[str, str] = {}
        for name, value in pairs:
            headers.setdefault(name.lower(), value)
        kind = headers.get("warc-type", "").strip().lower() or "none"
        return headers, kind, False, _number(headers.get("content-length"))

    def _block_size(self, start: int, declared: int | None) -> tuple[int, bool]:
        """How many bytes from the cursor are this record's content, and whether all of it is there.

        The declared length holds where a record (or the end) follows it. Where not, and the next record begins inside
        it, the content ends there; a missing length means up to the next record.
        """
        window = self._window
        if declared is not None and declared > self._max_block:
            left = window.left
            if left is None or (declared <= left and self._follows(window.peek_at(declared), ended=True)):
                return declared, True
            self._note(start, f"Content-Length {declared} does not lead to a record")
            declared = None
        elif declared is None:
            self._note(start, "no valid Content-Length")
        if declared is None:
            marker = self._scan(0)
            return (window.available if marker is None else self._trimmed(marker)), True
        available = min(declared, window.fill(declared, join=True))
        if available == declared and self._follows(window.peek(declared), window.ended):
            return declared, True
        marker = self._find(0, available)
        if marker is not None:
            self._note(start, f"Content-Length {declared} runs into the next record")
            return self._trimmed(marker), True
        if available < declared:
            self._note(start, f"record is cut off: {available} of {declared} bytes")
        return available, available == declared

    def _follows(self, content: bytes, ended: bool) -> bool:
        content = content.lstrip(b"\r\n")
        return _starts(content) or (not content and ended)

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
        at = start
        while at < stop:
            match = self._marker.search(window.data, window.cursor + at, window.cursor + stop + _OVERLAP_BYTES)
            if match is None or match.start() - window.cursor >= stop:
                return None
            begin, end = match.start() - window.cursor, match.end() - window.cursor
            if self._marker is _ARC_LINE:
                return begin
            window.fill(end + 2 * _OVERLAP_BYTES)
            head = bytes(window.data[window.cursor + end : window.cursor + end + 2 * _OVERLAP_BYTES])
            blank = _END_OF_HEAD.search(head)
            if _TYPE_FIELD.search(head, 0, blank.end() if blank else len(head)):
                return begin
            at = end
        return None

    def _scan(self, start: int) -> int | None:
        """As :meth:`_find`, to the segment's end or as far as a block may be."""
        window, at = self._window, start
        while True:
            available = window.fill(at + _SCAN_BYTES)
            found = self._find(at, available)
            if found is not None or window.ended or available > self._max_block:
                return found
            at = max(at, available - _OVERLAP_BYTES)

    def _resync(self) -> None:
        """Move on to the next sure beginning of a record, or the end of the segment."""
        window = self._window
        while True:
            found = self._scan(1)
            if found is not None:
                window.skip(found)
                return
            if window.ended:
                window.skip(window.available)
                return
            window.skip(window.available - _OVERLAP_BYTES)

    def _skip_junk(self) -> None:
        """Behind a record: move on if no other follows at once, so that what stands alone in its member shows."""
        window = self._window
        ahead = window.peek(0)
        if ahead and not _starts(ahead):
            self._note(window.position, f"no record begins here, but {ahead[:40]!r}")
            self._resync()

    def _skip_newlines(self) -> None:
        while ahead := self._window.peek(0):
            newlines = len(ahead) - len(ahead.lstrip(b"\r\n"))
            self._window.skip(newlines)
            if newlines < len(ahead):
                break

    def _make_unique(self, record: Record, alone: bool) -> None:
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
