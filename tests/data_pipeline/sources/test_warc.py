"""One page for each page-carrying record, with its identity, media, text or fault."""

from __future__ import annotations

import datetime as dt
import gzip
import io
from pathlib import Path

import brotli
import pytest
from warcio.archiveiterator import ArchiveIterator

from quern.data_pipeline.sources import ReadLog, SourceConfig, plan, read
from quern.data_pipeline.sources.warc import parse_date
from quern.errors import InputError
from support.data_pipeline.sources_warc_files import HTML, many, pages, read_bytes, record, whole
from support.named_cases import with_each


def only(folder: Path, content: bytes, **settings: object):  # type: ignore[no-untyped-def]
    found = read_bytes(folder, content, **settings)
    assert len(found) == 1
    return found[0]


def test_a_page_carries_the_identity_its_record_states(tmp_path: Path) -> None:
    made = record(warc={"WARC-Date": "2024-05-06T07:08:09Z", "WARC-Record-ID": "<urn:uuid:1>"})
    page = only(tmp_path, made)
    stated = next(iter(ArchiveIterator(io.BytesIO(made)))).rec_headers
    assert page.record_id == "<urn:uuid:1>"
    assert page.url == "http://example.com/a"
    assert page.fetched_at == dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)
    assert page.payload_digest == stated.get_header("WARC-Payload-Digest")
    assert (page.source, page.relative_path, page.source_file) == ("crawl", "x.warc.gz", str(tmp_path / "x.warc.gz"))
    assert (page.position, page.record_offset, page.record_length) == (0, 0, len(made))
    assert (page.media, page.charset, page.raw, page.fault) == ("html", "utf-8", HTML.decode(), None)


def test_offset_and_length_of_a_gzip_member_give_the_record_back(tmp_path: Path) -> None:
    content = b"".join([record(kind="request"), *many(5), record(kind="metadata", body=b"x: y"), *many(2)])
    found = read_bytes(tmp_path, content)
    assert len(found) == 7
    for page in found:
        assert page.record_offset is not None
        assert page.record_length is not None
        member = gzip.decompress(content[page.record_offset : page.record_offset + page.record_length])
        again = next(iter(ArchiveIterator(io.BytesIO(member))))
        assert again.rec_headers.get_header("WARC-Record-ID") == page.record_id
        assert again.content_stream().read().decode() == page.raw


@pytest.mark.parametrize("pack", [b"".join, whole], ids=["plain", "one gzip member"])
def test_offset_and_length_in_the_stream_give_the_record_back(tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
    records = many(5, compress=False)
    found = read_bytes(tmp_path, pack(records))
    stream = b"".join(records)
    assert [page.position for page in found] == [stream.index(one) for one in records]
    for page, one in zip(found, records, strict=True):
        assert stream[page.record_offset : page.record_offset + page.record_length] == one.removesuffix(b"\r\n\r\n")


def test_only_page_carrying_records_are_pages_and_the_rest_is_counted(tmp_path: Path) -> None:
    log = ReadLog()
    kinds = ["warcinfo", "request", "response", "metadata", "revisit", "resource", "conversion", "request"]
    content = b"".join(record(b"some text", kind=kind, content_type="text/plain") for kind in kinds)
    assert len(read_bytes(tmp_path, content, log)) == 3
    assert log.other_records == {"warcinfo": 1, "request": 2, "metadata": 1, "revisit": 1}
    assert log.damage == []


def test_two_records_with_equal_bytes_are_two_pages_with_two_ids(tmp_path: Path) -> None:
    one = record()
    found = read_bytes(tmp_path, one + one)
    assert len({page.doc_id for page in found}) == 2


@pytest.mark.parametrize(
    ("status", "fault"),
    [("200 OK", None), ("200", None), ("404 Not Found", "read.http_status"), ("301", "read.http_status"), ("OK", None)],
)
def test_only_status_200_is_read(tmp_path: Path, status: str, fault: str | None) -> None:
    assert only(tmp_path, record(status=status)).fault == fault


PDF = b"%PDF-1.4 ..."


@pytest.mark.parametrize(
    ("identified", "content_type", "body", "expected"),
    [
        ("text/html", "image/png", HTML, "html"),
        ("application/xhtml+xml", None, HTML, "html"),
        ("text/plain", None, HTML, "text"),
        ("application/pdf", "text/html", HTML, "read.not_text"),
        ("application/json", "text/html", b"{}", "read.not_text"),
        (None, "text/html; charset=utf-8", b"no tags", "html"),
        (None, "TEXT/HTML", b"no tags", "html"),
        (None, "text/html", PDF, "read.not_text"),
        (None, "text/plain", b"just words", "text"),
        (None, "text/plain", b" <!-- x --> <!DOCTYPE HTML><p>", "html"),
        (None, "text/css", b"a {}", "read.not_text"),
        (None, "application/json", b"{}", "read.not_text"),
        (None, None, HTML, "html"),
        (None, None, b"\n\n<HTML>", "html"),
        (None, None, b"words without a type", "read.not_text"),
        (None, "application/octet-stream", HTML, "html"),
        (None, "application/octet-stream", b"\x00\x01", "read.not_text"),
        (None, "text/xml", b'<?xml version="1.0"?><html xmlns="x">', "html"),
        (None, "text/xml", b'<?xml version="1.0"?><rss>', "read.not_text"),
    ],
)
def test_media_is_what_was_identified_else_claimed_else_seen(
    tmp_path: Path, identified: str | None, content_type: str | None, body: bytes, expected: str
) -> None:
    page = only(
        tmp_path,
        record(
            body,
            http={"Content-Type": content_type} if content_type else {"X": "y"},
            warc={"WARC-Identified-Payload-Type": identified} if identified else None,
        ),
    )
    assert (page.fault or page.media) == expected


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"", "read.empty"),
        (b" \r\n\0 ", "read.empty"),
        (b"\xff\xfb\x90\x00" + bytes((i * 167 + i // 7 * 31) % 256 for i in range(4000)), "read.undecodable"),
    ],
)
def test_a_page_without_text_keeps_its_identity(tmp_path: Path, body: bytes, fault: str) -> None:
    page = only(tmp_path, record(body))
    assert (page.fault, page.raw) == (fault, "")
    assert page.url == "http://example.com/a"
    assert page.record_id is not None
    assert page.record_length is not None


def test_nul_is_not_text(tmp_path: Path) -> None:
    assert only(tmp_path, record(b"<html>a\0b")).raw == "<html>ab"


@pytest.mark.parametrize("compress", [True, False])
def test_a_payload_above_the_bound_is_too_large_and_the_next_record_is_found(tmp_path: Path, compress: bool) -> None:
    content = b"".join([record(b"x" * (1 << 20), compress=compress), *many(2, compress=compress)])
    found = read_bytes(tmp_path, content, max_bytes=10_000)
    assert [page.fault for page in found] == ["read.too_large", None, None]
    assert found[0].raw == ""
    assert [page.url for page in found[1:]] == ["http://e.com/0", "http://e.com/1"]


def test_chunked_and_compressed_payloads_are_undone(tmp_path: Path) -> None:
    body = brotli.compress(HTML)
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    http = {"Content-Type": "text/html", "Transfer-Encoding": "chunked", "Content-Encoding": "br"}
    assert only(tmp_path, record(chunked, http=http)).raw == HTML.decode()


@pytest.mark.slow
def test_a_gzip_bomb_is_too_large(tmp_path: Path) -> None:
    http = {"Content-Type": "text/html", "Content-Encoding": "gzip"}
    assert only(tmp_path, record(gzip.compress(bytes(64 << 20)), http=http)).fault == "read.too_large"


def test_the_charset_of_the_http_header_and_of_meta_are_used(tmp_path: Path) -> None:
    words = "Grüße aus Köln, schöne Häuser. " * 20
    page = only(tmp_path, record(words.encode("cp1252"), http={"Content-Type": "text/html; charset=iso-8859-1"}))
    assert (page.raw, page.charset) == (words, "windows-1252")
    greek = "Καλημέρα, ο καιρός είναι καλός. " * 20
    page = only(tmp_path, record(b"<meta charset=iso-8859-7>" + greek.encode("iso8859_7")))
    assert (page.raw, page.charset) == ("<meta charset=iso-8859-7>" + greek, "iso-8859-7")


def test_angle_brackets_and_spaces_in_a_url(tmp_path: Path) -> None:
    plain = record(compress=False).replace(b"http://example.com/a", b"<http://example.com/a b>")
    assert only(tmp_path, plain).url == "http://example.com/a%20b"


def test_a_record_without_a_url_is_a_page_all_the_same(tmp_path: Path) -> None:
    plain = record(compress=False).replace(b"WARC-Target-URI: http://example.com/a\r\n", b"")
    page = only(tmp_path, plain)
    assert (page.url, page.fault, page.raw) == (None, None, HTML.decode())


def test_a_wet_record_is_utf8_text(tmp_path: Path) -> None:
    text = "Grüße\nund mehr Text <html> als Text."
    made = record(text.encode(), kind="conversion", content_type="text/plain")
    page = only(tmp_path, made, kind="wet")
    assert (page.media, page.raw, page.charset, page.url) == ("text", text, "utf-8", "http://example.com/a")


def test_a_resource_record_is_its_payload(tmp_path: Path) -> None:
    assert only(tmp_path, record(kind="resource", content_type="text/html")).raw == HTML.decode()


ARC_BLOCK = b"1 0 Test\nURL IP-address Archive-date Content-type Archive-length\n\n"
ARC = b"filedesc://x.arc 0.0.0.0 20140301000000 text/plain %d\n%b\n" % (len(ARC_BLOCK), ARC_BLOCK)


def arc_document(number: int, body: bytes) -> bytes:
    block = b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n" + body
    return b"http://e.com/%d 1.2.3.4 20140102030405 text/html %d\n%b\n" % (number, len(block), block)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("compress", [False, True])
def test_arc_documents_are_pages(tmp_path: Path, compress: bool, version: int) -> None:
    documents = [arc_document(i, b"<html>%d</html>" % i) for i in range(3)]
    if version == 2:
        documents = [one.replace(b" text/html ", b" text/html 200 - - 0 x.arc ", 1) for one in documents]
    content = b"".join(gzip.compress(one) if compress else one for one in [ARC, *documents])
    log = ReadLog()
    found = read_bytes(tmp_path, content, log)
    assert [page.url for page in found] == [f"http://e.com/{i}" for i in range(3)]
    assert [page.raw for page in found] == [f"<html>{i}</html>" for i in range(3)]
    assert {page.fetched_at for page in found} == {dt.datetime(2014, 1, 2, 3, 4, 5, tzinfo=dt.UTC)}
    assert log.other_records == {"arc_header": 1}
    assert log.damage == []


@with_each(
    ("2024-05-06T07:08:09Z", (2024, 5, 6, 7, 8, 9, 0)),
    ("2024-05-06T07:08:09.123456789Z", (2024, 5, 6, 7, 8, 9, 123456)),
    ("2024-05-06T07:08:09+02:00", (2024, 5, 6, 5, 8, 9, 0)),
    ("2024-05-06T07:08Z", (2024, 5, 6, 7, 8, 0, 0)),
    ("2024-05-06", (2024, 5, 6, 0, 0, 0, 0)),
    ("2024-05", (2024, 5, 1, 0, 0, 0, 0)),
    ("2024", (2024, 1, 1, 0, 0, 0, 0)),
    ("20240506070809", (2024, 5, 6, 7, 8, 9, 0)),
    ("2024-13-06T07:08:09Z", None),
    ("2023-02-29T00:00:00Z", None),
    ("0001-01-01T00:00:00+23:59", None),
    ("yesterday", None),
    ("", None),
    (None, None),
)
def test_dates_are_read_to_any_precision(text: str | None, expected: tuple[int, ...] | None) -> None:
    assert parse_date(text) == (dt.datetime(*expected, tzinfo=dt.UTC) if expected else None)  # type: ignore[arg-type, misc]


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.warc.gz").write_bytes(record())
    source = SourceConfig(name="crawl", kind="warc", paths=str(tmp_path / "x.warc.gz"))
    partition = plan(source)[0]
    (tmp_path / "x.warc.gz").unlink()
    with pytest.raises(InputError, match=r"source crawl: .*x\.warc\.gz: no such file"):
        list(read(source, partition, ReadLog()))


def test_reading_twice_gives_the_same_pages(tmp_path: Path) -> None:
    (tmp_path / "x.warc.gz").write_bytes(b"".join(many(4)))
    assert [page.doc_id for page in pages(tmp_path / "x.warc.gz")] == [
        page.doc_id for page in pages(tmp_path / "x.warc.gz")
    ]


def test_a_file_on_another_store_reads_the_same(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    content = b"".join(many(3))
    fs.pipe("/bucket/x.warc.gz", content)
    try:
        remote = SourceConfig(name="crawl", kind="warc", paths="memory://bucket/*.gz")
        found = [page for partition in plan(remote) for page in read(remote, partition, ReadLog())]
        assert [(p.doc_id, p.raw) for p in found] == [(p.doc_id, p.raw) for p in read_bytes(tmp_path, content)]
    finally:
        fs.rm("/bucket", recursive=True)


@pytest.mark.parametrize("unit", [b"<!---->", b"<!-- ", b" ", b"<?xml ", b"\n", b"a:b 1.2.3.4 ", b"WARC/1.0\r\n"])
def test_hostile_payloads_end(tmp_path: Path, unit: bytes) -> None:
    body = (unit * 400_000)[:2_000_000]
    assert len(read_bytes(tmp_path, record(body, http={"X": "y"}, compress=False))) == 1
