"""JSON lines, Parquet and trees of files: one page a line, a row, a file."""

from __future__ import annotations

import bz2
import datetime as dt
import gzip
import io
import json
import lzma
import random
import tracemalloc
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.page.url import MAX_CHARS
from quern.data_pipeline.sources import ReadLog, SourceConfig, plan, read
from quern.data_pipeline.sources.containers.compression import pieces
from quern.data_pipeline.sources.jsonl import _lines
from quern.errors import InputError
from support.data_pipeline.sources_warc_files import pages

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


def random_texts(count: int) -> list[str]:
    """Texts that do not compress well, so that damage in the middle of a file is damage in the middle of its texts."""
    source = random.Random(5)
    return [source.randbytes(300).hex() for _ in range(count)]


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


def parquet(folder: Path, table: pa.Table, **options: object) -> Path:
    pq.write_table(table, folder / "x.parquet", **options)
    return folder / "x.parquet"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_rows_are_pages(tmp_path: Path, kind: pa.DataType) -> None:
    when = dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)
    texts = [row["text"] for row in ROWS] + [None, ""]
    table = pa.table(
        {
            "text": pa.array(texts, pa.string()).cast(kind),
            "url": [row["url"] for row in ROWS] + [None, None],
            "id": list(range(7)),
            "date": [when] * 7,
            "other": [b"x"] * 7,
        }
    )
    found = pages(parquet(tmp_path, table, row_group_size=2), kind="parquet")
    assert [page.raw for page in found] == [*texts[:5], "", ""]
    assert [page.fault for page in found] == [None] * 5 + ["read.null_text", "read.empty"]
    assert [page.position for page in found] == list(range(7))
    assert [page.record_id for page in found] == [str(i) for i in range(7)]
    assert found[4].url == "http://e.com/4"
    assert {page.fetched_at for page in found} == {when}


@pytest.mark.parametrize(
    ("table", "settings", "message"),
    [
        ({"body": ["x"]}, {}, r"x\.parquet: no column 'text' \(text_field\); columns: body"),
        ({"text": ["x"]}, {"url_field": "link"}, r"no column 'link' \(url_field\)"),
        ({"text": [1]}, {}, r"column 'text' \(text_field\): expected text, got int64"),
        ({"text": ["x"], "u": [["a"]]}, {"url_field": "u"}, r"column 'u' \(url_field\): expected text, got list"),
    ],
)
def test_a_missing_or_wrong_column_is_named(tmp_path: Path, table: dict, settings: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InputError, match=message):
        pages(parquet(tmp_path, pa.table(table)), kind="parquet", **settings)


def test_an_id_or_a_date_of_another_type_is_left_out(tmp_path: Path) -> None:
    table = pa.table({"text": ["x", "y"], "i": [1.5, None], "d": [{"a": 1}, None]})
    found = pages(parquet(tmp_path, table), kind="parquet", id_field="i", date_field="d")
    assert [(page.raw, page.record_id, page.fetched_at, page.fault) for page in found] == [
        ("x", None, None, None), ("y", None, None, None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
@pytest.mark.parametrize("plain", [False, True])
def test_a_text_above_the_bound_costs_its_own_row_alone(tmp_path: Path, kind: pa.DataType, plain: bool) -> None:
    texts = ["one", "é" * 51, None, "é" * 50, "", "x" * 101, "one"]
    table = pa.table({"id": list("abcdefg"), "text": pa.array(texts).cast(kind)})
    found = pages(parquet(tmp_path, table, use_dictionary=not plain), kind="parquet", max_bytes=100)
    assert [(page.record_id, page.raw or page.fault) for page in found] == [
        ("a", "one"),
        ("b", "read.too_large"),
        ("c", "read.null_text"),
        ("d", "é" * 50),
        ("e", "read.empty"),
        ("f", "read.too_large"),
        ("g", "one"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "id", "url", "date"])
def test_what_rows_share_is_held_once(tmp_path: Path, name: str) -> None:
    """80 rows of 8 MiB would be 640 MiB, in Arrow's memory and again in Python's."""
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 80, pa.int32()), pa.array(["y" * (8 << 20)]))
    path = parquet(tmp_path, pa.table({"text": ["x"] * 80, name: shared}))
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    source = SourceConfig(name="s", kind="parquet", paths=str(path))
    (planned,) = plan(source)
    found = [(len(page.raw), pa.total_allocated_bytes()) for page in read(source, planned, ReadLog())]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [chars for chars, _ in found] == [8 << 20 if name == "text" else 1] * 80
    assert peak < 100 << 20
    assert max(arrow for _, arrow in found) - before < 100 << 20


@pytest.mark.parametrize("dictionary", [False, True])
def test_of_a_long_url_or_id_the_beginning_is_read(tmp_path: Path, dictionary: bool) -> None:
    """It is longer than the bound of a URL still, so that its page fails as it does elsewhere."""
    names = ["http://e.com/" + "é" * 100_000, "http://e.com/1", None]
    path = parquet(tmp_path, pa.table({"text": ["x"] * 3, "url": names, "id": names}), use_dictionary=dictionary)
    found = pages(path, kind="parquet")
    assert [page.url for page in found][1:] == [page.record_id for page in found][1:] == names[1:]
    assert names[0].startswith(found[0].url)
    assert MAX_CHARS < len(found[0].url) < 5 * MAX_CHARS
    assert found[0].record_id == names[0][:MAX_CHARS]


def test_columns_that_cannot_be_a_field_are_left_out(tmp_path: Path) -> None:
    table = pa.table({"text": ["x"], "url": [["a"]], "id": [{"a": 1}], "date": [b"2024"]})
    (page,) = pages(parquet(tmp_path, table), kind="parquet")
    assert (page.raw, page.url, page.record_id, page.fetched_at) == ("x", None, None, None)


def test_a_uuid_is_an_id(tmp_path: Path) -> None:
    one = uuid.UUID("12345678-1234-5678-1234-567812345678")
    identities = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([one.bytes, None], pa.binary(16)))
    found = pages(parquet(tmp_path, pa.table({"text": ["x", "y"], "id": identities})), kind="parquet")
    assert [page.record_id for page in found] == [str(one), None]


def test_a_broken_parquet_file_is_noted(tmp_path: Path) -> None:
    for content in (b"", b"PAR1 no", b"x" * 1000):
        (tmp_path / "x.parquet").write_bytes(content)
        log = ReadLog()
        assert pages(tmp_path / "x.parquet", log, kind="parquet") == []
        assert [d["file"] for d in log.damage] == [str(tmp_path / "x.parquet")]


def test_a_broken_row_group_does_not_lose_the_next(tmp_path: Path) -> None:
    texts = random_texts(300)
    path = parquet(
        tmp_path, pa.table({"text": texts}), row_group_size=100, use_dictionary=False, write_page_checksum=True
    )
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    for at in range(column.data_page_offset + 30_000, column.data_page_offset + 30_100):
        content[at] ^= 0xFF
    path.write_bytes(bytes(content))
    log = ReadLog()
    found = pages(path, log, kind="parquet")
    assert [(page.position, page.raw) for page in found] == [(i, texts[i]) for i in [*range(100), *range(200, 300)]]
    assert [d["offset"] for d in log.damage] == [100]


YEAR_1 = -62_135_596_800_000_000
DATES = {
    "nanoseconds": (pa.array([1_714_979_289_123_456_789], pa.timestamp("ns")), (2024, 5, 6, 7, 8, 9, 123456)),
    "a zone nobody knows": (pa.array([0], pa.timestamp("us", "Nowhere/Land")), (1970, 1, 1)),
    "year 0 in local time": (pa.array([YEAR_1], pa.timestamp("us", "America/New_York")), (1, 1, 1)),
    "after year 9999": (pa.array([1 << 60], pa.timestamp("us")), None),
    "day after year 9999": (pa.array([1 << 30], pa.int32()).cast(pa.date32()), None),
}


@pytest.mark.parametrize("case", DATES)
def test_a_date_python_cannot_hold_costs_no_row(tmp_path: Path, case: str) -> None:
    column, expected = DATES[case]
    dates = pa.concat_arrays([pa.nulls(1, column.type), column, pa.nulls(1, column.type)])
    found = pages(parquet(tmp_path, pa.table({"text": ["a", "b", "c"], "date": dates})), kind="parquet")
    moment = dt.datetime(*expected, tzinfo=dt.UTC) if expected else None  # type: ignore[misc]
    assert [(page.raw, page.fault, page.fetched_at) for page in found] == [
        ("a", None, None),
        ("b", None, moment),
        ("c", None, None),
    ]


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_text_that_is_not_utf8_is_one_undecodable_row(tmp_path: Path, dictionary: bool) -> None:
    offsets, data = pa.array([b"one", b"\xff\xfe", b"three"], pa.binary()).buffers()[1:]
    text = pa.StringArray.from_buffers(3, offsets, data)
    if dictionary:
        text = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), text)
    log = ReadLog()
    found = pages(parquet(tmp_path, pa.table({"text": text, "id": ["x", "y", "z"]})), log, kind="parquet")
    assert [(page.raw, page.fault) for page in found] == [("one", None), ("", "read.undecodable"), ("three", None)]
    assert [page.record_id for page in found] == ["x", "y", "z"]
    assert log.damage == []


def test_files_of_a_tree_are_pages(tmp_path: Path) -> None:
    contents = {
        "a.py": b"print('\xc3\xbc')\n",
        "latin.py": "# Grüße aus Köln, schöne Häuser über der Straße\n".encode("cp1252") * 20,
        "utf16.py": "# Grüße".encode("utf-16"),
        "lone.c": b"double t = 21; /* 25\xb0C */\n" * 2,
        "koi8.py": "# coding: koi8-r\nprint('Ж')\n".encode("koi8-r"),
        "old.HTML": '<meta charset="iso-8859-5"><p>Ж'.encode("iso8859_5"),
        "old.js": 's = \'<meta charset="iso-8859-5">\'; t = "Größe der Fläche für Köln"'.encode("cp1252"),
        "binary.py": b"\x7fELF\x00\x01",
        "empty.py": b"",
        "blank.py": b"\n \n",
        "large.py": b"x" * 5001,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = {
        page.relative_path: page
        for page in pages(tmp_path, kind="code", max_bytes=5000, groups=3, suffixes=[".py", ".c", ".js", ".HTML"])
    }
    assert {name: page.fault for name, page in found.items()} == {
        "a.py": None,
        "latin.py": None,
        "utf16.py": None,
        **dict.fromkeys(("lone.c", "koi8.py", "old.HTML", "old.js")),
        "binary.py": "read.not_text",
        "empty.py": "read.empty",
        "blank.py": "read.empty",
        "large.py": "read.too_large",
    }
    assert found["a.py"].raw == "print('ü')\n"
    assert found["latin.py"].raw == contents["latin.py"].decode("cp1252")
    assert found["utf16.py"].raw == "# Grüße"
    assert found["lone.c"].raw == contents["lone.c"].decode("cp1252")
    assert found["koi8.py"].raw == contents["koi8.py"].decode("koi8-r")
    assert found["old.HTML"].raw == contents["old.HTML"].decode("iso8859_5")
    assert found["old.js"].raw == contents["old.js"].decode("cp1252")
    assert {(page.media, page.position, page.url) for page in found.values()} == {("text", 0, None)}
