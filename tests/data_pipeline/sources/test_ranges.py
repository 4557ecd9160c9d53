"""The ranges of a file are the file: the same pages, the same damage, however it is cut and whatever state it is in."""

from __future__ import annotations

import bz2
import gzip
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from warcio.archiveiterator import ArchiveIterator

from quern.data_pipeline.sources import ReadLog
from quern.data_pipeline.sources.containers.ranges import Edges, FileRange, cut, misread
from support.data_pipeline.sources_warc_files import damages, in_ranges, many, pages, record, told


def same_in_ranges(path: Path, *split_bytes: int) -> int:
    """Read whole and in ranges; how many ranges had to be read again."""
    log, num_again = ReadLog(), 0
    expected = told(pages(path, log))
    for size in split_bytes:
        own = ReadLog()
        found, again = in_ranges(path, size, own)
        assert told(found) == expected, size
        assert own.other_records == log.other_records, size
        assert Counter(damages(own)) == Counter(damages(log)), size
        assert len(own.damage) >= len(log.damage)  # what lies at an edge may be told by both ranges
        num_again += again
    return num_again


def write(folder: Path, content: bytes, name: str = "x.warc.gz") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def nested(compress: bool, inside_compressed: bool) -> list[bytes]:
    """Records of which one holds a whole crawl, stored as it is, longer than many a range."""
    crawl = b"".join(many(12, compress=inside_compressed))
    outer = record(crawl, url="http://e.com/crawl", http={"Content-Type": "application/warc"}, compress=False)
    before, behind = many(3, compress=compress), many(6, compress=compress)[3:]
    return [*before, gzip.compress(outer, compresslevel=0, mtime=0) if compress else outer, *behind]


@pytest.mark.slow
@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("split_bytes", [1, 17, 300, 1000, 3000, 20_000])
def test_ranges_of_a_sound_file_are_what_warcio_reads(tmp_path: Path, compress: bool, split_bytes: int) -> None:
    records = many(9, compress=compress)
    if split_bytes == 1:
        records = records[:1] if compress else [record(compress=False)]
    path = write(tmp_path, b"".join(records))
    with path.open("rb") as file:
        expected = [one.rec_headers.get_header("WARC-Target-URI") for one in ArchiveIterator(file)]
    found, again = in_ranges(path, split_bytes)
    assert [page.url for page in found] == expected
    assert [page.record_offset for page in found] == [sum(map(len, records[:i])) for i in range(len(records))]
    assert again == 0


@pytest.mark.parametrize("compress", [True, False])
def test_a_record_that_begins_at_an_edge_is_the_range_s_behind_it(tmp_path: Path, compress: bool) -> None:
    one = record(compress=compress)
    path = write(tmp_path, one * 6)
    for edge in (len(one), 2 * len(one)):
        found, again = in_ranges(path, edge)
        assert [page.record_offset for page in found] == [i * len(one) for i in range(6)]
        assert again == 0


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("inside_compressed", [True, False])
def test_a_crawl_inside_a_page_misleads_ranges_that_are_then_put_right(
    tmp_path: Path, compress: bool, inside_compressed: bool
) -> None:
    path = write(tmp_path, b"".join(nested(compress, inside_compressed)))
    assert [page.url for page in pages(path)] == [
        *(f"http://e.com/{i}" for i in range(3)),
        "http://e.com/crawl",
        *(f"http://e.com/{i}" for i in range(3, 6)),
    ]
    num_again = same_in_ranges(path, 200, 700, 1500, 4000, 12_000)
    assert num_again > 0 or compress != inside_compressed


@pytest.mark.parametrize(
    "pack",
    [
        lambda stream: gzip.compress(stream, mtime=0),
        lambda stream: b"".join(gzip.compress(stream[i : i + 777], mtime=0) for i in range(0, len(stream), 777)),
        lambda stream: gzip.compress(stream[:6000], mtime=0) + gzip.compress(stream[6000:], mtime=0),
        zstandard.compress,
        bz2.compress,
        lambda stream: pa.Codec("lz4").compress(stream, asbytes=True),
    ],
    ids=["one member", "members of 777 bytes", "two members", "zstd", "bz2", "lz4"],
)
def test_files_that_cannot_be_read_in_ranges_are_read_by_the_first(tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
    path = write(tmp_path, pack(b"".join(many(9, compress=False))))
    assert len(pages(path)) == 9
    same_in_ranges(path, 50, 300, 1100)


def test_members_of_one_and_of_many_records_keep_their_addresses(tmp_path: Path) -> None:
    plain, members = many(12, compress=False), many(12)
    mixed = b"".join(members[:3]) + gzip.compress(b"".join(plain[3:6]), mtime=0) + b"".join(members[6:])
    path = write(tmp_path, mixed)
    assert len(pages(path)) == 12
    assert same_in_ranges(path, 60, 400, 1100) > 0


def test_arc_files_are_read_in_ranges(tmp_path: Path) -> None:
    def document(number: int) -> bytes:
        page = b"<html>" + b"%d " % number * 60 + b"</html>"
        return b"http://e.com/%d 1.2.3.4 20140102030405 text/html %d\n%s\n" % (number, len(page), page)

    first = b"filedesc://x.arc 0.0.0.0 20140102030405 text/plain 8\n1 0 x\nab\n\n"
    parts = [first, *map(document, range(12))]
    plain = write(tmp_path, b"".join(parts), "x.arc")
    assert len(pages(plain)) == 12
    assert same_in_ranges(plain, 20, 150, 700) == 0
    assert same_in_ranges(write(tmp_path, b"".join(map(gzip.compress, parts)), "x.arc.gz"), 20, 150, 400) == 0
    hurt = bytearray(b"".join(parts))
    for at in range(100, len(hurt), 333):
        hurt[at : at + 40] = b"\xff" * 40
    same_in_ranges(write(tmp_path, bytes(hurt), "y.arc"), 20, 150, 700)


@pytest.mark.parametrize(
    "content", [b"", b"\n", bytes(5000), b"<html>" * 900, gzip.compress(b"<html>" * 99, mtime=0) * 9]
)
def test_a_file_without_a_record_says_so_once(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    if content:
        same_in_ranges(path, 1 + len(content) // 7, 1 + len(content) // 2)
    log = ReadLog()
    pages(path, log)
    assert [item["why"] for item in log.damage].count("no WARC or ARC record found") == 1


@pytest.mark.slow
def test_files_ground_out_of_bytes_at_random_are_read_in_ranges(tmp_path: Path) -> None:
    # Damage that begins, ends or lies on an edge, of every kind of file above.
    draw = random.Random(11)
    kinds = [many(6), many(6, compress=False), nested(True, True), nested(False, False)]
    for number in range(28):
        content = bytearray(b"".join(kinds[number % 4]))
        split = draw.choice([97, 500, 1300, 2900])
        edge = split * draw.randrange(1, 2 + len(content) // split)
        width = draw.choice([1, 2, 30, 600])
        at = max(0, min(len(content) - width, edge - draw.choice([0, 1, width // 2, width])))
        how = draw.randrange(4)
        if how == 0:
            content[at : at + width] = draw.randbytes(width)
        elif how == 1:
            del content[at : at + width]
        elif how == 2:
            content[at:at] = draw.randbytes(width)
        else:
            content[at : at + width] = bytes(width)
        same_in_ranges(write(tmp_path, bytes(content)), split, split + 13)


@st.composite
def crawls(draw: st.DrawFn) -> bytes:
    """Files of sound, damaged, nested and joined records, of members of every kind, and of what is none."""
    plain, parts = many(5, compress=False), []
    compress = draw(st.booleans())
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["page", "page", "page", "nested", "two", "junk", "empty", "damaged", "cut"]))
        one = plain[draw(st.integers(0, 4))]
        if kind == "nested":
            inner = b"".join(plain[:2]) if draw(st.booleans()) else b"".join(map(gzip.compress, plain[:2]))
            one = record(inner, url="http://e.com/n", http={"Content-Type": "application/warc"}, compress=False)
        elif kind == "two":
            one = one + plain[0]
        level = draw(st.sampled_from([0, 1, 9]))
        made = bytearray(gzip.compress(one, level, mtime=0) if compress else one)
        if kind == "junk":
            made = bytearray(draw(st.sampled_from([bytes(300), b"\x1f\x8b\x08" * 50, b"WARC/1.0\r\n", b"x" * 99])))
        elif kind == "empty":
            made = bytearray(gzip.compress(b"", mtime=0) if compress else b"\r\n" * 3)
        elif kind == "damaged":
            for _ in range(draw(st.integers(1, 4))):
                made[draw(st.integers(0, len(made) - 1))] = draw(st.integers(0, 255))
        elif kind == "cut":
            made = made[: draw(st.integers(1, len(made)))]
        parts.append(bytes(made))
    return b"".join(parts)


@pytest.mark.slow
@settings(max_examples=50)
@given(crawls(), st.integers(40, 4000))
def test_any_file_is_its_ranges(tmp_path_factory: pytest.TempPathFactory, content: bytes, split_bytes: int) -> None:
    same_in_ranges(write(tmp_path_factory.mktemp("ranges"), content), max(split_bytes, len(content) // 40))


@pytest.mark.shared
@pytest.mark.slow
def test_real_and_damaged_files_are_their_ranges(shared: Path) -> None:
    num_files = 0
    for folder in ("warc_real", "warc_broken_derived"):
        for path in sorted((shared / "data" / folder).rglob("*")):
            size = path.stat().st_size
            if not path.is_file() or path.name in ("INDEX.json", "bench.warc.bz2") or not size:
                continue
            # of two files of one kind of damage one after the other
            splits = [(max(16, size // 37), size // 2 + 1), (size // 5 + 1, max(777, size // 11))][num_files % 2]
            same_in_ranges(path, splits[num_files // 2 % 2])
            num_files += 1
    assert num_files > 180


def edges(end: int, first: int | None, stop: int, **changes: object) -> Edges:
    given = {"kind": None, "kind_mattered": False, "stop_kind": "warc", "records": 5, "by_stream": False, "reread": 0}
    return Edges(**({"end": end, "first": first, "stop": stop} | given | changes))  # type: ignore[arg-type]


def test_neighbours_that_met_are_left_alone() -> None:
    ranges = cut(100, 40)
    assert ranges == [FileRange(0, 40, 100), FileRange(40, 80, 100), FileRange(80, 100, 100)]
    assert misread(ranges, [edges(40, 0, 44), edges(80, 44, 90), edges(100, 90, 100)]) == {}
    # A record that begins in the first and ends in the last leaves the one between empty.
    empty = edges(80, None, 80, records=0)
    assert misread(ranges, [edges(40, 0, 90), empty, edges(100, 90, 100)]) == {}


def test_who_began_elsewhere_begins_again_where_the_one_before_stopped() -> None:
    ranges = cut(100, 40)
    again = misread(ranges, [edges(40, 0, 44), edges(80, 50, 90), edges(100, 90, 100)])
    assert again == {1: FileRange(40, 80, 100, 44, "warc")}
    again = misread(ranges, [edges(40, 0, 90), edges(80, 50, 90), edges(100, 95, 100)])
    assert again == {1: FileRange(40, 80, 100, 90, "warc"), 2: FileRange(80, 100, 100, 90, "warc")}
    again = misread(ranges, [edges(40, 0, 44), edges(80, None, 80, records=0), edges(100, 90, 100)])
    assert again == {1: FileRange(40, 80, 100, 44, "warc")}


def test_a_search_before_the_first_record_needs_to_know_what_came_before() -> None:
    ranges = cut(100, 60)
    seen = [edges(60, 0, 70), edges(100, 70, 100, kind_mattered=True)]
    again = misread(ranges, seen)
    assert again == {1: FileRange(60, 100, 100, 70, "warc")}
    assert misread(ranges, [seen[0], edges(100, 70, 100, kind_mattered=True, kind="warc")]) == {}


def test_what_came_before_is_handed_on_by_a_range_without_a_record() -> None:
    ranges = cut(120, 40)
    seen = [edges(40, 0, 44), edges(80, 44, 90, records=0, stop_kind=None), edges(120, 90, 120, kind_mattered=True)]
    assert misread(ranges, seen) == {2: FileRange(80, 120, 120, 90, "warc")}


def test_addresses_in_the_stream_and_no_record_at_all_make_one_range_of_the_file() -> None:
    ranges = cut(100, 60)
    whole = FileRange(0, 100, 100, 0)
    nothing = FileRange(60, 100, 100, 100)
    assert misread(ranges, [edges(60, 0, 70, by_stream=True), edges(100, 70, 100)]) == {0: whole, 1: nothing}
    assert misread(ranges, [edges(60, 0, 70), edges(100, 70, 100, by_stream=True)]) == {0: whole, 1: nothing}
    none = [edges(60, 0, 100, records=0), edges(100, None, 100, records=0)]
    assert misread(ranges, none) == {0: whole}
    # One member: the first range reads it to its end, and knows every address.
    assert misread(ranges, [edges(60, 0, 100, by_stream=True), edges(100, None, 100, records=0)]) == {}
    # Read whole, it is right whatever it says.
    assert misread(ranges, [edges(100, 0, 100, by_stream=True), edges(100, 100, 100, records=0)]) == {}
    assert misread(ranges, [edges(100, 0, 100, by_stream=True), edges(100, 75, 100)]) == {
        1: FileRange(60, 100, 100, 100, "warc")
    }
