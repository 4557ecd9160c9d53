"""Fills a page from the fields of a row, in the same way for JSON lines and Parquet."""

from __future__ import annotations

import datetime as dt
import email.utils
import re
import uuid
from collections.abc import Mapping

from quern.data_pipeline.page.document import Page
from quern.data_pipeline.page.url import MAX_CHARS
from quern.data_pipeline.sources.charset import printable
from quern.data_pipeline.sources.log import ReadLog
from quern.data_pipeline.sources.plan import SourceConfig
from quern.data_pipeline.sources.warc import parse_date

__all__ = ["fill"]

#: Seconds since 1970 do not reach this before the year 5138, milliseconds did in 1973.
_MILLISECONDS_FROM = 1e11
#: Dates of RFC 1123 and 2822, as HTTP and e-mail write them; the zones are those that ``email.utils`` knows.
_RFC = re.compile(
    r"(?:[a-z]{3,9},? {1,3})?\d{1,2}[ -][a-z]{3}[ -]\d{4} \d\d:\d\d(?::\d\d)?"
    r"(?: {1,3}(?:[+-]\d{4}|UTC?|GMT|Z|[ECMP][SD]T))?",
    re.IGNORECASE,
)
#: Ten digits that are a date and an hour.
_HOUR = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:[01]\d|2[0-3])")
#: Digits of as many places as no calendar date has but that one.
_SECONDS = re.compile(r"(?:\d{9,11}|\d{13})(?:\.\d{1,9})?")


def fill(page: Page, source: SourceConfig, row: Mapping[str, object], log: ReadLog) -> None:
    """Set ``record_id``, ``url``, ``fetched_at``, ``charset`` and ``raw`` from ``row``, and the fault.

    A URL or date that is there and cannot be read is counted in ``log``. A text that is ``bytes`` could not be decoded.
    """
    identity = row.get(source.id_field) if source.id_field else None
    if isinstance(identity, str | int | uuid.UUID) and not isinstance(identity, bool):
        page.record_id = printable(str(identity)[:MAX_CHARS])
    url = row.get(source.url_field) if source.url_field else None
    if isinstance(url, str) and url.strip():
        page.url = printable(url.strip())
    log.unreadable_urls += url is not None and not isinstance(url, str)
    date = row.get(source.date_field) if source.date_field else None
    page.fetched_at = _moment(date)
    log.unreadable_dates += date is not None and page.fetched_at is None and date != ""
    if source.text_field not in row:
        page.fault = "read.no_field"
        return
    value = row[source.text_field]
    text = printable(value) if isinstance(value, str) else ""
    if value is None:
        page.fault = "read.null_text"
    elif isinstance(value, bytes):
        page.fault = "read.undecodable"
    elif not isinstance(value, str):
        page.fault = "read.wrong_type"
    elif not text or text.isspace():
        page.fault = "read.empty"
    elif len(text.encode("utf-8")) > source.max_bytes:
        page.fault = "read.too_large"
    else:
        page.raw, page.charset = text, "utf-8"


def _moment(value: object) -> dt.datetime | None:
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value.astimezone(dt.UTC)
    if isinstance(value, dt.date):
        return dt.datetime(value.year, value.month, value.day, tzinfo=dt.UTC)
    if isinstance(value, str):
        return parse_date(value) or _told_otherwise(value.strip())
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return dt.datetime.fromtimestamp(value / 1000 if abs(value) >= _MILLISECONDS_FROM else value, dt.UTC)
        except (ValueError, OverflowError, OSError):
            return None
    return None


def _told_otherwise(text: str) -> dt.datetime | None:
    """The moment of a date in words, or of seconds or milliseconds since 1970 in digits."""
    if _HOUR.fullmatch(text):
        return None  # its zone is unknown; as seconds it would be of the years 2030 to 2036
    if _SECONDS.fullmatch(text):
        return _moment(float(text) if "." in text else int(text))
    try:
        return _moment(email.utils.parsedate_to_datetime(text)) if _RFC.fullmatch(text) else None
    except (ValueError, OverflowError):
        return None
