"""Parquet: one page a row."""

from __future__ import annotations

import datetime as dt
import tracemalloc
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.page.url import MAX_CHARS
from quern.data_pipeline.sources import ReadLog, SourceConfig, plan, read
from quern.errors import InputError
from support.data_pipeline.sources_warc_files import pages, random_texts

ROWS = [{"id": f"r{i}", "text": f"Text {i} – ü", "url": f"http://e.com/{i}"} for i in range(5)]


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


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        ({"i": [1.5, None], "d": [{"a": 1}, None]}, {"id_field": "i", "date_field": "d"}),
        ({"url": [["a"], None], "id": [{"a": 1}, None], "date": [b"2024", None]}, {}),
    ],
)
def test_columns_that_cannot_be_a_field_are_left_out(
    tmp_path: Path, columns: dict[str, list[object]], settings: dict[str, str]
) -> None:
    found = pages(parquet(tmp_path, pa.table({"text": ["x", "y"], **columns})), kind="parquet", **settings)
    assert [page.raw for page in found] == ["x", "y"]
    assert {(page.url, page.record_id, page.fetched_at, page.fault) for page in found} == {(None, None, None, None)}


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
    options = {"row_group_size": 100, "use_dictionary": False, "write_page_checksum": True}
    path = parquet(tmp_path, pa.table({"text": texts}), **options)
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
