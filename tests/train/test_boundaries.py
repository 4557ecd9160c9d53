"""Boundaries beside the documents they were made from; built once, in constant memory, by any number of builders."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.errors import InputError
from quern.tokenize.shards import ShardReader
from quern.train.batches import boundaries as module
from quern.train.batches.boundaries import Boundaries, boundaries_path, open_boundaries
from support.damage import flip
from support.train.corpora import Doc, make_shards, write_run


@pytest.fixture
def shards() -> list[list[Doc]]:
    rng = random.Random(3)
    lengths = [[rng.choice((1, 1, 4, 9, 50)) for _ in range(rng.choice((0, 1, 30)))] for _ in range(6)]
    return make_shards(rng, [*lengths, [5, 7]], purged=0.3)


@pytest.fixture
def reader(tmp_path: Path, shards: list[list[Doc]]) -> ShardReader:
    return ShardReader(write_run(tmp_path / "run", {"web": shards})[0])


def marks(shards: list[list[Doc]]) -> list[int]:
    found, start = [], 0
    for doc in (doc for shard in shards for doc in shard):
        found.append(2 * start + doc.purged)
        start += len(doc.tokens)
    return found


def test_the_file_holds_start_and_state_of_every_document(
    tmp_path: Path, reader: ShardReader, shards: list[list[Doc]]
) -> None:
    (made,) = open_boundaries([reader], str(tmp_path / "index"))
    assert np.fromfile(made.path, "<i8").tolist() == marks(shards)
    assert len(made) == reader.num_documents
    assert [path for path in os.listdir(tmp_path / "index") if path[0] != "."] == [os.path.basename(made.path)]


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 64, 300])
def test_the_documents_of_a_window_are_those_that_touch_it(
    tmp_path: Path, reader: ShardReader, shards: list[list[Doc]], seq_len: int
) -> None:
    (made,) = open_boundaries([reader], str(tmp_path / "index"))
    starts = np.random.default_rng(1).permutation(reader.total_tokens - seq_len)  # in any order, anywhere
    documents = made.between(starts, seq_len)
    edges = np.cumsum([0, *documents.counts_N])
    spans = [
        (mark >> 1, end >> 1, mark & 1) for mark, end in zip(marks(shards), [*marks(shards)[1:], 1 << 40], strict=True)
    ]
    for row, start in enumerate(starts.tolist()):
        part = slice(edges[row], edges[row + 1])
        expected = [(a - start, bool(purged)) for a, b, purged in spans if a <= start + seq_len and b > start]
        assert list(zip(documents.starts_M[part].tolist(), documents.purged_M[part].tolist(), strict=True)) == expected


def test_no_windows_have_no_documents(tmp_path: Path, reader: ShardReader) -> None:
    (made,) = open_boundaries([reader], str(tmp_path))
    found = made.between(np.empty(0, np.int64), 4)
    assert [len(found.counts_N), len(found.starts_M), len(found.purged_M)] == [0, 0, 0]


def test_a_source_without_documents_has_no_boundaries(tmp_path: Path) -> None:
    reader = ShardReader(write_run(tmp_path / "run", {"web": []})[0])
    assert len(Boundaries.open(reader, str(tmp_path / "index"))) == 0
    assert len(Boundaries.open(reader, str(tmp_path / "index"))) == 0


def test_what_is_built_is_not_built_again(tmp_path: Path, reader: ShardReader, monkeypatch: pytest.MonkeyPatch) -> None:
    open_boundaries([reader], str(tmp_path / "index"))
    monkeypatch.setattr(module, "_read_marks", lambda *_: pytest.fail("built again"))
    assert len(open_boundaries([reader], str(tmp_path / "index"))[0]) == reader.num_documents


def test_boundaries_of_another_version_are_not_used(tmp_path: Path, shards: list[list[Doc]]) -> None:
    changed = [
        [Doc((299,) * len(doc.tokens), True) if doc is shards[-1][0] else doc for doc in shard] for shard in shards
    ]
    old, new = (ShardReader(write_run(tmp_path / name, {"web": s})[0]) for name, s in (("a", shards), ("b", changed)))
    index = str(tmp_path / "index")
    open_boundaries([old], index)
    assert boundaries_path(old, index) != boundaries_path(new, index)
    assert np.fromfile(open_boundaries([new], index)[0].path, "<i8").tolist() == marks(changed) != marks(shards)


def test_a_file_cut_short_is_built_anew(tmp_path: Path, reader: ShardReader, shards: list[list[Doc]]) -> None:
    path = open_boundaries([reader], str(tmp_path / "index"))[0].path
    os.truncate(path, 16)
    open_boundaries([reader], str(tmp_path / "index"))
    assert np.fromfile(path, "<i8").tolist() == marks(shards)


def test_builders_at_the_same_time_build_once_and_all_read_the_whole_file(
    tmp_path: Path, reader: ShardReader, shards: list[list[Doc]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    read = module._read_marks

    def slowly(reader: ShardReader, chosen: None) -> Iterator[np.ndarray]:
        built.append(1)
        yield from read(reader, chosen)

    monkeypatch.setattr(module, "_read_marks", slowly)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: Boundaries.open(reader, str(tmp_path / "index"))._marks.tolist(), range(8)))
    assert found == [marks(shards)] * 8
    assert len(built) == 1


def test_builders_that_cannot_lock_do_no_harm(
    tmp_path: Path, reader: ShardReader, shards: list[list[Doc]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: Boundaries.open(reader, str(tmp_path / "index"))._marks.tolist(), range(8)))
    assert found == [marks(shards)] * 8


def test_a_damaged_spans_file_is_refused_and_leaves_nothing(tmp_path: Path, reader: ShardReader) -> None:
    path = os.path.join(reader.path, reader.shards[-1].spans)
    flip(path, 20)
    with pytest.raises(InputError, match=rf"{path}: is damaged: its SHA-256 is not the expected"):
        open_boundaries([reader], str(tmp_path / "index"))
    assert storage.list_files(str(tmp_path / "index")) in ([], [str(tmp_path / "index" / ".web.lock")])
    os.unlink(path)
    with pytest.raises(InputError, match=rf"{path}: is missing"):
        open_boundaries([reader], str(tmp_path / "index"))


@pytest.mark.parametrize(
    ("starts", "lengths", "message"),
    [
        ([0, 6], [5, 7], "row 1: expected a document of 1 token or more right after the last one"),
        ([0, 5, 5], [5, 0, 7], "row 1: expected a document of 1 token or more"),
        ([1, 5], [4, 7], "row 0: expected"),
        ([0], [5], "expected 2 documents of 12 tokens together, got 1 of 5"),
        ([0, 5], [5, 8], "expected 2 documents of 12 tokens together, got 2 of 13"),
    ],
)
def test_spans_that_do_not_cover_their_shard_are_refused(
    tmp_path: Path, reader: ShardReader, starts: list[int], lengths: list[int], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = os.path.join(reader.path, reader.shards[-1].spans)
    table = pq.read_table(path)
    columns = {"start": starts, "length": lengths, "purged": [False] * len(starts)}
    columns["doc_id"] = [b"0" * 16] * len(starts)
    pq.write_table(pa.table(columns, schema=table.schema), path)
    monkeypatch.setattr(storage, "sha256", lambda path: next(s.spans_sha256 for s in reader.shards if s.spans in path))
    with pytest.raises(InputError, match=f"{path}: {message}"):
        open_boundaries([reader], str(tmp_path / "index"))


@pytest.mark.slow
def test_building_takes_the_memory_of_a_part_of_a_shard(tmp_path: Path) -> None:
    num = 1 << 20
    doc = Doc((299,))
    reader = ShardReader(write_run(tmp_path / "run", {"web": [[doc] * num]})[0])
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        open_boundaries([reader], str(tmp_path / "index"))
    finally:
        pa.set_memory_pool(before)
    assert 0 < pool.max_memory() < num * 17 / 3
