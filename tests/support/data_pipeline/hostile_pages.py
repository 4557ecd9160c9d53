"""Pages made to stop a run, and the one verdict each must get; written with warcio and the codecs' libraries."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import brotli
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

NUM_NEIGHBOURS = 10
WORDS = (
    *("river", "lantern", "harbour", "orchard", "mirror", "saddle", "copper", "window", "garden", "thunder", "ribbon"),
    *("kettle", "meadow", "anchor", "stone", "mill", "wheel", "flour", "grain", "morning", "evening", "carpenter"),
    *("baker", "letter", "winter", "summer", "bridge", "market"),
)

MIB = 1 << 20


def prose(number: int, sentences: int = 40) -> str:
    """English sentences that no other number has."""
    parts = []
    for line in range(sentences):
        a, b, c = (WORDS[(number * 7 + line * step + number // 3) % len(WORDS)] for step in (1, 3, 5))
        parts.append(f"When the {a} of number {number} was near the {b}, they went to the {c} and looked for it.")
    return " ".join(parts)


def article(number: int, inside: str = "") -> str:
    body = f"<p>{prose(number, 20)}</p><p>{prose(number + 500, 20)}</p>"
    return f"<html><head><title>No. {number}</title></head><body><article>{body}{inside}</article></body></html>"


@dataclass(frozen=True)
class Hostile:
    """``verdict`` is (stage, reason); None: kept, or dropped for the little text that is left of it."""

    name: str
    body: bytes
    verdict: tuple[str, str] | None = None
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/html; charset=utf-8"),)
    url: str = ""
    warc: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.url or f"https://hostile.example/{self.name}"


TOO_LARGE = ("read", "read.too_large")
PAGE_TOO_LARGE = ("extract", "extract.too_large")
ELEMENTS = ("extract", "extract.too_many_elements")
ATTRIBUTES = ("extract", "extract.too_many_attributes")
UNDECODABLE = ("read", "read.undecodable")
TEXT_TOO_LARGE = ("extract", "extract.text_too_large")
URL_TOO_LONG = ("url", "url.too_long")


def zeros(coding: str, size: int) -> bytes:
    """``size`` zero bytes in a content coding."""
    piece = bytes(MIB)
    if coding == "br":
        compressor = brotli.Compressor(quality=1)
        return b"".join([compressor.process(piece) for _ in range(size // MIB)] + [compressor.finish()])
    if coding == "zstd":
        out = io.BytesIO()
        with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
            for _ in range(size // MIB):
                writer.write(piece)
        return out.getvalue()
    deflater = zlib.compressobj(wbits={"gzip": 31, "deflate": 15}[coding])
    return b"".join([deflater.compress(piece) for _ in range(size // MIB)] + [deflater.flush()])


def pages() -> Iterator[Hostile]:
    """Every shape, one after the other; the largest is made when it is asked for."""

    def page(name: str, inside: str, verdict: tuple[str, str] | None = None) -> Hostile:
        return Hostile(name, article(100, inside).encode(), verdict)

    yield page("spans", "<p>" + "<span>word</span> and " * 50_000, ELEMENTS)
    yield page("spans-within-bounds", "<p>" + "<span>word</span>word, " * 2_000)
    yield page("nested", "<div>" * 100_000 + "deep", ELEMENTS)
    yield page("nested-within-bounds", "<div>" * 15_000 + "deep")
    yield page("nested-formats", "<b>x<i>y" * 2_000)
    yield page("nested-tables", "<table><tr><td>x " * 4_000)
    yield page("closing-tags", "<div>" * 250 + "</p>" * 1_000_000, ELEMENTS)
    yield page("attributes-of-one", "<p " + " ".join(f"a{n}=x" for n in range(300_000)) + ">x</p>", ATTRIBUTES)
    yield page("attributes-without-values", "<p " + " ".join(f"a{n}" for n in range(100_000)) + ">x</p>", ATTRIBUTES)
    yield page("attributes-of-many", ("<p " + " ".join(f"a{n}=1" for n in range(30)) + ">x</p>") * 3_000, ATTRIBUTES)
    yield page("text-10mb", "<p>" + prose(1, 1_000) * 100, PAGE_TOO_LARGE)
    yield page("line-10mb", "<p>" + "word" * 2_600_000, PAGE_TOO_LARGE)
    yield page("comment", "<!--" + "-" * 3 * MIB + "-->")
    yield page("comment-unclosed", "<!--" * 4_000)
    yield page("cdata", "<![CDATA[" + "x]" * MIB + "]]>")
    yield page("entities", "<p>" + "&#x10FFFF;&nosuch;" * 10_000)
    yield page("nul-bytes", "<p>\0a\0b" + "\0" * 200_000)
    yield page("control-characters", "<p>" + "\x01\x0b\x1b[31m\x7f\u202e" * 10_000)
    yield page("control-tokens", "<p>" + "&lt;|endoftext|&gt; <|endoftext|> &lt;|im_start|&gt; " * 50)
    yield page("script-open", "<script>" + "if (a<b) {" * 5_000)
    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    head = f'<?xml version="1.0"?><!DOCTYPE html [<!ENTITY l0 "lol">{laughs}]>'
    xhtml = f'{head}<html xmlns="http://www.w3.org/1999/xhtml"><body><p>&l9;</p><p>{prose(101)}</p></body></html>'
    yield Hostile("billion-laughs", xhtml.encode(), None, (("Content-Type", "application/xhtml+xml"),))
    external = head.replace('"lol"', 'SYSTEM "file:///etc/passwd"')
    yield Hostile("external-entity", (external + xhtml[len(head) :].replace("&l9;", "&l0;")).encode())
    yield Hostile("doctype", ("<!DOCTYPE html " + "x" * 3 * MIB + ">" + article(102)).encode())
    html = (("Content-Type", "text/html"),)
    for coding in ("gzip", "deflate", "br", "zstd"):
        headers = (*html, ("Content-Encoding", coding))
        yield Hostile(f"bomb-{coding}", zeros(coding, 64 * MIB), TOO_LARGE, headers)
    nested = gzip.compress(gzip.compress(zeros("gzip", 64 * MIB)))
    yield Hostile("bomb-in-bombs", nested, TOO_LARGE, (*html, ("Content-Encoding", "gzip, gzip, gzip")))
    mixed = brotli.compress(zeros("gzip", 64 * MIB), quality=1)
    yield Hostile("bomb-of-two-codings", mixed, TOO_LARGE, (*html, ("Content-Encoding", "gzip, br")))
    yield Hostile("not-chunked", article(103).encode(), None, (*html, ("Transfer-Encoding", "chunked")))
    lied = b"ffffffffffffffff\r\n" + article(104).encode()
    yield Hostile("chunk-larger-than-all", lied, None, (*html, ("Transfer-Encoding", "chunked")))
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in article(105).encode()) + b"0\r\n\r\n"
    yield Hostile("chunks-of-one-byte", small, None, (*html, ("Transfer-Encoding", "chunked")))
    yield Hostile("header-flood", article(106).encode(), None, (*html, *((f"X-{n}", "y" * 20) for n in range(5_000))))
    yield Hostile("header-line", article(107).encode(), None, (*html, ("X-Long", "y" * 200_000)))
    surrogates = article(108, "<p>&#xD800; &#55357;&#xDFFF; \ud83d \udc00 x</p>").encode("utf-8", "surrogatepass")
    yield Hostile("surrogates-in-utf-8", surrogates, UNDECODABLE)
    wide = b"\xff\xfe" + article(109, "<p>\ud83d x \udc00</p>").encode("utf-16-le", "surrogatepass")
    yield Hostile("surrogates-in-utf-16", wide, UNDECODABLE, (("Content-Type", "text/html; charset=utf-16"),))
    utf7 = (("Content-Type", "text/html; charset=utf-7"),)
    yield Hostile("surrogates-in-utf-7", article(110, "<p>+2D0- +3Xn-</p>").encode(), None, utf7)
    yield Hostile("url-200kb", article(111).encode(), URL_TOO_LONG, url="https://hostile.example/?" + "a=>" * 66_000)


def warc(path: Path, hostile: bool) -> dict[str, Hostile]:
    """Neighbours as a WARC of gzip members, with the hostile pages between them or without; those by address."""
    written = {}
    shapes = pages() if hostile else iter(())
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)

        def write(url: str, body: bytes, headers: tuple[tuple[str, str], ...], more: dict[str, str]) -> None:
            record = writer.create_warc_record(
                url,
                "response",
                payload=io.BytesIO(body),
                http_headers=StatusAndHeaders("200 OK", list(headers), protocol="HTTP/1.1"),
                warc_headers_dict={"WARC-Date": "2024-01-01T00:00:00Z", **more},
            )
            writer.write_record(record)

        for number in range(NUM_NEIGHBOURS):
            record_id = {"WARC-Record-ID": f"<urn:neighbour:{number}>"}
            write(
                f"https://good.example/{number}", article(number).encode(), (("Content-Type", "text/html"),), record_id
            )
            for shape in itertools.islice(shapes, None if number == NUM_NEIGHBOURS - 2 else 4):
                write(shape.address, shape.body, shape.headers, shape.warc)
                written[shape.address] = Hostile(shape.name, b"", shape.verdict)
    return written


#: Texts for sources that carry texts: JSON lines, Parquet, WET.
TEXTS: dict[str, tuple[str, tuple[str, str] | None]] = {
    "text-10mb": (prose(1, 1_000) * 100, TEXT_TOO_LARGE),
    "line-10mb": ("word" * 2_600_000, TEXT_TOO_LARGE),
    "text-34mb": ("x" * 34 * MIB, TOO_LARGE),
    "no-space": ("a" * 300_000, None),
    "marks": (prose(2) + " " + "e\u0301" * 100_000 + "\u0301" * 100_000, None),
    "control-tokens": (prose(3) + " <|endoftext|><|endoftext|> <s> </s> [INST] <|im_start|>", None),
    "control-characters": (prose(4) + " \x1b[2J\x07\x01\u202e\ufeff", None),
    "astral": (prose(5) + "\U0001f600\U0010ffff" * 10_000, None),
    "newlines": (prose(6) + "\n" * 60_000 + "end", None),
    "digits": ("+1 202 555 01 " * 8_000, None),
    "markup": ("<div>" * 100_000, None),
}


def rows(hostile: bool) -> Iterator[tuple[str, str, str]]:
    """(id, url, text) of neighbours, with the hostile texts between them or without."""
    texts = iter(TEXTS.items() if hostile else ())
    for number in range(NUM_NEIGHBOURS):
        yield f"good-{number}", f"https://good.example/{number}", prose(number)
        for name, (text, _) in itertools.islice(texts, None if number == NUM_NEIGHBOURS - 2 else 2):
            yield name, f"https://hostile.example/{name}", text


#: Lines that are JSON but not what a row should be, and the verdict of each.
LINES: dict[str, tuple[bytes, tuple[str, str] | None]] = {
    "deep": (b'{"id": "deep", "text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", ("read", "read.too_deep")),
    "many": (b'{"id": "many", "text": "x", "y": [' + b"[]," * 3_000_000 + b"[]]}", TOO_LARGE),
    "number": (b'{"id": "number", "text": ' + b"9" * MIB + b"}", ("read", "read.bad_json")),
    "no-utf-8": (b'{"id": "no-utf-8", "text": "\xff\xfe"}', ("read", "read.undecodable")),
    "surrogates": (
        json.dumps(
            {"id": "surrogates", "text": prose(207) + " \ud800 x \udfff\ud83d", "url": "http://a/\udc00"}
        ).encode(),
        None,
    ),
    "nul": (json.dumps({"id": "nul", "text": prose(208) + "\0\0 y"}).encode(), None),
    "id-1mb": (json.dumps({"id": "i" * MIB, "text": prose(209)}).encode(), None),
    "url-1mb": (
        json.dumps({"id": "url-1mb", "text": prose(210), "url": "http://a.example/" + "%2" * (MIB // 2)}).encode(),
        URL_TOO_LONG,
    ),
}


def jsonl(path: Path, hostile: bool) -> None:
    with path.open("wb") as file:
        lines = iter(LINES.values() if hostile else ())
        for identity, url, text in rows(hostile):
            file.write(json.dumps({"id": identity, "url": url, "text": text}).encode() + b"\n")
            for line, _ in itertools.islice(lines, 1):
                file.write(line + b"\n")


def parquet(path: Path, hostile: bool) -> None:
    names = ("id", "url", "text")
    pq.write_table(pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows(hostile)]), path)


def wet(path: Path, hostile: bool) -> None:
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        for identity, url, text in rows(hostile):
            made = writer.create_warc_record(
                url,
                "conversion",
                payload=io.BytesIO(text.encode()),
                warc_headers_dict={"WARC-Date": "2024-01-01T00:00:00Z", "WARC-Record-ID": identity},
                warc_content_type="text/plain",
            )
            writer.write_record(made)
