from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.exchange import (
    num_parts,
    part_of_key,
    read_array,
    read_part,
    read_parts,
    write_array,
    write_run,
)


def test_a_part_of_a_run_holds_its_records_in_their_order(tmp_path):
    dtype = np.dtype([("key", "<u8"), ("band", "u1")])
    records = np.array([(i, i % 7) for i in range(100)], dtype=dtype)
    part = np.array([(i * 5) % 4 for i in range(100)])
    path = str(tmp_path / "deep" / "run")
    write_run(path, records, part, 6)
    for wanted in range(6):
        expected = [(i, i % 7) for i in range(100) if (i * 5) % 4 == wanted]
        assert read_part(path, wanted, 6, dtype).tolist() == expected
    assert read_parts([path, path], 1, 6, dtype).tolist() == 2 * read_part(path, 1, 6, dtype).tolist()


def test_an_empty_run_has_only_empty_parts(tmp_path):
    path = str(tmp_path / "run")
    write_run(path, np.empty(0, dtype="<i8"), np.empty(0, dtype=np.int64), 3)
    assert [len(read_part(path, part, 3, np.dtype("<i8"))) for part in range(3)] == [0, 0, 0]


def test_runs_and_arrays_live_on_other_stores_too():
    records = np.arange(50, dtype=np.int64)
    write_run("memory://scratch/run", records, records % 3, 3)
    assert read_part("memory://scratch/run", 2, 3, records.dtype).tolist() == list(range(2, 50, 3))
    write_array("memory://scratch/array", records.reshape(25, 2))
    assert (read_array("memory://scratch/array") == records.reshape(25, 2)).all()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 1000))
def test_parts_are_ranges_of_keys(keys, parts):
    part = part_of_key(np.array(sorted(keys), dtype=np.uint64), parts)
    assert part.min() >= 0
    assert part.max() < parts
    assert (np.diff(part) >= 0).all()


def test_parts_are_about_equal():
    keys = np.random.default_rng(0).integers(0, 2**64, 70_000, dtype=np.uint64)
    sizes = np.bincount(part_of_key(keys, 7), minlength=7)
    assert abs(sizes - 10_000).max() < 500


def test_the_number_of_parts_comes_from_the_records_alone():
    assert [num_parts(n, 10) for n in (0, 1, 10, 11, 100)] == [1, 1, 1, 2, 10]
