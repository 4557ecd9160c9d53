"""Reads pages from WARC, ARC and WET files: response, resource and conversion records, ARC documents."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from functools import partial
from typing import Literal

from quern import storage
from quern.data_pipeline.page.document import OUT_OF_MEMORY, Page
from quern.data_pipeline.sources.charset import decode, header_charset, printable
from quern.data_pipeline.sources.containers.ranges import FileRange
from quern.data_pipeline.sources.containers.records import PAGE_TYPES, Records, WarcRecord
from quern.data_pipeline.sources.http import HttpResponse, TooLarge, decoded_payload, parse_response
from quern.data_pipeline.sources.log import ReadLog

__all__ = ["parse_date", "read_warc"]

Media = Literal["html", "text"]

_HTML = ("text/html", "application/xhtml+xml")
#: What servers say when they do not know, and types under which HTML is served as well: the bytes decide.
_VAGUE = ("", "text/plain", "text/xml", "application/xml", "application/octet-stream", "application/http", "unknown")
_LOOKS_HTML = re.compile(
    rb"(?>\s+|<!--.{0,4000}?-->|<\?xml[^>]{0,400}>)*+<(?:!doctype\s+html|html|head|body|title|meta|script|style|div|p|h1|"
    rb"table|a|br)\b",
    re.IGNORECASE | re.DOTALL,
)
_BINARY = (
    b"%PDF-",
    b"\x89PNG",
    b"GIF8",
    b"\xff\xd8\xff",
    b"PK\x03\x04",
    b"\x1f\x8b",
    b"RIFF",
    b"ID3",
    b"OggS",
    b"\x7fELF",
)
_BLANK = re.compile(rb"[\s\0]*+")
_DATE = re.compile(
    r"(\d{4})(?:-?(\d\d)(?:-?(\d\d)(?:[T ]?(\d\d):?(\d\d)(?::?(\d\d)(?:[.,](\d{1,9}))?)?\s*(Z|[+-]\d\d:?\d\d)?)?)?)?",
    re.IGNORECASE,
)


def read_warc(
    path: str,
    relative_path: str,
    source: str,
    max_bytes: int,
    log: ReadLog,
    part: FileRange | None = None,
    fingerprint: str | None = None,
) -> Iterator[Page]:
    """The pages of one file, or of a range of it, in file order; other records are counted in ``log``, damage is noted
    there, and the edges of the range when it has been read.
    """
    with storage.open_read(path, fingerprint) as file:
        records = Records(file, path, partial(log.damaged, path), max_bytes, part=part, tick=log.tick)
        for record in records:
            if record.type in PAGE_TYPES:
                yield _page(record, path, relative_path, source, max_bytes)
            else:
                log.other_records[record.type] = log.other_records.get(record.type, 0) + 1
        log.edges = records.edges


def parse_date(text: str | None) -> dt.datetime | None:
    """A WARC-Date (ISO 8601, to any precision) or an ARC date (14 digits) as aware UTC; None if neither."""
    match = _DATE.fullmatch(text.strip()) if text else None
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        moment = dt.datetime(
            int(year),
            int(month or 1),
            int(day or 1),
            int(hour or 0),
            int(minute or 0),
            min(int(second or 0), 59),  # a leap second
            int((fraction or "0")[:6].ljust(6, "0")),
            tzinfo=dt.UTC,
        )
        if zone and zone.upper() != "Z":
            offset = dt.timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
            moment += offset if zone[0] == "-" else -offset
    except (ValueError, OverflowError):
        return None
    return moment


def _page(record: WarcRecord, path: str, relative_path: str, source: str, max_bytes: int) -> Page:
    headers = record.headers
    url = headers.get("uri" if record.is_arc else "warc-target-uri")
    if url is not None:
        url = printable(url.strip())
        if url.startswith("<") and url.endswith(">"):
            url = url[1:-1]
        url = url.replace(" ", "%20") or None  # as warcio does; no URL contains a space
    page = Page(
        source,
        path,
        relative_path,
        record.offset,
        record_offset=record.offset,
        record_length=record.length,
        record_id=headers.get("warc-record-id"),
        url=url,
        fetched_at=parse_date(headers.get("archive-date" if record.is_arc else "warc-date")),
        payload_digest=headers.get("warc-payload-digest"),
    )
    try:
        page.fault = _fill(page, record, max_bytes)
    except MemoryError:
        page.fault = OUT_OF_MEMORY
    return page


def _fill(page: Page, record: WarcRecord, max_bytes: int) -> str | None:
    """Set media, charset and raw; the fault if there is no usable text."""
    if record.damaged:
        return "read.damaged"
    content_type = record.headers.get("content-type")
    http = _http(record, content_type)
    if http is not None:
        content_type = http.headers.get("content-type")
        if http.status not in (None, 200):
            return "read.http_status"
    if record.too_large:
        return "read.too_large"
    identified = _mime(record.headers.get("warc-identified-payload-type"))
    claimed = identified or _mime(content_type)
    if claimed and claimed not in (*_HTML, *_VAGUE):
        return "read.not_text"
    body = record.block if http is None else record.block[http.body_start :]
    try:
        payload = decoded_payload(body, http.headers if http else {}, max_bytes)
    except TooLarge:
        return "read.too_large"
    if _BLANK.fullmatch(payload):
        return "read.empty"
    media = _media(identified, claimed, payload, record.type)
    if media is None:
        return "read.not_text"
    page.media = media
    decoded = decode(payload, header_charset(content_type), media == "html")
    if decoded is None:
        return "read.undecodable"
    text, page.charset = decoded
    if not text or text.isspace():
        return "read.empty"
    page.raw = text
    return None


def _http(record: WarcRecord, content_type: str | None) -> HttpResponse | None:
    """The HTTP response a record holds, or None where its block is the payload itself."""
    if record.type != "response" or not record.block:
        return None
    is_http = record.block[:5].upper() == b"HTTP/" or (content_type or "").lower().startswith("application/http")
    return parse_response(record.block) if is_http else None


def _mime(value: str | None) -> str:
    return value.split(";")[0].strip().lower() if value else ""


def _media(identified: str, claimed: str, payload: bytes, record_type: str) -> Media | None:
    """``html`` or ``text``, None for neither. A type the crawler identified is trusted; a server's claim is checked."""
    if identified in _HTML:
        return "html"
    if payload.startswith(_BINARY):
        return None
    if claimed in _HTML:
        return "html"
    if claimed == "text/plain" and (identified or record_type == "conversion"):
        return "text"
    if _LOOKS_HTML.match(payload, 0, 16 << 10):
        return "html"
    if claimed == "text/plain":
        return "text"
    return None
