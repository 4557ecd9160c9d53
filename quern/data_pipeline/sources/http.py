"""Parses an HTTP response record: status, headers, and the payload with transfer and content codings decoded.

warcio parses the headers and defines the lenient readings (a payload that is not in the coding its header names is
taken as it is). The decoding is our own, because it must be bounded: a few kilobytes can inflate to gigabytes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO

import brotli
import zstandard
from warcio.recordloader import ArcWarcRecordLoader
from warcio.statusandheaders import StatusAndHeadersParser

__all__ = ["HttpResponse", "TooLarge", "decoded_payload", "parse_response"]

_PARSER = StatusAndHeadersParser(ArcWarcRecordLoader.HTTP_TYPES, verify=False)
_STATUS = re.compile(rb"[^\r\n]{0,40}?[ \t](\d{3})(?!\d)")
_END_OF_HEAD = re.compile(rb"\n[ \t\r]*\n|\A\r?\n")
_MAX_HEAD_BYTES = 256 << 10
_MAX_CODINGS = 4
_STEP = 1 << 16
_GZIP_WBITS = 31
_MAX_MEMBERS = 1000


class TooLarge(Exception):  # noqa: N818 - not an error of the program: a page that asks for more than it may have
    """The decoded payload exceeds the limit."""


@dataclass(frozen=True)
class HttpResponse:
    """``status`` is None where the status line has none; ``headers`` has lower-case names, the first value of each."""

    status: int | None
    headers: dict[str, str] = field(default_factory=dict)
    body_start: int = 0


def parse_response(block: bytes) -> HttpResponse:
    """Status, headers and where the payload starts in ``block``, the content of a response record."""
    end = _END_OF_HEAD.search(block, 0, _MAX_HEAD_BYTES)
    body_start = end.end() if end else len(block)
    head = block[: min(body_start, _MAX_HEAD_BYTES)]
    status = _STATUS.match(head)
    try:
        pairs = _PARSER.parse(BytesIO(head)).headers
    except EOFError:
        pairs = []
    headers = {name.lower(): value for name, value in reversed(pairs)}  # of a repeated name the first stays
    return HttpResponse(int(status.group(1)) if status else None, headers, body_start)


def decoded_payload(body: bytes, headers: dict[str, str], max_bytes: int) -> bytes:
    """``body`` dechunked and decompressed, at most ``max_bytes``.

    A coding that does not fit the bytes is ignored (many archives store the decoded payload under the old header);
    a coded payload that is cut off or broken gives what could be decoded.

    Raises:
        TooLarge: the decoded payload is larger than ``max_bytes``; no more than that was held in memory.
    """
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = dechunk(body)
    codings = [coding.strip().lower() for coding in headers.get("content-encoding", "").split(",")][:_MAX_CODINGS]
    for coding in reversed(codings):
        decoder = _DECODERS.get(coding)
        if decoder is not None and body:
            decoded = decoder(body, max_bytes + 1)
            if decoded is not None:
                body = decoded
            if len(body) > max_bytes:
                raise TooLarge
    if len(body) > max_bytes:
        raise TooLarge
    return body


def dechunk(body: bytes) -> bytes:
    """RFC 9112 chunks joined. What is not chunked, from where it is not, is taken as it is; a cut last chunk counts."""
    parts: list[bytes] = []
    position = 0
    while position < len(body):
        end_of_line = body.find(b"\r\n", position, position + 64)
        try:
            size = int(body[position:end_of_line].split(b";")[0], 16) if end_of_line >= 0 else -1
        except ValueError:
            size = -1
        start = end_of_line + 2
        if size < 0:
            parts.append(body[position:])
            break
        if size == 0:
            break
        rest = start + size
        if rest < len(body) and body[rest : rest + 2] != b"\r\n":
            parts.append(body[start:] if parts else body[position:])
            break
        parts.append(body[start:rest])
        position = rest + 2
    return b"".join(parts)


def _deflate(body: bytes, limit: int) -> bytes | None:
    """``deflate`` is zlib by the standard and bare deflate by some servers."""
    decoded = _zlib(body, limit, 15)
    return decoded if decoded is not None else _zlib(body, limit, -15)


def _zlib(body: bytes, limit: int, wbits: int) -> bytes | None:
    out = bytearray()
    position: int | None = 0
    for _ in range(_MAX_MEMBERS if wbits == _GZIP_WBITS else 1):
        if position is None or position >= len(body) or len(out) >= limit:
            break
        position = _pump(zlib.decompressobj(wbits), body, position, out, limit)
    return bytes(out) if out else None


def _pump(decompressor: zlib._Decompress, body: bytes, position: int, out: bytearray, limit: int) -> int | None:
    """Append what the member at ``position`` gives, up to ``limit``; where it ends, or None if it is broken or cut."""
    pending = b""
    while len(out) < limit:
        if not pending:
            pending = body[position : position + _STEP]
            position += len(pending)
        try:
            piece = decompressor.decompress(pending, limit - len(out))
        except zlib.error:
            return None
        out += piece
        if decompressor.eof:
            return position - len(decompressor.unused_data)
        pending = decompressor.unconsumed_tail
        if not piece and not pending and position >= len(body):
            return None
    return None


def _brotli(body: bytes, limit: int) -> bytes | None:
    decompressor = brotli.Decompressor()
    out = bytearray()
    position = 0
    try:
        while len(out) < limit and not decompressor.is_finished():
            data = b""
            if decompressor.can_accept_more_data():
                data = body[position : position + _STEP]
                position += len(data)
            piece = decompressor.process(data, output_buffer_limit=min(_STEP, limit - len(out)))
            out += piece
            if not piece and not data and position >= len(body):
                break
    except brotli.error:
        pass
    return bytes(out) if out else None


def _zstd(body: bytes, limit: int) -> bytes | None:
    out = bytearray()
    try:
        # RFC 8878 asks decoders to support windows of 8 MiB; RFC 9659 makes that the bound for the content coding.
        with zstandard.ZstdDecompressor(max_window_size=8 << 20).stream_reader(body, read_across_frames=True) as reader:
            while len(out) < limit and (piece := reader.read(min(_STEP, limit - len(out)))):
                out += piece
    except zstandard.ZstdError:
        pass
    return bytes(out) if out else None


_DECODERS: dict[str, Callable[[bytes, int], bytes | None]] = {
    "gzip": partial(_zlib, wbits=_GZIP_WBITS),
    "x-gzip": partial(_zlib, wbits=_GZIP_WBITS),
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
