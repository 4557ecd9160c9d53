"""What is readable in a damaged file is read, each damage is noted, and nothing loops or raises."""

from __future__ import annotations

import gzip
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.sources import ReadLog
from support.data_pipeline.sources_warc_files import many, read_bytes, record, whole
from support.growth import assert_grows_tamely

#: How files begin: records, and each compression.
STARTS = [
    b"",
    b"WARC/1.0\r\n",
    b"filedesc://",
    b"\x1f\x8b\x08\x00",
    b"\x28\xb5\x2f\xfd",
    b"BZh9",
    b"\xfd7zXZ\0",
    b"\x04\x22\x4d\x18",
]
URLS = [f"http://e.com/{i}" for i in range(6)]


def urls_of(folder: Path, content: bytes, log: ReadLog) -> list[str | None]:
    return [page.url for page in read_bytes(folder, content, log)]


def test_junk_between_members_is_passed_over(tmp_path: Path) -> None:
    members, log = many(6), ReadLog()
    junk = random.Random(1).randbytes(3000) + b"\x1f\x8b\x08\x00" + random.Random(2).randbytes(100)
    assert urls_of(tmp_path, b"".join(members[:3]) + junk + b"".join(members[3:]), log) == URLS
    place = len(b"".join(members[:3]))
    assert [(d["file"], d["offset"]) for d in log.damage] == [(str(tmp_path / "x.warc.gz"), place)]


def test_junk_before_the_first_member_is_passed_over(tmp_path: Path) -> None:
    log = ReadLog()
    assert urls_of(tmp_path, b"\x00\x01junk" * 50 + b"".join(many(6)), log) == URLS
    assert [d["offset"] for d in log.damage] == [0]


def test_a_bit_flip_costs_one_record(tmp_path: Path) -> None:
    members, log = many(6), ReadLog()
    broken = bytearray(members[2])
    broken[-20] ^= 0x10
    found = read_bytes(tmp_path, b"".join([*members[:2], bytes(broken), *members[3:]]), log)
    assert [page.url for page in found if page.fault is None] == URLS[:2] + URLS[3:]
    assert log.damage[0]["offset"] == sum(map(len, members[:2]))


def test_a_record_broken_behind_its_header_is_a_page_that_says_so(tmp_path: Path) -> None:
    # Text that does not compress keeps the damage far behind the header.
    big = record(b"<html>" + random.Random(3).randbytes(20_000).hex().encode(), url=URLS[0])
    broken = bytearray(big)
    for at in range(len(broken) - 4000, len(broken) - 3000):
        broken[at] = 0xFF
    log = ReadLog()
    found = read_bytes(tmp_path, bytes(broken) + b"".join(many(6)[1:]), log)
    assert [page.url for page in found] == URLS
    assert [page.fault for page in found] == ["read.damaged"] + [None] * 5
    assert found[0].record_id is not None
    assert log.damage[0]["offset"] == 0


def test_a_wrong_checksum_is_noted_and_the_block_digest_decides(tmp_path: Path) -> None:
    members = many(3)
    wrong = members[1][:-8] + bytes(4) + members[1][-4:]
    log = ReadLog()
    found = read_bytes(tmp_path, members[0] + wrong + members[2], log)
    assert [page.fault for page in found] == [None, None, None]
    assert [d["why"] for d in log.damage] == ["gzip member's checksum is wrong"]

    altered = zlib.decompress(members[1], 31).replace(b"page 1", b"page 7")
    found = read_bytes(tmp_path, members[0] + gzip.compress(altered)[:-8] + members[1][-8:] + members[2])
    assert [page.fault for page in found] == [None, "read.damaged", None]


@pytest.mark.parametrize("compress", [True, False])
def test_a_cut_file_gives_every_record_up_to_the_cut(tmp_path: Path, compress: bool) -> None:
    records = many(4, compress=compress)
    content = b"".join(records)
    starts = [sum(map(len, records[:i])) for i in range(5)]
    for cut in range(1, len(content), 97 if compress else 997):
        log = ReadLog()
        found = read_bytes(tmp_path, content[:cut], log)
        complete = sum(end <= cut for end in starts[1:])
        assert [page.url for page in found][:complete] == URLS[:complete]
        assert len(found) in (complete, complete + 1)
        if cut not in starts and not any(end - 4 <= cut <= end for end in starts):
            assert log.damage


def test_zeros_behind_the_last_member_are_noted(tmp_path: Path) -> None:
    log = ReadLog()
    content = b"".join(many(6))
    assert urls_of(tmp_path, content + bytes(5000), log) == URLS
    assert [(d["offset"], d["why"]) for d in log.damage] == [(len(content), "zero bytes")]


@pytest.mark.parametrize("pack", [b"".join, whole], ids=["plain", "one gzip member"])
@pytest.mark.parametrize("length", [b"10", b"9999", b"99999999", b"99999999999999", b"x", b"-5", b""])
def test_a_wrong_content_length_does_not_hide_the_next_record(tmp_path: Path, pack, length: bytes) -> None:  # type: ignore[no-untyped-def]
    records, log = many(6, compress=False), ReadLog()
    head, _, rest = records[2].partition(b"Content-Length: ")
    records[2] = head + b"Content-Length: " + length + b"\r\n" + rest.partition(b"\r\n")[2]
    whole_page = read_bytes(tmp_path, pack(many(6, compress=False)))[2].raw
    found = read_bytes(tmp_path, pack(records), log)
    assert [page.url for page in found] == URLS
    assert [page.fault for page in found if page.url != URLS[2]] == [None] * 5
    assert log.damage
    if length != b"10":
        assert found[2].raw == whole_page


def test_a_length_beyond_its_member_does_not_move_the_next_record(tmp_path: Path) -> None:
    members, log = many(3), ReadLog()
    text = gzip.decompress(members[1])
    declared = text.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]
    members[1] = gzip.compress(text.replace(b"Content-Length: " + declared, b"Content-Length: 9" + declared, 1))
    found = read_bytes(tmp_path, b"".join(members), log)
    assert [(page.url, page.record_offset, page.record_length) for page in found] == [
        (URLS[i], sum(map(len, members[:i])), len(members[i])) for i in range(3)
    ]
    assert len(log.damage) == 1


def test_a_missing_content_length_reads_to_the_next_record(tmp_path: Path) -> None:
    records = many(6, compress=False)
    head, _, rest = records[2].partition(b"Content-Length: ")
    whole_page = read_bytes(tmp_path, b"".join(records))[2].raw
    records[2] = head + rest.partition(b"\r\n")[2]
    found = read_bytes(tmp_path, b"".join(records))
    assert [page.url for page in found] == URLS
    assert found[2].raw == whole_page


def test_a_page_about_warc_is_not_cut_at_what_looks_like_a_record(tmp_path: Path) -> None:
    inner = record(compress=False)
    outer = record(b"<html><pre>" + inner + b"</pre></html>", url=URLS[0], compress=False)
    found = read_bytes(tmp_path, outer + many(2, compress=False)[1])
    assert [page.url for page in found] == URLS[:2]
    assert inner.decode() in found[0].raw


def test_members_of_one_and_of_many_records_mix(tmp_path: Path) -> None:
    plain, members = many(6, compress=False), many(6)
    log = ReadLog()
    found = read_bytes(
        tmp_path, members[0] + gzip.compress(plain[1] + plain[2] + plain[3]) + members[4] + members[5], log
    )
    assert [page.url for page in found] == URLS
    assert len({page.position for page in found}) == 6
    assert log.damage == []


def test_addresses_that_meet_are_told_apart(tmp_path: Path) -> None:
    # The second record of the first member begins, in the stream, where the second member begins in the file.
    plain, members = many(2, compress=False), many(3)
    padding = b""
    for size in range(20_000):
        noise = random.Random(7).randbytes(size).hex().encode() if size else b""
        first = record(b"<html>" + noise, url="http://e.com/first", compress=False)
        joined = gzip.compress(first + plain[0] + padding, mtime=0)
        missing = len(first) - len(joined)
        if missing >= 12:
            # FEXTRA of the right size moves the second member to the wanted offset.
            extra = missing - 2
            joined = joined[:3] + b"\x04" + joined[4:10] + extra.to_bytes(2, "little") + bytes(extra) + joined[10:]
            break
    assert len(joined) == len(first)
    log = ReadLog()
    found = read_bytes(tmp_path, joined + members[1] + members[2], log)
    assert [page.url for page in found] == ["http://e.com/first", "http://e.com/0", "http://e.com/1", "http://e.com/2"]
    assert len({page.doc_id for page in found}) == 4
    assert any("two records have the address" in d["why"] for d in log.damage)


def test_records_that_run_over_member_borders_are_joined(tmp_path: Path) -> None:
    stream = b"".join(many(6, compress=False))
    blocks = b"".join(gzip.compress(stream[i : i + 777]) for i in range(0, len(stream), 777))
    log = ReadLog()
    found = read_bytes(tmp_path, blocks, log)
    assert [(page.url, page.raw) for page in found] == [(page.url, page.raw) for page in read_bytes(tmp_path, stream)]
    assert log.damage == []


def test_an_arc_line_longer_than_a_look_ahead_is_read(tmp_path: Path) -> None:
    lines = [b"http://e.com/%b 1.2.3.4 20140102030405 text/html 6\n<html>\n" % (b"a" * size) for size in (1, 9000, 2)]
    log = ReadLog()
    assert [len(url or "") for url in urls_of(tmp_path, b"".join(lines), log)] == [14, 9013, 15]
    assert log.damage == []


def test_lf_only_headers_are_read(tmp_path: Path) -> None:
    records = []
    for one in many(3, compress=False):
        head, _, block = one.partition(b"\r\n\r\n")
        records.append(head.replace(b"\r\n", b"\n") + b"\n\n" + block.removesuffix(b"\r\n\r\n") + b"\n\n")
    log = ReadLog()
    assert urls_of(tmp_path, b"".join(records), log) == URLS[:3]
    assert log.damage == []


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", gzip.compress(b"", mtime=0), b"<html><h1>503", gzip.compress(b"<html>", mtime=0), bytes(9000)],
    ids=["empty", "a line", "gzip of nothing", "a page", "gzip of a page", "zeros"],
)
def test_a_file_without_a_record_is_noted(tmp_path: Path, content: bytes) -> None:
    log = ReadLog()
    assert read_bytes(tmp_path, content, log) == []
    assert log.damage[-1]["why"] == "no WARC or ARC record found"


def test_an_endless_header_is_passed_over(tmp_path: Path) -> None:
    endless = b"WARC/1.0\r\n" + b"X: y\r\n" * 200_000
    assert urls_of(tmp_path, endless + b"\r\n\r\n" + b"".join(many(2, compress=False)), ReadLog()) == URLS[:2]
    one_line = b"A" * 3_000_000 + b"\r\n" + b"".join(many(2, compress=False))
    assert [page.url for page in read_bytes(tmp_path, one_line, name="x.warc")] == URLS[:2]


@pytest.mark.slow
def test_the_list_of_damage_is_bounded(tmp_path: Path) -> None:
    log = ReadLog()
    members = many(1)
    read_bytes(tmp_path, (members[0] + b"junk") * 1500, log)
    assert len(log.damage) == 1000
    assert log.damage_left_out == 500


@pytest.mark.slow
def test_records_with_false_lengths_cost_linear_time(tmp_path: Path) -> None:
    # Each says it is 30 MB long; looking through that much for each would be quadratic.
    one = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: 30000000\r\n\r\nx\r\n\r\n"

    def read_many(count: int) -> None:
        assert len(read_bytes(tmp_path, whole([one] * count))) == count

    assert_grows_tamely(read_many, 500, 8_000, 60)  # linear: 16, quadratic: 256


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_any_damage_ends_and_loses_no_untouched_record(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    members = [bytearray(one) for one in many(5)]
    hurt = data.draw(st.integers(0, 4))
    for _ in range(data.draw(st.integers(1, 5))):
        members[hurt][data.draw(st.integers(0, len(members[hurt]) - 1))] = data.draw(st.integers(0, 255))
    untouched = [(sum(map(len, members[:i])), URLS[i]) for i in range(5) if i != hurt]
    found = read_bytes(folder, b"".join(members))
    sound = [(page.record_offset, page.url) for page in found if page.fault is None]
    assert [place for place in sound if place in untouched] == untouched
    assert len({page.doc_id for page in found}) == len(found)


@settings(max_examples=60)
@given(st.binary(max_size=300), st.sampled_from(STARTS))
def test_any_bytes_end(tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes) -> None:
    read_bytes(tmp_path_factory.mktemp("bytes"), start + content)
