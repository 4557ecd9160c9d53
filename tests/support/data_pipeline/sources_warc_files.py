"""WARC files for the tests, written by warcio."""

from __future__ import annotations

import gzip
import io
import random
from pathlib import Path

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from quern.data_pipeline.page.document import Page
from quern.data_pipeline.sources import FileRange, Partition, ReadLog, SourceConfig, misread, plan, read
from quern.data_pipeline.sources.containers.ranges import cut

HTML = b"<!doctype html><html><head><title>t</title></head><body><p>Some words on a page.</p></body></html>"


def record(
    body: bytes = HTML,
    *,
    kind: str = "response",
    url: str = "http://example.com/a",
    status: str = "200 OK",
    http: dict[str, str] | None = None,
    warc: dict[str, str] | None = None,
    content_type: str | None = None,
    compress: bool = True,
) -> bytes:
    """One record as bytes: a gzip member, or plain."""
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=compress)
    pairs = list(({"Content-Type": "text/html"} if http is None else http).items())
    http_headers = None
    if kind in ("response", "revisit"):
        http_headers = StatusAndHeaders(status, pairs, protocol="HTTP/1.1")
    elif kind == "request":
        http_headers = StatusAndHeaders("/ HTTP/1.1", pairs, protocol="GET", is_http_request=True)
    made = writer.create_warc_record(
        url,
        kind,
        payload=io.BytesIO(body),
        http_headers=http_headers,
        warc_headers_dict={"WARC-Date": "2024-01-01T00:00:00Z", "WARC-Record-ID": f"<urn:x:{kind}:{url}>"}
        | (warc or {}),
        warc_content_type=content_type or "",
    )
    writer.write_record(made)
    return out.getvalue()


def many(count: int, *, compress: bool = True) -> list[bytes]:
    """``count`` records, each a page of its own."""
    return [
        record(b"<html><body>" + b"page %d " % i * 400 + b"</body></html>", url=f"http://e.com/{i}", compress=compress)
        for i in range(count)
    ]


def random_texts(count: int) -> list[str]:
    """Texts that do not compress well, so that damage in the middle of a file is damage in the middle of its texts."""
    source = random.Random(5)
    return [source.randbytes(300).hex() for _ in range(count)]


def pages(path: Path, log: ReadLog | None = None, **settings: object) -> list[Page]:
    """Every page of one file."""
    source = SourceConfig.model_validate({"name": "crawl", "kind": "warc", "paths": str(path)} | settings)
    log = log if log is not None else ReadLog()
    return [page for partition in plan(source) for page in read(source, partition, log)]


def read_bytes(
    folder: Path, content: bytes, log: ReadLog | None = None, name: str = "x.warc.gz", **settings: object
) -> list[Page]:
    """Every page of a file with this content."""
    path = folder / name
    path.write_bytes(content)
    return pages(path, log, **settings)


def whole(records: list[bytes]) -> bytes:
    """Plain records in a single gzip member."""
    return gzip.compress(b"".join(records))


def in_ranges(path: Path, split_bytes: int, log: ReadLog | None = None, **settings: object) -> tuple[list[Page], int]:
    """Every page of one file read in ranges, put right as a run does it; and how many ranges were read again."""
    source = SourceConfig.model_validate({"name": "crawl", "kind": "warc", "paths": str(path)} | settings)
    (whole,) = plan(source)
    ranges = cut(path.stat().st_size, split_bytes)

    def one(part: FileRange) -> tuple[list[Page], ReadLog]:
        own = ReadLog()
        return list(read(source, Partition("crawl", "x", whole.files, part), own)), own

    done = [one(part) for part in ranges]
    num_again = 0
    for _ in range(len(ranges) + 3):
        edges = [own.edges for _, own in done]
        assert None not in edges
        again = misread(ranges, edges)  # type: ignore[arg-type]
        if not again:
            break
        num_again += len(again)
        for index, part in again.items():
            done[index] = one(part)
    else:
        raise AssertionError("ranges never met")
    if log is not None:
        for _, own in done:
            for kind, count in own.other_records.items():
                log.other_records[kind] = log.other_records.get(kind, 0) + count
            log.damage += own.damage
            log.damage_left_out += own.damage_left_out
            log.unreadable_dates += own.unreadable_dates
            log.unreadable_urls += own.unreadable_urls
    return [page for found, _ in done for page in found], num_again


def told(found: list[Page]) -> list[tuple[object, ...]]:
    """What identifies pages and what they say, to compare two readings."""
    return [
        (page.doc_id, page.url, page.record_offset, page.record_length, page.record_id, page.fault, page.raw)
        for page in found
    ]


def damages(log: ReadLog) -> set[tuple[int, str]]:
    """(offset, why) of each damage noted."""
    return {(item["offset"], item["why"]) for item in log.damage}
