"""Writes WARC files in CommonCrawl's layout: one gzip member per record; a request and a response per page."""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from quern.demo.kinds import Draft

__all__ = ["warc_file"]


def warc_file(name: str, pages: Sequence[tuple[str, Draft]], seed: int) -> tuple[bytes, list[str]]:
    """The file's bytes, which depend on nothing but the arguments, and the record id of each response. ``pages``: each
    with its WARC-Date, ISO 8601 in UTC with seconds."""
    file, ids = io.BytesIO(), []
    writer = WARCWriter(file, gzip=True)

    def write(kind: str, key: object, url: str, date: str, http: StatusAndHeaders | None, payload: bytes) -> str:
        made = uuid.uuid5(uuid.NAMESPACE_URL, f"https://sample.example/{seed}/{name}/{key}/{kind}")
        headers = {"WARC-Record-ID": f"<urn:uuid:{made}>", "WARC-Date": date}
        body = io.BytesIO(payload)
        writer.write_record(
            writer.create_warc_record(url, kind, payload=body, http_headers=http, warc_headers_dict=headers)
        )
        return headers["WARC-Record-ID"]

    about = f"software: quern sample site\r\nfilename: {name}\r\nisPartOf: QUERN-SAMPLE\r\n".encode()
    write("warcinfo", "", "", pages[0][0] if pages else "2024-03-01T00:00:00Z", None, about)
    for number, (date, page) in enumerate(pages):
        parts, payload = urlsplit(page.url), page.html.encode(page.charset, "xmlcharrefreplace")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        asked = StatusAndHeaders(f"GET {target} HTTP/1.1", [("Host", parts.netloc)], is_http_request=True)
        write("request", number, page.url, date, asked, b"")
        fields = [("Content-Type", page.content_type), ("Content-Length", str(len(payload)))]
        answer = StatusAndHeaders(page.status, fields, protocol="HTTP/1.1")
        ids.append(write("response", number, page.url, date, answer, payload))
    return file.getvalue(), ids
