"""Recognises where a record begins: at a given place, or anywhere in untrusted bytes.

At a place where a record ought to begin a few bytes are enough. In search of one behind damage, or from the middle of a
file, a WARC record needs its version line, a field behind it and WARC-Type in its header block; an ARC record its line
with all its fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from quern.data_pipeline.sources.containers.gzip_members import Signs

__all__ = ["ARC_FIRST", "ARC_LINE", "END_OF_HEAD", "LOOK_BYTES", "SIGNS", "WARC_START", "Kind", "find_record", "starts"]

#: What records of a file are, once one has been read; None before.
Kind = Literal["warc", "arc"] | None

#: How far behind its first byte a record's header block may lie for the record to be found by a search.
LOOK_BYTES = 8 << 10

END_OF_HEAD = re.compile(rb"\n[ \t\r]*\n")
WARC_START = re.compile(rb"WARC/", re.IGNORECASE)
# URL, IP address, date, media type (may be empty), five more fields in version 2, length.
ARC_LINE = re.compile(
    rb"^((?:https?|ftp|gopher|dns|whois|nntp|news|mailto|mms|rtsp|filedesc):[^\r\n]*) "
    rb"(\d{1,3}(?:\.\d{1,3}){3}|0|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{1,40}) "
    rb"(\d{8,20}) ([^ \r\n]*)(?:(?: [^ \r\n]+){5})? ([^ \r\n]+)[ \t\r]*(?:\n|\Z)",
    re.MULTILINE | re.IGNORECASE,
)
# The beginning of an ARC line that is longer than a look ahead.
_ARC_LONG = re.compile(rb"https?://[^\r\n]{2000}")
ARC_FIRST = re.compile(rb"filedesc://", re.IGNORECASE)
_WARC_LINE = re.compile(rb"^WARC/[01]\.\d+[ \t\r]*\n(?=[^\s:]+[ \t]*:)", re.MULTILINE | re.IGNORECASE)
_TYPE_FIELD = re.compile(rb"^WARC-Type[ \t]*:", re.MULTILINE | re.IGNORECASE)


def starts(content: bytes) -> bool:
    """Whether bytes begin with a record (or the first part of one)."""
    content = content.lstrip(b"\r\n")
    return any(start.match(content) for start in (WARC_START, ARC_FIRST, ARC_LINE, _ARC_LONG))


def find_record(
    data: bytes | bytearray, start: int, stop: int, kind: Kind, more: Callable[[int], object] = lambda end: None
) -> int | None:
    """Where in ``data`` a record surely begins inside [start, stop); of the given kind where that is known.

    ``more(end)`` may append to ``data`` so that it reaches to ``end``.
    """
    found = [] if kind == "arc" else [_find_warc(data, start, stop, more)]
    if kind != "warc":
        match = ARC_LINE.search(data, start, stop + LOOK_BYTES)
        found.append(match.start() if match is not None and match.start() < stop else None)
    return min((at for at in found if at is not None), default=None)


def _find_warc(data: bytes | bytearray, start: int, stop: int, more: Callable[[int], object]) -> int | None:
    at = start
    while at < stop:
        match = _WARC_LINE.search(data, at, stop + LOOK_BYTES)
        if match is None or match.start() >= stop:
            return None
        at = match.end()
        more(at + LOOK_BYTES)
        head = bytes(data[at : at + LOOK_BYTES])
        blank = END_OF_HEAD.search(head)
        if _TYPE_FIELD.search(head, 0, blank.end() if blank else len(head)):
            return match.start()
    return None


def _holds(content: bytes) -> bool:
    return find_record(content, 0, len(content), None) is not None


def _begins(content: bytes) -> bool:
    content = content.lstrip(b"\r\n")
    return find_record(content, 0, 1, None) == 0


SIGNS = Signs(starts, _begins, _holds)
