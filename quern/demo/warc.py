"""Writes WARC files in CommonCrawl's layout: one gzip member per record; request, response and metadata per page.

Written with the standard library, so that the bytes depend on nothing but the pages (ISO 28500; RFC 1952).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import uuid
import zlib
from dataclasses import dataclass, field
from urllib.parse import urlsplit

__all__ = ["Response", "http_block", "record", "warc_file"]


@dataclass(frozen=True)
class Response:
    """What a server answered: status line, headers, payload as it travels."""

    url: str
    date: str
    """WARC-Date, ISO 8601 in UTC with seconds."""
    payload: bytes
    status: str = "200 OK"
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/html; charset=utf-8"),)
    delivery: str = "plain"
    """``plain``, ``gzip`` (content encoding) or ``chunked`` (transfer encoding)."""
    media: str = field(default="text/html")


def record_id(*key: object) -> str:
    """``<urn:uuid:…>`` that depends on ``key`` alone (a version 5 UUID)."""
    return f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, 'https://sample.example/' + '/'.join(map(str, key)))}>"


def _chunked(body: bytes, size: int = 997) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def _sha1(data: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(data, usedforsecurity=False).digest()).decode()


def http_block(response: Response, quirk: int | None = None) -> tuple[bytes, bytes]:
    """The HTTP message and its body, both as on the wire.

    ``quirk`` picks one of the liberties that servers take with RFC 9112: bare line feeds, lower-case names, no reason
    phrase, a folded header.
    """
    body, headers = response.payload, list(response.headers)
    if response.delivery == "gzip":
        body = gzip.compress(body, mtime=0)
        headers.append(("Content-Encoding", "gzip"))
    if response.delivery == "chunked":
        body = _chunked(body)
        headers.append(("Transfer-Encoding", "chunked"))
    else:
        headers.append(("Content-Length", str(len(body))))
    end, status = "\r\n", response.status
    if quirk == 0:
        end = "\n"
    elif quirk == 1:
        headers = [(name.lower(), value + "  ") for name, value in headers]
    elif quirk == 2:
        status = status.split(" ")[0]
    elif quirk == 3:
        headers.append(("X-Served-By", "cache one,\r\n\tcache two"))
    head = f"HTTP/1.1 {status}{end}" + "".join(f"{name}: {value}{end}" for name, value in headers) + end
    return head.encode("latin-1") + body, body


def record(kind: str, block: bytes, headers: list[tuple[str, str]]) -> bytes:
    """One record as one gzip member."""
    lines = [("WARC-Type", kind), *headers, ("Content-Length", str(len(block)))]
    head = "WARC/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines) + "\r\n"
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(head.encode() + block + b"\r\n\r\n") + packer.flush()


def warc_file(name: str, responses: list[Response], seed: int, quirks: bool = False) -> tuple[bytes, list[str]]:
    """The file's bytes, and the record id of each response."""
    date = responses[0].date if responses else "2024-03-01T00:00:00Z"
    info = record_id(seed, name, "warcinfo")
    about = b"software: quern sample site\r\nformat: WARC File Format 1.0\r\nisPartOf: QUERN-SAMPLE\r\n"
    parts = [
        record(
            "warcinfo",
            about,
            [
                ("WARC-Date", date),
                ("WARC-Record-ID", info),
                ("WARC-Filename", name),
                ("Content-Type", "application/warc-fields"),
            ],
        )
    ]
    ids = []
    for number, response in enumerate(responses):
        ids.append(record_id(seed, name, number, "response"))
        block, body = http_block(response, number % 5 if quirks else None)
        place = [("WARC-Date", response.date), ("WARC-Warcinfo-ID", info), ("WARC-Target-URI", response.url)]
        parts.append(_request(record_id(seed, name, number, "request"), response, ids[-1], place))
        parts.append(
            record(
                "response",
                block,
                [
                    ("WARC-Record-ID", ids[-1]),
                    *place,
                    ("WARC-Payload-Digest", _sha1(body)),
                    ("WARC-Block-Digest", _sha1(block)),
                    ("WARC-Identified-Payload-Type", response.media),
                    ("Content-Type", "application/http; msgtype=response"),
                ],
            )
        )
        parts.append(
            record(
                "metadata",
                b"fetchTimeMs: %d\r\n" % (40 + 7 * number % 311),
                [
                    ("WARC-Record-ID", record_id(seed, name, number, "metadata")),
                    *place,
                    ("WARC-Concurrent-To", ids[-1]),
                    ("Content-Type", "application/warc-fields"),
                ],
            )
        )
    return b"".join(parts), ids


def _request(own_id: str, response: Response, concurrent: str, place: list[tuple[str, str]]) -> bytes:
    parts = urlsplit(response.url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    block = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: quern-sample\r\n\r\n".encode()
    return record(
        "request",
        block,
        [
            ("WARC-Record-ID", own_id),
            *place,
            ("WARC-Concurrent-To", concurrent),
            ("Content-Type", "application/http; msgtype=request"),
        ],
    )
