"""A damaged gzip member costs itself: every member beside it is found, once, wherever its damage leads the decoder."""

from __future__ import annotations

import gzip
import io
import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest

from quern.data_pipeline.sources import ReadLog
from quern.data_pipeline.sources.containers import gzip_members
from quern.data_pipeline.sources.containers.gzip_members import GzipMembers, Signs
from quern.data_pipeline.sources.containers.gzip_search import find_member
from quern.data_pipeline.sources.containers.record_signs import starts
from support.data_pipeline.sources_warc_files import damages, many, pages, read_bytes, record, told


def member(content: bytes, level: int = 9, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    """One gzip member, of the kind of deflate blocks asked for."""
    deflate = zlib.compressobj(level, zlib.DEFLATED, 31, 9, strategy)
    return deflate.compress(content) + deflate.flush()


FIXED = {"strategy": zlib.Z_FIXED}
STORED = {"level": 0}
CODED: dict[str, int] = {}


def small(number: int, **how: int) -> bytes:
    """A member with one small record of its own."""
    page = record(b"<html>page %d, %s</html>" % (number, b"abc" * number), url=f"http://e.com/{number}", compress=False)
    return member(page, **how)


def untouched(folder: Path, content: bytes, wanted: list[tuple[str, int]]) -> None:
    """Each (url, offset) is there once, sound; no other sound page is."""
    found = read_bytes(folder, content)
    sound = [(page.url, page.record_offset) for page in found if page.fault is None]
    assert [place for place in sound if place in wanted] == wanted
    urls = [url for url, _ in sound]
    assert all(urls.count(url) == 1 for url, _ in wanted)
    assert len({page.doc_id for page in found}) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("how", [FIXED, CODED, STORED], ids=["fixed codes", "own codes", "stored"])
def test_any_flipped_bit_of_a_member_leaves_those_behind_it(tmp_path: Path, how: dict[str, int]) -> None:
    members = [small(number, **how) for number in range(3)]
    starts_at = [sum(map(len, members[:i])) for i in range(3)]
    wanted = [(f"http://e.com/{i}", starts_at[i]) for i in (1, 2)]
    for bit in range(0, 8 * len(members[0]), 7):
        broken = bytearray(members[0])
        broken[bit // 8] ^= 1 << bit % 8
        untouched(tmp_path, bytes(broken) + members[1] + members[2], wanted)


def stored(text: bytes, size: int) -> bytes:
    """A member of one stored block that says to be ``size`` bytes long and is ``text``, without a trailer."""
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x01" + struct.pack("<HH", size, size ^ 0xFFFF) + text


def first_record() -> bytes:
    return record(b"<html>" + b"first " * 50 + b"</html>", url="http://e.com/first", compress=False)


@pytest.mark.parametrize("num_swallowed", [1, 2, 3])
def test_members_swallowed_to_the_very_end_of_the_last_are_given_back(tmp_path: Path, num_swallowed: int) -> None:
    # The decoder ends where a member ends: behind it stands a magic, or the file's end, as if nothing were amiss.
    text, others = first_record(), many(3)
    trailer = struct.pack("<II", zlib.crc32(text), len(text))
    size = len(text + trailer + b"".join(others[:num_swallowed])) - 8
    first = stored(text + trailer, size)
    wanted = [(f"http://e.com/{i}", len(first) + sum(map(len, others[:i]))) for i in range(3)]
    untouched(tmp_path, first + b"".join(others), wanted)
    # A damaged one among those that were swallowed does not cost the sound ones behind it.
    hurt = bytearray(b"".join(others))
    hurt[len(others[0]) // 2] ^= 0xFF
    untouched(tmp_path, first + bytes(hurt), wanted[1:])


def test_a_member_that_swallows_the_rest_of_the_file_gives_it_back(tmp_path: Path) -> None:
    # A stored block that is said to be longer than it is: the decoder meets the end of the file before any damage.
    text, others, log = first_record(), many(3), ReadLog()
    first = stored(text + struct.pack("<II", zlib.crc32(text), len(text)), 60_000)
    found = read_bytes(tmp_path, first + b"".join(others), log)
    assert [page.url for page in found] == ["http://e.com/first", *(f"http://e.com/{i}" for i in range(3))]
    assert (0, "the file ends inside this gzip member") in damages(log)
    places = [len(first) + sum(map(len, others[:i])) for i in range(3)]
    assert [page.record_offset for page in found] == [0, *places]


def test_what_a_member_swallowed_is_no_part_of_its_page(tmp_path: Path) -> None:
    """The page that is damaged is as long as its own bytes made it, not longer by those of its neighbour."""
    text = first_record()
    first = stored(text, 60_000)
    members = GzipMembers(io.BytesIO(first + many(1)[0]), lambda *_: None, Signs(starts, starts, starts))
    assert members.advance()
    content = b"".join(iter(members.piece, b""))
    assert content[: len(content) - members.excess] == text
    assert members.advance()
    assert members.start == len(first)


def test_records_of_a_swallowed_member_are_read_once(tmp_path: Path) -> None:
    # Stored, they stand as they are in the content of the member that swallowed them, too.
    text, plain = first_record(), many(4, compress=False)
    pair = member(plain[0] + plain[1], **STORED)
    for size in (len(text + pair) - 8, 50_000):
        found = read_bytes(tmp_path, stored(text, size) + pair + member(plain[2] + plain[3], **STORED))
        assert [page.url for page in found] == ["http://e.com/first", *(f"http://e.com/{i}" for i in range(4))]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("name", ["x.warc", "x.warc.gz", "x"])
def test_gzip_is_known_by_its_members_when_its_first_byte_is_damaged(tmp_path: Path, name: str, at: int) -> None:
    members = many(4)
    content = bytearray(b"".join(members))
    content[at] ^= 0x41
    log = ReadLog()
    found = read_bytes(tmp_path, bytes(content), log, name)
    wanted = [(f"http://e.com/{i}", sum(map(len, members[:i]))) for i in range(4)]
    # Nothing but the header is damaged: the first record is readable, and read.
    assert [(page.url, page.record_offset) for page in found] == wanted
    assert [page.fault for page in found] == [None] * 4
    assert damages(log) == {(0, "gzip member's header is damaged")}


@pytest.mark.parametrize("name", ["x.warc", "x.warc.gz"])
def test_gzip_is_known_by_its_members_when_the_first_is_lost(tmp_path: Path, name: str) -> None:
    members = many(4)
    content = random.Random(5).randbytes(len(members[0])) + b"".join(members[1:])
    found = read_bytes(tmp_path, content, name=name)
    assert [page.url for page in found] == [f"http://e.com/{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    "junk", [b"\x1f\x8b\x08" * 9, b"filedesc://", b"\x28\xb5\x2f\xfd" * 9, b"WARC/1.0\r\n", b"BZh9"]
)
def test_junk_that_looks_like_the_beginning_of_something_hides_no_member(tmp_path: Path, junk: bytes) -> None:
    members = many(3)
    for before in range(3):
        content = b"".join([*members[:before], junk, *members[before:]])
        found = read_bytes(tmp_path, content)
        shift = [len(junk) if i >= before else 0 for i in range(3)]
        wanted = [(f"http://e.com/{i}", shift[i] + sum(map(len, members[:i]))) for i in range(3)]
        assert [(page.url, page.record_offset) for page in found if page.fault is None] == wanted


def test_a_plain_file_that_holds_a_packed_one_is_plain_when_its_first_byte_is_damaged(tmp_path: Path) -> None:
    packed = record(b"".join(many(2)), http={"Content-Type": "application/gzip"}, compress=False)
    plain = many(3, compress=False)
    content = b"X" + b"".join([plain[0], plain[1], packed, plain[2]])[1:]
    found = read_bytes(tmp_path, content, name="x.warc")
    assert [page.url for page in found if page.fault is None] == ["http://e.com/1", "http://e.com/2"]


def test_a_packed_crawl_inside_a_member_with_a_wrong_checksum_stays_content(tmp_path: Path) -> None:
    inner = b"".join(many(3))
    outer = member(
        record(inner, url="http://e.com/outer", http={"Content-Type": "application/gzip"}, compress=False), **STORED
    )
    assert inner[:200] in outer
    wrong = outer[:-8] + bytes(4) + outer[-4:]
    found = read_bytes(tmp_path, wrong + many(5)[4])
    assert [page.url for page in found] == ["http://e.com/outer", "http://e.com/4"]


def test_members_that_end_inside_records_are_taken_up_again_behind_damage(tmp_path: Path) -> None:
    plain = many(8, compress=False)
    stream, size = b"".join(plain), 900
    blocks = [gzip.compress(stream[i : i + size], mtime=0) for i in range(0, len(stream), size)]
    whole_pages = {page.url: page.raw for page in read_bytes(tmp_path, b"".join(blocks))}
    assert len(whole_pages) == 8
    blocks[3] = blocks[3][:20] + b"\xff" * (len(blocks[3]) - 20)
    hurt = range(3 * size, 4 * size)
    begins = [sum(map(len, plain[:i])) for i in range(9)]
    safe = [i for i in range(8) if begins[i + 1] <= hurt.start or begins[i] >= hurt.stop]
    found = {page.url: page.raw for page in read_bytes(tmp_path, b"".join(blocks)) if page.fault is None}
    assert [found.get(f"http://e.com/{i}") for i in safe] == [whole_pages[f"http://e.com/{i}"] for i in safe]


def test_plain_arc_is_read_behind_a_damaged_first_line(tmp_path: Path) -> None:
    def document(number: int) -> bytes:
        page = b"<html>%d</html>" % number
        return b"http://e.com/%d 1.2.3.4 20140102030405 text/html %d\n%s\n" % (number, len(page), page)

    first = b"filedesc://x.arc 0.0.0.0 20140102030405 text/plain 8\n1 0 x\nab\n\n"
    content = first + b"".join(map(document, range(4)))
    assert len(read_bytes(tmp_path, content, name="x.arc")) == 4
    found = read_bytes(tmp_path, b"\xff" + content[1:], name="x.arc")
    assert [page.url for page in found] == [f"http://e.com/{i}" for i in range(4)]
    middle = content.index(b"http://e.com/2")
    found = read_bytes(tmp_path, content[:middle] + b"\xff" + content[middle + 1 :], name="x.arc")
    assert [page.url for page in found if page.fault is None] == [f"http://e.com/{i}" for i in (0, 1, 3)]
    packed = b"".join(map(gzip.compress, [first, *map(document, range(4))]))
    hurt = bytearray(packed)
    hurt[25] ^= 0xFF
    assert [page.url for page in read_bytes(tmp_path, bytes(hurt), name="x.arc.gz")] == [
        f"http://e.com/{i}" for i in range(4)
    ]


class Reads(io.BytesIO):
    """Counts the bytes that are read."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


def false_magics() -> dict[str, bytes]:
    header = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
    opening = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_FIXED)
    start = opening.compress(b"WARC/1.0\r\n") + opening.flush(zlib.Z_SYNC_FLUSH)
    return {
        "magics": b"\x1f\x8b\x08" * 50_000,
        "magics without flags": b"\x1f\x8b\x08\0" * 40_000,
        "members of nothing": (header + b"\x03\0" + bytes(8)) * 8_000,
        "beginnings of members": (header + start) * 5_000,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(false_magics()))
def test_false_magics_cost_no_more_than_their_bytes(tmp_path: Path, kind: str) -> None:
    """What is read of the file grows with the file, not with the number of magics in it."""
    counts = []
    for times in (1, 4):
        file = Reads(many(1)[0] + b"junk" + false_magics()[kind] * times + many(2)[1])
        if kind != "beginnings of members":
            assert find_member(file, 2000, None, starts, lambda: None) is not None
        else:
            members = GzipMembers(file, lambda *_: None, Signs(starts, starts, starts))
            while members.advance():
                while members.piece():
                    pass
        counts.append(file.count)
    assert counts[1] < 8 * counts[0]


@pytest.mark.slow
def test_a_member_that_unpacks_to_much_is_not_held(tmp_path: Path) -> None:
    head = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: 120000000\r\n\r\n"
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = deflate.compress(head) + b"".join(deflate.compress(bytes(1 << 20)) for _ in range(120)) + deflate.flush()
    path = tmp_path / "x.warc.gz"
    path.write_bytes(packed + many(2)[1])
    tracemalloc.start()
    found = pages(path, max_bytes=1 << 20)
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()
    assert [page.fault for page in found] == ["read.too_large", None]


def test_the_budget_of_rereading_ends_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members nested by thousands, each of which leads to the end of the file before it fails."""
    monkeypatch.setattr(gzip_members, "REREAD_BYTES", 1 << 20)
    opening = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_FIXED)
    start = opening.compress(b"WARC/1.0\r\n") + opening.flush(zlib.Z_SYNC_FLUSH)
    one = b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + start
    block, each = 60_000, 100
    size = block + 5
    content = bytearray()
    for _ in range(6):  # stored blocks end to end; inside each, members whose own first block leads to the next
        inside = bytearray(block)
        for at in range(0, block - each, each):
            left = block - at - len(one) - 5
            inside[at : at + len(one) + 5] = one + b"\0" + struct.pack("<HH", left, left ^ 0xFFFF)
        content += b"\0" + struct.pack("<HH", block, block ^ 0xFFFF) + inside
    file = Reads(bytes(one + content + b"\x07" + many(2)[1]))
    members = GzipMembers(file, lambda *_: None, Signs(starts, starts, starts))
    last = 0
    while members.advance():
        assert members.start >= last
        last = members.start
        while members.piece():
            pass
    assert members.reread > 1 << 20
    assert file.count < 60 * (1 << 20), f"{file.count} bytes read of {6 * size}"
    assert last == len(one) + len(content) + 1, "the sound member at the end is found all the same"


@pytest.mark.slow
@pytest.mark.parametrize("compress", [True, False])
def test_a_reader_that_passes_over_much_says_that_it_is_at_work(tmp_path: Path, compress: bool) -> None:
    # The clock of a page counts from the last sign of work: passing over 12 MB on a slow store is no page's fault.
    one, two = many(2, compress=compress)
    calls: list[int] = []
    for between in (bytes(12 << 20), b"\x1f\x8b\x09" * (4 << 20)):
        calls.clear()
        read_bytes(tmp_path, one + between + two, ReadLog(tick=lambda: calls.append(1)), "x.warc")
        assert len(calls) >= 12
    large = record(bytes(12 << 20), kind="metadata", compress=compress)
    calls.clear()
    read_bytes(tmp_path, one + large + two, ReadLog(tick=lambda: calls.append(1)), "x.warc", max_bytes=1 << 20)
    assert len(calls) >= 10


def test_reading_twice_gives_the_same(tmp_path: Path) -> None:
    content = bytearray(b"".join(many(6)))
    for at in range(50, len(content), 400):
        content[at] ^= 0x55
    logs = ReadLog(), ReadLog()
    found = [told(read_bytes(tmp_path, bytes(content), log)) for log in logs]
    assert found[0] == found[1]
    assert damages(logs[0]) == damages(logs[1])
