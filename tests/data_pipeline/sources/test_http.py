"""HTTP payloads: chunks and content codings, real and claimed, and bombs."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.sources.http import TooLarge, dechunk, decoded_payload, parse_response
from support.named_cases import with_each

TEXT = b"<html><body>" + b"Some text, and some more of it. " * 500 + b"</body></html>"
LIMIT = 1 << 20


def chunked(body: bytes, size: int) -> bytes:
    chunks = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nTrailer: x\r\n\r\n"


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(body) + compressor.flush()


CODINGS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


@with_each(*CODINGS)
def test_each_content_coding_is_undone(coding: str) -> None:
    assert decoded_payload(CODINGS[coding](TEXT), {"content-encoding": coding.upper()}, LIMIT) == TEXT


def test_bare_deflate_is_undone_as_well() -> None:
    assert decoded_payload(raw_deflate(TEXT), {"content-encoding": "deflate"}, LIMIT) == TEXT


def test_codings_are_undone_in_reverse_and_below_the_chunks() -> None:
    body = chunked(gzip.compress(brotli.compress(TEXT)), 100)
    headers = {"content-encoding": "br, gzip", "transfer-encoding": "Chunked"}
    assert decoded_payload(body, headers, LIMIT) == TEXT


def test_gzip_of_several_members_is_read_whole() -> None:
    body = gzip.compress(TEXT) + gzip.compress(b"more")
    assert decoded_payload(body, {"content-encoding": "gzip"}, LIMIT) == TEXT + b"more"


@pytest.mark.parametrize("coding", [*CODINGS, "identity", "none", "utf-8", ""])
def test_a_payload_that_is_stored_decoded_is_taken_as_it_is(coding: str) -> None:
    assert decoded_payload(TEXT, {"content-encoding": coding}, LIMIT) == TEXT


@pytest.mark.slow
@with_each(*CODINGS)
def test_a_cut_payload_gives_its_beginning(coding: str) -> None:
    body = random.Random(1).randbytes(300_000).hex().encode()
    encoded = CODINGS[coding](body)
    decoded = decoded_payload(encoded[: len(encoded) - 20], {"content-encoding": coding}, LIMIT)
    assert body.startswith(decoded)
    assert len(decoded) > len(body) // 2


@given(st.binary(max_size=5000), st.integers(1, 700))
def test_chunks_are_joined(body: bytes, size: int) -> None:
    assert dechunk(chunked(body, size)) == body


@with_each(TEXT, b"", b"abc", b"\r\n\r\n", b"zz\r\n", b"-5\r\nabcde\r\n0\r\n\r\n", b"5\r\nabcdeX")
def test_what_is_not_chunked_is_taken_as_it_is(body: bytes) -> None:
    assert dechunk(body) == body


def test_a_cut_last_chunk_counts() -> None:
    assert dechunk(b"5\r\nabcde\r\nff\r\nxyz") == b"abcdexyz"
    assert dechunk(b"5 \r\nabcde\r\n0\r\n") == b"abcde"


def bomb(coding: str, size: int) -> bytes:
    """``size`` zero bytes, made without holding them."""
    piece = bytes(1 << 20)
    out = io.BytesIO()
    if coding == "gzip":
        with gzip.GzipFile(fileobj=out, mode="wb") as file:
            for _ in range(size >> 20):
                file.write(piece)
    elif coding == "deflate":
        compressor = zlib.compressobj()
        for _ in range(size >> 20):
            out.write(compressor.compress(piece))
        out.write(compressor.flush())
    elif coding == "br":
        compressor_br = brotli.Compressor(quality=1)
        for _ in range(size >> 20):
            out.write(compressor_br.process(piece))
        out.write(compressor_br.finish())
    else:
        with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
            for _ in range(size >> 20):
                writer.write(piece)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_a_bomb_costs_bounded_memory(coding: str) -> None:
    body = bomb(coding, 64 << 20)
    assert len(body) < 2 << 20
    tracemalloc.start()
    with pytest.raises(TooLarge):
        decoded_payload(body, {"content-encoding": coding}, LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * LIMIT


@pytest.mark.slow
def test_a_bomb_in_a_bomb_costs_bounded_memory() -> None:
    inner = gzip.compress(bomb("gzip", 64 << 20))
    with pytest.raises(TooLarge):
        decoded_payload(inner, {"content-encoding": "gzip, gzip"}, LIMIT)


def test_millions_of_empty_members_end() -> None:
    assert decoded_payload(gzip.compress(b"") * 100_000, {"content-encoding": "gzip"}, LIMIT << 3) is not None


def test_the_bound_itself_is_allowed() -> None:
    body = bytes(LIMIT)
    assert decoded_payload(body, {}, LIMIT) == body
    assert decoded_payload(gzip.compress(body), {"content-encoding": "gzip"}, LIMIT) == body
    with pytest.raises(TooLarge):
        decoded_payload(gzip.compress(body + b"x"), {"content-encoding": "gzip"}, LIMIT)
    with pytest.raises(TooLarge):
        decoded_payload(body + b"x", {}, LIMIT)


@with_each(
    (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\nbody", 200, "text/html", b"body"),
    (b"HTTP/1.1 404\r\nA: b\r\n\r\n", 404, None, b""),
    (b"HTTP/1.0 200 OK\nCONTENT-TYPE:text/plain\n\nx\n\ny", 200, "text/plain", b"x\n\ny"),
    (b"HTTP/1.0 200 OK\r\nContent-Type: a\r\n continued\r\n\r\nz", 200, "acontinued", b"z"),
    (b"HTTP/2 301 \r\n\r\n", 301, None, b""),
    (b"HTTP/1.1 OK\r\n\r\nx", None, None, b"x"),
    (b"HTTP/1.1 200 OK\r\nContent-Type: first\r\nContent-Type: second\r\n\r\n", 200, "first", b""),
    (b"HTTP/1.1 200 OK\r\nno colon\r\nContent-Type: t\r\n\r\nx", 200, "t", b"x"),
    (b"HTTP/1.1 200 OK", 200, None, b""),
)
def test_status_headers_and_payload_are_told_apart(
    block: bytes, status: int | None, content_type: str | None, payload: bytes
) -> None:
    response = parse_response(block)
    assert response.status == status
    assert (response.headers.get("content-type") or "").replace(" ", "") == (content_type or "")
    assert block[response.body_start :] == payload
