"""Looking URLs up in the blocks of a segment, against a list in memory."""

from __future__ import annotations

import gc
import os
import random
import re
import resource
from bisect import bisect_left
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from quern.errors import QuernError
from quern.lineage.index.columns import DamagedIndexError
from quern.lineage.index.hashes import sort_order
from quern.lineage.index.records import Opened
from quern.lineage.index.urls import BLOCK, Urls, write_urls
from support.damage import flip_any

Row = tuple[str | None, str | None, str | None]

ALPHABETS = ("ab", "aé水🐚", "a\x00\x7f\u0080\uffff")


def draw_rows(draw: random.Random, count: int, *, without_surt: float, without_url: float) -> list[Row]:
    """SURT, URL, host, in the order of a segment; many SURTs twice and more, some over several blocks."""
    letters = draw.choice(ALPHABETS)

    def text(longest: int) -> str:
        return "".join(draw.choices(letters, k=draw.randint(0, longest)))

    few = [text(6) for _ in range(3)]
    rows: list[Row] = []
    while len(rows) < count:
        kind = draw.random()
        if kind < without_url:
            rows.append((None, None, None))
        elif kind < without_url + without_surt:
            rows.append((None, draw.choice([*few, text(4)]), None))
        else:
            surt = draw.choice(few) if draw.random() < 0.5 else text(200 if draw.random() < 0.05 else 5)
            rows.append((surt, text(8), draw.choice([None, "", text(3)])))
    return sorted(rows, key=lambda row: [(own is None, (own or "").encode()) for own in row[:2]])


def write(folder: Path, rows: list[Row], draw: random.Random) -> Urls:
    """The rows are handed over in disorder, with the order that mends it."""
    folder.mkdir()
    given = draw.sample(range(len(rows)), len(rows))
    columns = tuple(pa.array([rows[place][kind] for place in given], pa.large_string()) for kind in range(3))
    write_urls(str(folder), columns, np.argsort(np.array(given, np.int64)))  # type: ignore[arg-type]
    return open_urls(folder, rows)


def open_urls(folder: Path, rows: list[Row]) -> Urls:
    with_surt = sum(row[0] is not None for row in rows)
    return Urls(str(folder), len(rows), with_surt, sum(row[1] is not None for row in rows), True)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_what_is_not_held_any_more_is_closed_at_once(tmp_path: Path) -> None:
    """Not when somebody next collects cycles; what was given out stays readable."""
    rows = draw_rows(random.Random(1), 5, without_surt=0, without_url=0)
    write(tmp_path / "urls", rows, random.Random(2))
    opened, given = Opened(3), None
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        for number in range(300):
            found = opened.get(str(number), lambda _: open_urls(tmp_path / "urls", rows))
            assert found.text(0, 0) == (rows[0][0] or "").encode()
            given = given or found
        assert descriptors() - before <= 4 * (3 + 1)
        assert given is not None
        assert given.text(4, 0) == (rows[4][0] or "").encode()
        del opened, given, found
        assert descriptors() == before
    finally:
        gc.enable()


def test_too_many_open_files_are_one_line(tmp_path: Path) -> None:
    rows = draw_rows(random.Random(1), 5, without_surt=0, without_url=0)
    write(tmp_path / "urls", rows, random.Random(2))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    for more in range(2000):
        held = [os.open(os.devnull, os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + more, limit[1]))
        try:
            found: object = open_urls(tmp_path / "urls", rows)
        except QuernError as error:
            found = error
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            os.close(held[0])
        if isinstance(found, Urls):
            break
        assert re.fullmatch(
            r".*/url\w+: cannot be opened \(Too many open files; allow more \(ulimit -n\)\)", str(found)
        )
    assert more >= 4
    assert isinstance(found, Urls)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 7])
def test_look_ups_are_those_of_a_sorted_list(tmp_path: Path, count: int) -> None:
    draw = random.Random(count)
    for case, shares in enumerate([(0, 0), (0.3, 0.2), (1, 0), (0, 1), (0.7, 0.1)]):
        rows = draw_rows(draw, count, without_surt=shares[0], without_url=shares[1])
        urls = write(tmp_path / str(case), rows, draw)
        urls.check()
        surts = [row[0].encode() for row in rows if row[0] is not None]
        plain = [row[1].encode() for row in rows if row[0] is None and row[1] is not None]
        edges = [key for index in range(0, len(surts), BLOCK) for key in surts[max(0, index - 1) : index + 1]]
        for low in {b"", b"\xff", b"zz", *edges, *draw.sample(surts, min(20, len(surts)))}:
            for key in (low, low[:-1], low + b"\0"):
                for high in (key + b"\0", key + b"\xff", b"\xff", key):
                    found = urls.surts_between(key, high)
                    expected = bisect_left(surts, key), max(bisect_left(surts, key), bisect_left(surts, high))
                    assert found == expected, (key, high)
        edges = [key for index in range(0, len(rows), BLOCK) for key in plain[max(0, index - len(surts)) :][:1]]
        for url in {b"", b"zz", *edges, *draw.sample(plain, min(20, len(plain)))}:
            start, stop = urls.without_surt(url)
            assert list(range(start, stop)) == [len(surts) + n for n, own in enumerate(plain) if own == url], url


@pytest.mark.parametrize("count", [1, BLOCK, 3 * BLOCK + 5])
def test_every_text_comes_back_one_at_a_time_and_many_at_once(tmp_path: Path, count: int) -> None:
    draw = random.Random(count)
    rows = draw_rows(draw, count, without_surt=0.2, without_url=0.2)
    urls = write(tmp_path / "urls", rows, draw)
    numbers = np.array(draw.choices(range(count), k=2 * count), np.int64)
    for which in range(3):
        texts = [None if row[which] is None else str(row[which]).encode() for row in rows]
        assert [urls.text(number, which) for number in range(count)] == texts
        assert urls.texts(numbers, which) == [texts[number] for number in numbers]
    assert urls.texts(np.empty(0, np.int64), 0) == []


def test_a_flipped_bit_is_never_part_of_an_answer(tmp_path: Path) -> None:
    draw = random.Random(1)
    rows = draw_rows(draw, 4 * BLOCK + 3, without_surt=0.3, without_url=0.1)
    write(tmp_path / "urls", rows, draw)
    surts = [row[0].encode() for row in rows if row[0] is not None]
    said = 0
    for _ in range(150):
        path = draw.choice(sorted((tmp_path / "urls").iterdir()))
        whole = path.read_bytes()
        flip_any(path, draw)
        try:
            urls = open_urls(tmp_path / "urls", rows)
            for key in draw.sample(surts, 10):
                first = bisect_left(surts, key)
                assert urls.surts_between(key, key + b"\0") == (first, first + surts.count(key))
            assert urls.text(7, 1) == str(rows[7][1]).encode()
        except DamagedIndexError:
            said += 1
        with pytest.raises(DamagedIndexError):
            open_urls(tmp_path / "urls", rows).check()
        path.write_bytes(whole)
    assert said > 30


def test_a_file_that_is_cut_short_or_gone_is_said(tmp_path: Path) -> None:
    draw = random.Random(2)
    rows = draw_rows(draw, 100, without_surt=0, without_url=0)
    write(tmp_path / "urls", rows, draw)
    os.truncate(tmp_path / "urls" / "urls", 10)
    with pytest.raises(DamagedIndexError, match="has 10 bytes, expected"):
        open_urls(tmp_path / "urls", rows)
    (tmp_path / "urls" / "urls").unlink()
    with pytest.raises(DamagedIndexError, match="is missing"):
        open_urls(tmp_path / "urls", rows)


def test_a_sort_by_several_keys_is_lexsort() -> None:
    draw = np.random.default_rng(3)
    for count in (0, 1, 2, 1000):
        for high in (2, 50, 1 << 60):
            keys = [draw.integers(0, high, count).astype(kind) for kind in (np.uint64, np.uint64, np.uint32)]
            assert np.array_equal(sort_order(*keys), np.lexsort(keys[::-1]))
            assert np.array_equal(sort_order(*keys[:2]), np.lexsort(keys[1::-1]))
