"""Writes WARC files in CommonCrawl's layout: one gzip member per record; a request and a response per page."""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

__all__ = ["Response", "warc_file"]


@dataclass(frozen=True)
class Response:
    """What a server answered."""

    url: str
    date: str
    """WARC-Date, ISO 8601 in UTC with seconds."""
    payload: bytes
    status: str = "200 OK"
    content_type: str = "text/html; charset=utf-8"


def warc_file(name: str, responses: Sequence[Response], seed: int) -> tuple[bytes, list[str]]:
    """The file's bytes, which depend on nothing but the arguments, and the record id of each response."""
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
    write("warcinfo", "", "", responses[0].date if responses else "2024-03-01T00:00:00Z", None, about)
    for number, response in enumerate(responses):
        parts = urlsplit(response.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        asked = StatusAndHeaders(f"GET {target} HTTP/1.1", [("Host", parts.netloc)], is_http_request=True)
        write("request", number, response.url, response.date, asked, b"")
        fields = [("Content-Type", response.content_type), ("Content-Length", str(len(response.payload)))]
        answer = StatusAndHeaders(response.status, fields, protocol="HTTP/1.1")
        ids.append(write("response", number, response.url, response.date, answer, response.payload))
    return file.getvalue(), ids
