"""What a corpus says of its sources, what it refuses, what verification finds."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern import storage
from quern.errors import InputError
from quern.train.batches.corpus import Corpus, share_files
from support.damage import flip
from support.train.corpora import EOT, make_shards, write_run

SOURCES = {
    "books": make_shards(random.Random(1), [[30, 20], [40]]),
    "web": make_shards(random.Random(2), [[9, 9, 9], [], [70]]),
}
FILES = 11
"""Ranks, and two files of each of five shards."""


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return write_run(tmp_path / "run", SOURCES, version=3, since={"web": 2})


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_corpus_tells_what_its_sources_are(tmp_path: Path, paths: list[str]) -> None:
    corpus = Corpus(paths, 8)
    assert corpus.windows == (11, 12)  # (90 - 1) // 8, (97 - 1) // 8
    assert corpus.ids == ("r1/books/1", "r1/web/2")
    assert corpus.versions == (3, 3)
    assert (corpus.encoding, corpus.vocab_size, corpus.eot_id) == ("own", 300, EOT)
    assert corpus.ranks_path == str(tmp_path / "run" / "tokens" / "encoding.tiktoken")


def test_the_fingerprint_is_of_what_the_tokens_are(tmp_path: Path, paths: list[str]) -> None:
    again = write_run(tmp_path / "elsewhere", SOURCES, run_id="r2")
    other = write_run(tmp_path / "other", {**SOURCES, "web": [[*SOURCES["web"][0][:-1], SOURCES["books"][0][0]]]})
    fingerprint = Corpus(paths, 8).fingerprint
    assert Corpus(again, 8).fingerprint == Corpus(paths, 16).fingerprint == fingerprint
    assert Corpus(other, 8).fingerprint != fingerprint
    assert Corpus(paths[::-1], 8).fingerprint != fingerprint


def test_runs_of_one_encoding_go_together_and_others_do_not(tmp_path: Path, paths: list[str]) -> None:
    more = write_run(tmp_path / "more", SOURCES, run_id="r2")
    assert Corpus([paths[0], more[1]], 8).ids == ("r1/books/1", "r2/web/1")
    other = write_run(tmp_path / "other", SOURCES, run_id="r3", ranks=b"AQ== 0\n")
    with pytest.raises(InputError, match=r"other/tokens/VERSION.json: encoding.sha256 is '\w+' for source 'web', "
                       r"expected '\w+' as in .*run/tokens/VERSION.json"):  # fmt: skip
        Corpus([paths[0], other[1]], 8)
    wider = write_run(tmp_path / "wider", SOURCES, run_id="r4", vocab_size=301)
    with pytest.raises(InputError, match=r"encoding.vocab_size is 301 for source 'web', expected 300"):
        Corpus([paths[0], wider[1]], 8)


def test_tokens_of_16_and_32_bits_go_together(tmp_path: Path, paths: list[str]) -> None:
    wide = write_run(tmp_path / "wide", SOURCES, run_id="r2", dtype="uint32")
    corpus = Corpus([paths[0], wide[1]], 8)
    assert [reader.dtype.name for reader in corpus.readers] == ["uint16", "uint32"]


def test_one_source_given_twice_is_refused(tmp_path: Path, paths: list[str]) -> None:
    os.symlink(tmp_path / "run", tmp_path / "link")
    with pytest.raises(InputError, match=r"link/tokens/web: is the same data as .*run/tokens/web \(r1/web/2\)"):
        Corpus([*paths, str(tmp_path / "link" / "tokens" / "web")], 8)


def test_a_source_too_short_for_a_window_is_refused(paths: list[str]) -> None:
    assert Corpus(paths, 89).windows == (1, 1)
    with pytest.raises(InputError, match=r"books: has 90 tokens; seq_len 90 needs 91 or more"):
        Corpus(paths, 90)


def test_a_vocabulary_wider_than_the_files_integers_is_refused(tmp_path: Path) -> None:
    fits = write_run(tmp_path / "fits", SOURCES, vocab_size=1 << 16)
    assert Corpus(fits, 8).vocab_size == 1 << 16
    paths = write_run(tmp_path / "run", SOURCES, vocab_size=(1 << 16) + 1)
    with pytest.raises(
        InputError, match=r"manifest.json: vocab_size: expected 1 to 65536, which uint16 holds, got 65537"
    ):
        Corpus(paths, 8)


@pytest.mark.parametrize(
    ("field", "own", "value"),
    [("name", "encoding", "gpt2"), ("sha256", "ranks_sha256", "0"), ("vocab_size", "vocab_size", 299),
     ("dtype", "dtype", "uint32"), ("eot_id", "eot_id", 7)],
)  # fmt: skip
def test_a_version_that_disagrees_with_a_manifest_is_refused(
    tmp_path: Path, paths: list[str], field: str, own: str, value: Any
) -> None:
    edit(tmp_path / "run" / "tokens" / "VERSION.json", lambda version: version["encoding"].update({field: value}))
    with pytest.raises(InputError, match=rf"books/manifest.json: {own}: expected {value!r} as in VERSION.json, got "):
        Corpus(paths, 8)
    edit(tmp_path / "run" / "tokens" / "VERSION.json", lambda version: version["encoding"].pop(field))
    with pytest.raises(InputError, match=rf"VERSION.json: encoding.{field}: is missing"):
        Corpus(paths, 8)


@pytest.mark.parametrize("name", ["web/shard_00002.bin", "web/shard_00000.spans.parquet", "books/manifest.json",
                                  "encoding.tiktoken", "VERSION.json"])  # fmt: skip
def test_a_missing_file_is_refused_by_name(tmp_path: Path, paths: list[str], name: str) -> None:
    (tmp_path / "run" / "tokens" / name).unlink()
    with pytest.raises(InputError, match=rf"tokens/{name}: "):
        Corpus(paths, 8)


def test_a_path_that_is_no_source_is_refused_with_what_it_should_be(tmp_path: Path, paths: list[str]) -> None:
    for wrong in (tmp_path / "run", tmp_path / "run" / "tokens"):
        with pytest.raises(
            InputError, match=rf"VERSION\.json: no such file; expected '{wrong}' to be a folder RUN/tok"
        ):
            Corpus([str(wrong)], 8)
    with pytest.raises(InputError, match="the corpus version has no source 'wiki'"):
        Corpus([str(tmp_path / "run" / "tokens" / "wiki")], 8)


def test_a_run_without_identity_is_refused(tmp_path: Path, paths: list[str]) -> None:
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(InputError, match=r"run/run.json: id: expected the identity of a data run, got None"):
        Corpus(paths, 8)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(InputError, match=r"run/run.json: no such file"):
        Corpus(paths, 8)


def test_no_sources_and_no_window_are_refused(paths: list[str]) -> None:
    with pytest.raises(InputError, match="data: expected at least one source"):
        Corpus([], 8)
    with pytest.raises(InputError, match="seq_len: expected an integer ≥ 1, got 0"):
        Corpus(paths, 0)


# ---- verification


def test_a_whole_corpus_is_read_once_and_then_known(tmp_path: Path, paths: list[str]) -> None:
    cache = str(tmp_path / "train" / "verified.json")
    corpus = Corpus(paths, 8)
    first = corpus.verify(cache_path=cache)
    names = [path for path in storage.list_files(str(tmp_path / "run" / "tokens")) if not path.endswith(".json")]
    assert sorted(first) == sorted(names)
    assert len(first) == FILES
    assert corpus.verify(cache_path=cache) == []
    assert Corpus(paths, 8).verify() == first
    (tmp_path / "train" / "verified.json").write_text("[torn")
    assert corpus.verify(cache_path=cache) == first


@pytest.mark.parametrize(
    "name", ["web/shard_00002.bin", "books/shard_00001.bin", "web/shard_00000.spans.parquet", "encoding.tiktoken"]
)
def test_an_altered_file_of_equal_size_is_found(tmp_path: Path, paths: list[str], name: str) -> None:
    cache, path = str(tmp_path / "verified.json"), tmp_path / "run" / "tokens" / name
    Corpus(paths, 8).verify(cache_path=cache)
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a careless copy leaves it
    corpus = Corpus(paths, 8)
    for _ in range(2):
        with pytest.raises(InputError, match=rf"tokens/{name}: is damaged: its SHA-256 is not the expected"):
            corpus.verify(cache_path=cache)
    found = 0
    for rank in range(4):
        try:
            corpus.verify(rank, 4, cache)
        except InputError:
            found += 1
    assert found == 1
    flip(path)
    assert corpus.verify(cache_path=cache)


@pytest.mark.parametrize("name", ["web/manifest.json", "VERSION.json"])
def test_lists_that_change_after_opening_are_found(tmp_path: Path, paths: list[str], name: str) -> None:
    corpus, file = Corpus(paths, 8), tmp_path / "run" / "tokens" / name

    def change(value: dict[str, Any]) -> None:
        shards = value["shards"] if "shards" in value else value["sources"]["web"]["shards"]
        shards[0]["sha256"] = "0" * 64

    edit(file, change)
    with pytest.raises(InputError, match=rf"tokens/{name}: .*changed"):
        corpus.verify()
    with pytest.raises(InputError):
        Corpus(paths, 8)


def test_a_later_version_is_told_apart(tmp_path: Path, paths: list[str]) -> None:
    corpus = Corpus(paths, 8)
    edit(tmp_path / "run" / "tokens" / "VERSION.json", lambda version: version.update(version=4))
    with pytest.raises(InputError, match=r"VERSION.json: version: expected 3 with source 'books'.*got 4"):
        corpus.verify()


def test_a_shard_that_is_gone_is_named(tmp_path: Path, paths: list[str]) -> None:
    corpus = Corpus(paths, 8)
    (tmp_path / "run" / "tokens" / "web" / "shard_00002.bin").unlink()
    with pytest.raises(InputError, match=r"web/shard_00002.bin: is missing"):
        corpus.verify()


def test_ranks_at_the_same_time_share_the_work_and_the_cache(tmp_path: Path, paths: list[str]) -> None:
    cache = str(tmp_path / "verified.json")
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda rank: Corpus(paths, 8).verify(rank, 4, cache), range(4)))
    assert len({path for part in done for path in part}) == sum(map(len, done)) == FILES
    assert Corpus(paths, 8).verify(cache_path=cache) == []  # nobody's part was lost
    assert Corpus(paths, 8).verify(1, 3, cache) == []


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 100)), st.integers(1, 6))
def test_ranks_share_files_exactly_and_evenly(sizes: dict[str, int], world: int) -> None:
    shares = [share_files(sizes, rank, world) for rank in range(world)]
    assert sorted(path for share in shares for path in share) == sorted(sizes)
    loads = [sum(sizes[path] for path in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
