"""JSON lines and trees of files: one page a line, a file."""

from __future__ import annotations

import bz2
import datetime as dt
import gzip
import io
import json
import lzma
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.sources import ReadLog
from quern.data_pipeline.sources.containers.compression import pieces
from quern.data_pipeline.sources.jsonl import _lines
from support.data_pipeline.sources_warc_files import pages, random_texts

ROWS = [{"id": f"r{i}", "text": f"Text {i} – ü", "url": f"http://e.com/{i}"} for i in range(5)]


COMPRESS = {
    "plain": bytes,
    "gz": gzip.compress,
    "gz in members": lambda data: b"".join(gzip.compress(data[i : i + 50]) for i in range(0, len(data), 50)),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "zst in frames": lambda data: b"".join(
        zstandard.ZstdCompressor().compress(data[i : i + 50]) for i in range(0, len(data), 50)
    ),
}


def jsonl(*rows: object) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def read_jsonl(folder: Path, content: bytes, log: ReadLog | None = None, **settings: object):  # type: ignore[no-untyped-def]
    (folder / "x.jsonl").write_bytes(content)
    return pages(folder / "x.jsonl", log, kind="jsonl", **settings)


@pytest.mark.parametrize("compression", COMPRESS)
def test_lines_are_pages_whatever_the_compression(tmp_path: Path, compression: str) -> None:
    log = ReadLog()
    found = read_jsonl(tmp_path, COMPRESS[compression](jsonl(*ROWS)), log)
    assert [(page.record_id, page.raw, page.url) for page in found] == [(r["id"], r["text"], r["url"]) for r in ROWS]
    assert [page.position for page in found] == [0, 1, 2, 3, 4]
    assert {(page.media, page.charset, page.fault) for page in found} == {("text", "utf-8", None)}
    assert log.damage == []


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["gz", "bz2", "xz", "zst"])
def test_a_cut_compressed_file_gives_its_lines_up_to_the_cut_and_is_noted(tmp_path: Path, compression: str) -> None:
    num_rows = 1500 if compression == "xz" else 4000  # the others' blocks are larger
    rows = [{"text": text} for text in random_texts(num_rows)]
    whole = COMPRESS[compression](jsonl(*rows))
    log = ReadLog()
    found = read_jsonl(tmp_path, whole[: len(whole) * 3 // 4], log)
    complete = [page for page in found if page.fault is None]
    assert [page.raw for page in complete] == [row["text"] for row in rows[: len(complete)]]
    assert len(found) - len(complete) <= 1
    assert len(log.damage) == 1
    assert len(complete) > num_rows // 4


def test_the_offset_and_length_of_a_line_give_it_back(tmp_path: Path) -> None:
    content = b"\n" + jsonl(*ROWS[:2]) + b"  \r\n" + jsonl(*ROWS[2:]).rstrip(b"\n")
    found = read_jsonl(tmp_path, content)
    assert [page.position for page in found] == [1, 2, 4, 5, 6]
    for page, row in zip(found, ROWS, strict=True):
        assert json.loads(content[page.record_offset : page.record_offset + page.record_length]) == row


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"not json", "read.bad_json"),
        (b'{"text": "cut', "read.bad_json"),
        (b'["text"]', "read.not_an_object"),
        (b'{"body": "x"}', "read.no_field"),
        (b'{"text": null}', "read.null_text"),
        (b'{"text": 5}', "read.wrong_type"),
        (b'{"text": {"en": "x"}}', "read.wrong_type"),
        (b'{"text": "\xff"}', "read.undecodable"),
        (b'{"text": ' + b"[" * 100_000, "read.too_deep"),
        (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "read.bad_json"),
        (b'{"text": ""}', "read.empty"),
        (b'{"text": " \\n\\u0000"}', "read.empty"),
        (b'{"text": "' + b"x" * 9000 + b'"}', "read.too_large"),
        (b'{"text": "x", "n": [' + b"[]," * 1_200_000 + b"0]}", "read.too_large"),
    ],
)
def test_a_bad_line_is_a_page_and_the_next_line_is_read(tmp_path: Path, line: bytes, fault: str) -> None:
    limit = {"max_bytes": 8000} if fault == "read.too_large" and len(line) < 10_000 else {}
    found = read_jsonl(tmp_path, jsonl(ROWS[0]) + line + b"\n" + jsonl(ROWS[1]), **limit)
    assert [(page.position, page.fault) for page in found] == [(0, None), (1, fault), (2, None)]
    assert found[1].raw == ""


def test_a_bad_line_keeps_the_id_it_has(tmp_path: Path) -> None:
    found = read_jsonl(tmp_path, jsonl({"id": 7, "text": None, "url": "http://e.com"}))
    assert (found[0].record_id, found[0].url, found[0].fault) == ("7", "http://e.com", "read.null_text")


def test_escapes_never_make_a_lone_surrogate_or_nul(tmp_path: Path) -> None:
    found = read_jsonl(tmp_path, b'{"text": "a\\ud800b\\u0000\\ud83d\\ude00", "url": "http://e.com/\\udfff"}\n')
    assert found[0].raw == "a\ufffdb😀"
    assert found[0].url == "http://e.com/\ufffd"


def test_fields_can_be_named_or_left_out(tmp_path: Path) -> None:
    row = {"body": "words", "uid": "u1", "link": "http://e.com", "when": "2024-05-06T07:08:09Z", "id": "no"}
    names = {"text_field": "body", "id_field": "uid", "url_field": "link", "date_field": "when"}
    page = read_jsonl(tmp_path, jsonl(row), **names)[0]
    assert (page.raw, page.record_id, page.url) == ("words", "u1", "http://e.com")
    assert page.fetched_at == dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)
    page = read_jsonl(tmp_path, jsonl(row), text_field="body", id_field=None, url_field=None, date_field=None)[0]
    assert (page.record_id, page.url, page.fetched_at) == (None, None, None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2024-05-06", dt.datetime(2024, 5, 6, tzinfo=dt.UTC)),
        (1714979289, dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)),
        (1714979289000, dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)),
        ("1714979289", dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)),
        (" 1714979289.5\n", dt.datetime(2024, 5, 6, 7, 8, 9, 500_000, tzinfo=dt.UTC)),
        ("1714979289000", dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)),
        ("20240506070809", dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)),
        ("Mon, 06 May 2024 07:08:09 GMT", dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)),
        ("Monday, 06-May-2024 07:08:09 UTC", dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)),
        ("6 May 2024 09:08 +0200", dt.datetime(2024, 5, 6, 7, 8, tzinfo=dt.UTC)),
        ("6 May 2024 02:08:09 EST", dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)),
        ("6 May 2024 07:08:09 CEST", None),
        ("36 May 2024 07:08:09", None),
        ("Fri, 31 Dec 9999 23:59:59 -0100", None),
        ("yesterday", None),
        ("2024-13-45", None),
        ("20241345", None),
        ("171497928900", None),
        ("soon", None),
        (1e30, None),
        (True, None),
        ({}, None),
    ],
)
def test_dates_of_rows(tmp_path: Path, value: object, expected: dt.datetime | None) -> None:
    log = ReadLog()
    assert read_jsonl(tmp_path, jsonl({"text": "x", "date": value}), log)[0].fetched_at == expected
    assert log.unreadable_dates == (expected is None)


def test_only_dates_that_are_there_are_counted_as_unreadable(tmp_path: Path) -> None:
    log = ReadLog()
    rows = [{"text": "x", **given} for given in ({}, {"date": None}, {"date": ""}, {"date": "soon"}, {"when": "soon"})]
    read_jsonl(tmp_path, jsonl(*rows), log)
    assert log.unreadable_dates == 1
    read_jsonl(tmp_path, jsonl(*rows), log, date_field=None)
    assert log.unreadable_dates == 1
    pq.write_table(pa.table({"text": ["x"] * 3, "date": ["2024", "soon", None]}), tmp_path / "x.parquet")
    pages(tmp_path / "x.parquet", log, kind="parquet")
    assert log.unreadable_dates == 2


def test_urls_that_are_no_text_are_counted(tmp_path: Path) -> None:
    log = ReadLog()
    rows = [{"text": "x", "url": url} for url in (5, ["https://a.example/"], None, "", "no url", "https://a.example/")]
    found = read_jsonl(tmp_path, jsonl(*rows, {"text": "x"}), log)
    assert [page.url for page in found] == [None, None, None, None, "no url", "https://a.example/", None]
    assert log.unreadable_urls == 2
    read_jsonl(tmp_path, jsonl(*rows), log, url_field=None)
    assert log.unreadable_urls == 2


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path, b"\xef\xbb\xbf" + jsonl(ROWS[0]))[0].raw == ROWS[0]["text"]


@given(st.binary(max_size=300), st.integers(1, 50), st.integers(1, 60))
def test_lines_are_those_of_the_bytes_however_they_come(content: bytes, size: int, limit: int) -> None:
    found = list(_lines(iter([content[i : i + size] for i in range(0, len(content), size)]), limit))
    expected = content.split(b"\n")
    if not expected[-1]:
        expected.pop()
    lines = [None if parts is None else b"".join(parts) for _, _, parts in found]
    assert lines == [line if len(line) <= limit else None for line in expected]
    assert [content[offset : offset + length] for offset, length, _ in found] == expected


def test_an_endless_line_costs_bounded_memory() -> None:
    tracemalloc.start()
    found = list(_lines((bytes([65]) * (1 << 20) for _ in range(64)), 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(0, 64 << 20, None)]
    assert peak < 8 << 20


@given(st.binary(max_size=2000), st.sampled_from(sorted(COMPRESS)), st.data())
def test_any_damage_to_a_compressed_file_ends(content: bytes, compression: str, data: st.DataObject) -> None:
    damaged = bytearray(COMPRESS[compression](content))
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    notes: list[str] = []
    b"".join(pieces(io.BytesIO(bytes(damaged)), lambda _, why: notes.append(why)))


def test_files_of_a_tree_are_pages(tmp_path: Path) -> None:
    texts = {
        "a.py": ("print('ü')\n", "utf-8"),
        "latin.py": ("# Grüße aus Köln, schöne Häuser über der Straße\n" * 20, "cp1252"),
        "utf16.py": ("# Grüße", "utf-16"),
        "lone.c": ("double t = 21; /* 25°C */\n" * 2, "cp1252"),
        "koi8.py": ("# coding: koi8-r\nprint('Ж')\n", "koi8-r"),
        "old.HTML": ('<meta charset="iso-8859-5"><p>Ж', "iso8859_5"),
        "old.js": ('s = \'<meta charset="iso-8859-5">\'; t = "Größe der Fläche für Köln"', "cp1252"),
    }
    faults = {
        "binary.py": (b"\x7fELF\x00\x01", "read.not_text"),
        "empty.py": (b"", "read.empty"),
        "blank.py": (b"\n \n", "read.empty"),
        "large.py": (b"x" * 5001, "read.too_large"),
    }
    for name, (text, charset) in texts.items():
        (tmp_path / name).write_bytes(text.encode(charset))
    for name, (content, _) in faults.items():
        (tmp_path / name).write_bytes(content)
    found = pages(tmp_path, kind="code", max_bytes=5000, groups=3, suffixes=[".py", ".c", ".js", ".HTML"])
    assert {page.relative_path: page.raw for page in found if page.fault is None} == {
        name: text for name, (text, _) in texts.items()
    }
    assert {page.relative_path: page.fault for page in found if page.fault is not None} == {
        name: fault for name, (_, fault) in faults.items()
    }
    assert {(page.media, page.position, page.url) for page in found} == {("text", 0, None)}
