"""A row's fields into a page: the same reading for JSON lines and Parquet."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from quern.data_pipeline.document import Page
from quern.data_pipeline.sources.charset import printable
from quern.data_pipeline.sources.plan import SourceConfig
from quern.data_pipeline.sources.warc import parse_date

__all__ = ["fill"]

#: Seconds since 1970 do not reach this before the year 5138, milliseconds did in 1973.
_MILLISECONDS_FROM = 1e11


def fill(page: Page, source: SourceConfig, row: Mapping[str, object]) -> None:
    """Set ``record_id``, ``url``, ``fetched_at``, ``charset`` and ``raw`` from ``row``, and the fault.

    A text that is ``bytes`` is one that could not be decoded.
    """
    identity = row.get(source.id_field) if source.id_field else None
    if isinstance(identity, str | int) and not isinstance(identity, bool):
        page.record_id = printable(str(identity))
    url = row.get(source.url_field) if source.url_field else None
    if isinstance(url, str) and url.strip():
        page.url = printable(url.strip())
    page.fetched_at = _moment(row.get(source.date_field)) if source.date_field else None
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
        return parse_date(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return dt.datetime.fromtimestamp(value / 1000 if abs(value) >= _MILLISECONDS_FROM else value, dt.UTC)
        except (ValueError, OverflowError, OSError):
            return None
    return None
