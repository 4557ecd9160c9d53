from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.exchange import (
    Exchange,
    Writer,
    bucket_of_key,
    bucket_of_rank,
    cuts,
    num_buckets,
    read_records,
)

RECORD = np.dtype([("key", "<u8"), ("band", "u1")])


def written(folder: str, buckets: int, writers: list[list[tuple[int, int]]], max_records: int = 64) -> Exchange:
    """Every writer's (bucket, value) records, given in pieces of uneven size."""
    left = []
    for index, rows in enumerate(writers):
        writer = Writer(folder, index, buckets, RECORD, max_records)
        for start in range(0, len(rows), 37):
            piece = rows[start : start + 37]
            records = np.array([(value, value % 7) for _, value in piece], dtype=RECORD)
            writer.add(records, np.array([bucket for bucket, _ in piece]))
        left.append(writer.close())
    return Exchange(folder, tuple(each.files for each in left), sum(each.counts for each in left))


@pytest.mark.slow
@pytest.mark.parametrize("store", ["", "memory://scratch"])
def test_a_range_of_buckets_is_read_back_and_nothing_else(tmp_path, store):
    rows = [[((value * 5) % 6, value) for value in range(start, start + 130)] for start in (0, 1000)]
    exchange = written(f"{store or tmp_path}/deep/e", 6, [rows[0], [], rows[1]])
    assert exchange.files == (3, 0, 3)  # 64 records a file
    assert exchange.records == 260
    for first in range(6):
        for last in range(first + 1, 7):
            part = exchange.slice(first, last)
            expected = sorted((v, v % 7) for each in rows for bucket, v in each if first <= bucket < last)
            assert sorted(part.read(RECORD).tolist()) == expected
            assert part.records == len(expected)
            for most in (1, 50, 10**6):
                blocks = list(part.blocks(RECORD, most))
                assert [len(block) for block in blocks[:-1]] == [most] * (len(blocks) - 1)
                assert 0 < len(blocks[-1]) <= most
                assert np.concatenate(blocks).tolist() == part.read(RECORD).tolist()


def test_records_of_a_bucket_stay_in_the_order_they_were_written(tmp_path):
    """Two exchanges written side by side can be read side by side."""
    exchange = written(str(tmp_path), 3, [[(value % 3, value) for value in range(500)]])
    assert exchange.slice(1, 2).read(RECORD)["key"].tolist() == list(range(1, 500, 3))


def test_a_writer_holds_no_more_than_a_file(tmp_path):
    writer = Writer(str(tmp_path), 0, 2, RECORD, 100)
    writer.add(np.zeros(1050, dtype=RECORD), 1)
    assert len(list(tmp_path.iterdir())) == 10
    assert (writer.close().files, len(list(tmp_path.iterdir()))) == (11, 11)


def test_there_may_be_more_buckets_than_16_bits_tell_apart(tmp_path):
    """Of shards, verification groups and ranges there are as many as the run needs."""
    rows = [[(bucket, bucket) for bucket in (3, 65_535, 65_536, 65_539, 69_999)]]
    exchange = written(str(tmp_path), 70_000, rows)
    assert np.flatnonzero(exchange.counts).tolist() == [3, 65_535, 65_536, 65_539, 69_999]
    for bucket in (3, 65_536, 65_539):
        assert exchange.slice(bucket, bucket + 1).read(RECORD)["key"].tolist() == [bucket]


def test_an_empty_exchange_has_no_slices(tmp_path):
    exchange = written(str(tmp_path), 3, [[], []])
    assert exchange.slices(10) == []
    assert exchange.slice(0, 3).read(RECORD).tolist() == []
    assert list(exchange.slice(1, 2).blocks(RECORD, 5)) == []


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 40))
def test_cuts_cover_everything_once_and_none_is_too_large_unless_it_is_one(counts, most):
    ranges = cuts(np.array(counts, dtype=np.int64), most)
    covered = [index for first, last in ranges for index in range(first, last)]
    assert covered == sorted(set(covered))
    assert all(counts[index] == 0 for index in set(range(len(counts))) - set(covered))
    for first, last in ranges:
        assert sum(counts[first:last]) > 0
        assert sum(counts[first:last]) <= most or last == first + 1


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 1000))
def test_buckets_are_ranges_of_keys(keys, buckets):
    bucket = bucket_of_key(np.array(sorted(keys), dtype=np.uint64), buckets)
    assert bucket.min() >= 0
    assert bucket.max() < buckets
    assert (np.diff(bucket) >= 0).all()


def test_buckets_are_about_equal():
    keys = np.random.default_rng(0).integers(0, 2**64, 70_000, dtype=np.uint64)
    for bucket in (bucket_of_key(keys, 7), bucket_of_rank(np.arange(70_000), 7)):
        assert abs(np.bincount(bucket, minlength=7) - 10_000).max() < 500


def test_the_number_of_buckets_comes_from_the_records_alone():
    assert [num_buckets(n, 10) for n in (0, 1, 10, 11, 100, 10**9)] == [1, 1, 1, 8, 40, 1 << 14]


def test_some_records_of_a_file_are_read(tmp_path):
    (tmp_path / "r").write_bytes(np.arange(10, dtype="<i8").tobytes())
    assert read_records(str(tmp_path / "r"), np.dtype("<i8"), 3, 6).tolist() == [3, 4, 5]
