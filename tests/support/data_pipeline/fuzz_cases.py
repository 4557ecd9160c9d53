"""What is tried: hostile files, pages and URLs made from a seed, and what must hold for each.

A case raises AssertionError where the code under test breaks its word, and whatever else it raises is a finding too.
The truth of a file is known from how it was made: which records no damage touched, and where they are.
"""

from __future__ import annotations

import functools
import gzip
import io
import os
import random
import zlib
from collections import Counter
from pathlib import Path

from warcio.archiveiterator import ArchiveIterator

from quern.data_pipeline.extraction.extract import Extract, ExtractConfig
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.page.url import canonicalize, host, surt
from quern.data_pipeline.sources import ReadLog
from quern.data_pipeline.sources.charset import decode
from quern.data_pipeline.stages.url_filter import UrlConfig, UrlFilter, url_keys
from support.data_pipeline.sources_warc_files import damages, in_ranges, pages, record, told
from support.processes import ROOT

__all__ = ["TARGETS"]

#: What parsers of these formats give meaning to.
TOKENS = [
    b"\x1f\x8b\x08",
    b"\x1f\x8b\x08\0\0\0\0\0\0\xff",
    b"\x1f\x8b\x08\x1f",
    b"WARC/1.0\r\n",
    b"WARC/1.1\r\nWARC-Type: response\r\n",
    b"WARC-Type: response\r\nContent-Length: 7\r\n\r\n",
    b"Content-Length: 99999999\r\n",
    b"Content-Length: 0\r\n",
    b"\r\n\r\n",
    b"\n\n",
    b"\0" * 40,
    b"\xff" * 9,
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"HTTP/1.1 200 OK\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Encoding: br, deflate\r\n",
    b"ffffffff\r\n",
    b"0\r\n\r\n",
    b"\x1b$B",
    b"\x28\xb5\x2f\xfd",
    b"http://e.com/ 1.2.3.4 20200101000000 text/html 9\n",
    b"filedesc://",
    b"<meta charset=utf-16>",
    b"&#x110000;",
    b"charset=gb2312",
]
HTML_TOKENS = [
    *("<table>", "<td colspan=99 rowspan=99>", "</p>", "<p>", "<div>" * 40, "</div>" * 40, "<!--", "-->", "<![CDATA["),
    *("<script>", "</script>", "<svg><math>", "<b><i>" * 20, "&#0;", "&#x1f600;", "\ud7ff", "\U0010ffff", "<a href='"),
    *("<li>" * 30, "<!doctype html>", "<?xml version='1.0' encoding='utf-16'?>", "<template>", "<frameset>", "\0"),
    *("<select><option>", "\x0b"),
]
URL_TOKENS = [
    *("%", "%00", "%zz", "..", "/./", "//", "@", ":", "[::1]", "?", "#", "&", "=", ";", "\\", " ", "\t", "\n", "\x00"),
    *("xn--", "ß", "İ", "。", "\u200b", "\ud800", "👾", "a" * 300, "utm_source=x", "www.", "..com", ":99999"),
    "javascript:",
]
LABELS = [
    *(None, "utf-8", "utf-16", "utf-32", "gb2312", "iso-2022-jp", "x-mac-roman", "\0", "shift_jis", "big5", "koi8-u"),
]


def _hurt(draw: random.Random, data: bytes, times: int) -> bytes:
    """``data`` after a few of the things that happen to files, and of those that are done to them."""
    out = bytearray(data)
    for _ in range(times):
        at = draw.randrange(len(out) + 1)
        width = min(draw.choice([1, 1, 2, 4, 16, 100, 1000]), len(out) - at)
        how = draw.randrange(8)
        if how == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            out[at : at + width] = draw.randbytes(width)
        elif how == 2:
            del out[at : at + width]
        elif how == 3:
            out[at:at] = draw.choice(TOKENS)
        elif how == 4:
            token = draw.choice(TOKENS)
            out[at : at + len(token)] = token
        elif how == 5:
            out[at:at] = out[at : at + width] * draw.randrange(1, 4)
        elif how == 6:
            del out[at:]
        else:
            digits = [i for i in range(max(0, at - 200), min(len(out), at + 200)) if 48 <= out[i] <= 57]
            if digits:
                out[draw.choice(digits)] = draw.randrange(48, 58)
    return bytes(out)


def _payload(draw: random.Random, number: int) -> tuple[bytes, dict[str, str]]:
    words = " ".join(draw.choice(["river", "größe", "кошка", "日本", "x" * 30]) for _ in range(draw.randrange(1, 80)))
    codec = draw.choice(["utf-8", "utf-16", "cp1252", "gb18030", "iso2022_jp", "koi8_r"])
    body = f"<html><head><title>{number}</title></head><body><p>{words}</p></body></html>".encode(codec, "replace")
    headers = {"Content-Type": draw.choice(["text/html", f"text/html; charset={codec}", "text/plain", "x/y"])}
    coding = draw.choice(["", "", "gzip", "deflate", "chunked"])
    if coding == "gzip":
        body, headers["Content-Encoding"] = gzip.compress(body, mtime=0), "gzip"
    elif coding == "deflate":
        body, headers["Content-Encoding"] = zlib.compress(body), "deflate"
    elif coding == "chunked":
        body, headers["Transfer-Encoding"] = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "chunked"
    return body, headers


def _one_record(draw: random.Random, number: int) -> bytes:
    body, headers = _payload(draw, number)
    kind = draw.choice(["response"] * 4 + ["request", "metadata", "resource", "revisit"])
    return record(body, kind=kind, url=f"http://e.com/{number}", http=headers, compress=False)


def _file(draw: random.Random) -> tuple[bytes, list[tuple[int, bytes]]]:
    """A file's content, and (offset, record) of what was not touched and must be found."""
    packed = draw.random() < 0.6
    parts: list[tuple[bytes, bytes | None]] = []
    for number in range(draw.randrange(1, 8)):
        text = _one_record(draw, number)
        if draw.random() < 0.1:
            inner = b"".join(_one_record(draw, 100 + i) for i in range(3))
            inner = gzip.compress(inner, mtime=0) if draw.random() < 0.5 else inner
            text = record(inner, url=f"http://e.com/{number}", http={"Content-Type": "x/y"}, compress=False)
        deflate = zlib.compressobj(draw.choice([0, 1, 9]), zlib.DEFLATED, 31, 9, draw.choice([0, 0, zlib.Z_FIXED]))
        one = deflate.compress(text) + deflate.flush() if packed else text
        what = draw.random()
        if what < 0.3:
            one = _hurt(draw, one, draw.randrange(1, 6))
            parts.append((one, None))
        elif what < 0.4 and packed:
            hurt = _hurt(draw, text, draw.randrange(1, 6))
            parts.append((gzip.compress(hurt, mtime=0), None))
        elif what < 0.45:
            parts.append((draw.choice(TOKENS) * draw.randrange(1, 40), None))
        else:
            parts.append((one, text))
    content, sound = b"", []
    for one, text in parts:
        if text is not None:
            sound.append((len(content), text))
        content += one
    # Plain files have no place that is surely a record's, nor have packed ones that begin with a plain record.
    return content, sound if packed and not content.startswith((b"http://", b"WARC/1.1")) else []


def _must_be_found(found: list[Page], sound: list[tuple[int, bytes]]) -> None:
    at = {page.record_offset: page for page in found}
    for offset, text in sound:
        one = next(iter(ArchiveIterator(io.BytesIO(text))))
        if one.rec_type in ("response", "resource", "conversion"):
            identity = one.rec_headers.get_header("WARC-Record-ID")
            assert offset in at, f"the record at {offset} is lost"
            assert at[offset].record_id == identity, f"another record stands at {offset}"
            assert at[offset].fault != "read.damaged", f"the record at {offset} was not touched"


def _scratch() -> Path:
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") / f"quern-fuzz-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder


def try_reader(draw: random.Random) -> None:
    """A crawl file in any state: nothing untouched is lost, and its ranges are the file."""
    content, sound = _file(draw)
    if draw.random() < 0.2:
        content, sound = _hurt(draw, content, draw.randrange(1, 20)), []
    path = _scratch() / draw.choice(["x.warc.gz", "x.warc"])
    path.write_bytes(content)
    try:
        log = ReadLog()
        found = pages(path, log)
        assert len({page.doc_id for page in found}) == len(found), "two pages are one"
        for page in found:
            page.raw.encode("utf-8")
        _must_be_found(found, sound)
        if content:
            own = ReadLog()
            size = draw.randrange(1 + len(content) // 40, 2 + len(content))
            split, _ = in_ranges(path, size, own)
            assert told(split) == told(found), f"ranges of {size} bytes give other pages"
            assert Counter(damages(own)) == Counter(damages(log)), f"ranges of {size} bytes note other damage"
            assert own.other_records == log.other_records
    finally:
        path.unlink()


def try_real(draw: random.Random) -> None:
    """A real file, hurt."""
    files = _real_files()
    if not files:
        return try_reader(draw)
    path = _scratch() / "real.warc.gz"
    path.write_bytes(_hurt(draw, draw.choice(files), draw.randrange(1, 8)))
    try:
        size = path.stat().st_size
        if size:
            log, own = ReadLog(), ReadLog()
            found = told(pages(path, log))
            split, _ = in_ranges(path, draw.randrange(1 + size // 20, 2 + size), own)
            assert told(split) == found
            assert Counter(damages(own)) == Counter(damages(log))
    finally:
        path.unlink()
    return None


@functools.cache
def _real_files() -> list[bytes]:
    shared = Path(os.environ.get("QUERN_SHARED") or ROOT.parent / "shared") / "data"
    found = sorted((shared / "warc_real").rglob("*")) if (shared / "warc_real").is_dir() else []
    return [path.read_bytes() for path in found if path.is_file() and 100 < path.stat().st_size < 70_000]


@functools.cache
def _real_pages() -> list[str]:
    shared = Path(os.environ.get("QUERN_SHARED") or ROOT.parent / "shared") / "data"
    paths = sorted((shared / "warc").glob("*.warc.gz"))[:3]
    found = [page.raw for path in paths for page in pages(path) if len(page.raw) < 60_000 and page.media == "html"]
    made = "<html><body><table><tr><td>a<td>b</table><p>Some text of a page.<ul><li>x<li>y</ul></body></html>"
    return found[:200] or [made]


@functools.cache
def _extract(engine: str) -> Extract:
    return Extract(ExtractConfig.model_validate({"engine": engine}))


def try_extract(draw: random.Random) -> None:
    """A page, hurt: within its time it has a text or a reason, and the text can be written."""
    text = draw.choice(_real_pages())
    start = draw.randrange(len(text))
    text = text[:200] + text[start : start + draw.choice([500, 5000, 50_000])]
    for _ in range(draw.randrange(1, 12)):
        at = draw.randrange(len(text) + 1)
        text = (
            text[:at] + draw.choice(HTML_TOKENS) * draw.choice([1, 1, 1, 2, 30]) + text[at + draw.choice([0, 0, 9]) :]
        )
    page = Page("s", "f", "f", 0, media="html")
    page.raw = text.replace("\0", "")
    page = _extract(draw.choice(["trafilatura", "trafilatura", "resiliparse"]))(page)
    assert (page.text is None) != (not page.failures)
    (page.text or "").encode("utf-8")


def try_charset(draw: random.Random) -> None:
    """Any bytes under any label are text without NUL and lone surrogates, or no text."""
    body, _ = _payload(draw, 1)
    decoded = decode(_hurt(draw, body, draw.randrange(0, 6)), draw.choice(LABELS), draw.random() < 0.7)
    if decoded is not None:
        assert "\0" not in decoded[0]
        decoded[0].encode("utf-8")


@functools.cache
def _url_filter() -> UrlFilter:
    return UrlFilter(UrlConfig())


def try_url(draw: random.Random) -> None:
    """Any text as a URL: None, or a canonical form that is its own, has a host and a key, and can be written."""
    bases = ["http://example.com/a/b?c=d#e", "https://user:pw@WWW.Example.co.uk:8080/%7Ea/../b;c?x=1&x=2", "//h/p", ""]
    url = draw.choice(bases)
    for _ in range(draw.randrange(1, 8)):
        at = draw.randrange(len(url) + 1)
        token = draw.choice(URL_TOKENS) if draw.random() < 0.8 else chr(draw.randrange(0x110000))
        url = url[:at] + token + url[at + draw.choice([0, 0, 1, 3]) :]
    canonical = canonicalize(url)
    if canonical is not None:
        canonical.encode("utf-8")
        assert canonicalize(canonical) == canonical, f"{url!r} → {canonical!r} → {canonicalize(canonical)!r}"
        assert host(canonical)
        surt(canonical).encode("utf-8")
        url_keys(canonical)
    page = Page("s", "f", "f", 0, media="html", url=url)
    _url_filter()(page)


TARGETS = {"reader": try_reader, "real": try_real, "extract": try_extract, "charset": try_charset, "url": try_url}
