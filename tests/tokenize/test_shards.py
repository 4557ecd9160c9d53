"""The on-disk format: what a reader answers, what it refuses, what it never opens."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.tokenize.shard_format import ShardWriter, version_entry
from quern.tokenize.shards import ShardReader
from support.damage import flip

EOT = 999
Documents = list[tuple[bytes, list[int]]]


def key_of(doc_id: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"7\0place\0" + doc_id, digest_size=8).digest(), "little")


def write_corpus(run_dir: Path, shards: list[Documents], dtype: str = "uint16", source: str = "web") -> Path:
    """Shards of (doc_id, tokens with EOT), with manifest and version, written piece by piece."""
    folder = run_dir / "tokens" / source
    folder.mkdir(parents=True)
    infos = []
    for number, documents in enumerate(shards):
        with ShardWriter(str(folder), number, dtype) as writer:
            for doc_id, tokens in documents:
                writer.add(doc_id, np.array([len(tokens)]), np.array(tokens, dtype))
            keys = [key_of(doc_id) for doc_id, _ in documents] or [0]
            infos.append(writer.finish(first_key=keys[0], last_key=keys[-1]))
    manifest = {
        "encoding": "own",
        "vocab_size": 1000,
        "dtype": dtype,
        "eot_id": EOT,
        "seed": 7,
        "shards": [asdict(info) for info in infos],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    sha = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    version = {
        "version": 1,
        "parent": None,
        "kind": "initial",
        "encoding": {"name": "own", "ranks": "encoding.tiktoken"},
        "sources": {source: version_entry(source, "manifest.json", sha, infos)},
    }
    (run_dir / "tokens" / "VERSION.json").write_text(json.dumps(version))
    return folder


def make_shards(lengths: list[list[int]]) -> list[Documents]:
    documents = [
        (
            hashlib.md5(f"{shard}.{i}".encode()).digest(),
            [(31 * shard + 7 * i + n) % 900 for n in range(length - 1)] + [EOT],
        )
        for shard, own in enumerate(lengths)
        for i, length in enumerate(own)
    ]
    documents.sort(key=lambda document: (key_of(document[0]), document[0]))
    edges = np.cumsum([0, *map(len, lengths)])
    return [documents[a:b] for a, b in pairwise(edges)]


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, list[Documents]]:
    shards = make_shards([[3, 1, 5], [9], [2, 2, 2, 2]])
    return write_corpus(tmp_path, shards), shards


def test_the_file_is_raw_little_endian_ids(corpus: tuple[Path, list[Documents]]) -> None:
    folder, shards = corpus
    ids = [token for _, tokens in shards[0] for token in tokens]
    assert (folder / "shard_00000.bin").read_bytes() == b"".join(i.to_bytes(2, "little") for i in ids)


def test_uint32_ids_take_four_bytes(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [[(b"x" * 16, [70_000, 5, EOT])]], "uint32")
    assert (folder / "shard_00000.bin").read_bytes() == b"".join(i.to_bytes(4, "little") for i in (70_000, 5, EOT))
    assert ShardReader(str(folder)).tokens(0, 3).tolist() == [70_000, 5, EOT]


def test_every_answer_is_that_of_plain_lists(corpus: tuple[Path, list[Documents]]) -> None:
    folder, shards = corpus
    reader = ShardReader(str(folder), verify=True)
    stream = [token for documents in shards for _, tokens in documents for token in tokens]
    assert (reader.total_tokens, reader.num_documents) == (len(stream), 8)
    assert (reader.version, reader.eot_id, reader.dtype, reader.encoding) == (1, EOT, np.dtype("uint16"), "own")
    for start in range(len(stream) + 1):
        for stop in range(start, len(stream) + 1):
            assert reader.tokens(start, stop).tolist() == stream[start:stop]
    for shard, documents in enumerate(shards):
        position = 0
        for index, (doc_id, tokens) in enumerate(documents):
            assert reader.document(shard, index).tolist() == tokens
            assert reader.span(shard, index) == reader.locate(shard, position)
            for offset in range(position, position + len(tokens)):
                span = reader.locate(shard, offset)
                assert (span.doc_id, span.start, span.length) == (doc_id, position, len(tokens))
            position += len(tokens)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 25, 26, 100])
def test_windows_overlap_by_one_token_and_fit_the_stream(corpus: tuple[Path, list[Documents]], seq_len: int) -> None:
    folder, shards = corpus
    reader = ShardReader(str(folder))
    stream = [token for documents in shards for _, tokens in documents for token in tokens]
    windows = [stream[i : i + seq_len + 1] for i in range(0, len(stream), seq_len)]
    windows = [window for window in windows if len(window) == seq_len + 1]
    assert [reader.window(i, seq_len).tolist() for i in range(reader.num_windows(seq_len))] == windows
    with pytest.raises(IndexError):
        reader.window(len(windows), seq_len)


def test_tokens_cannot_be_written_to(corpus: tuple[Path, list[Documents]]) -> None:
    reader = ShardReader(str(corpus[0]))
    for start, stop in ((0, 4), (0, 26)):
        with pytest.raises(ValueError, match="read-only"):
            reader.tokens(start, stop)[0] = 1


def test_positions_outside_are_refused(corpus: tuple[Path, list[Documents]]) -> None:
    reader = ShardReader(str(corpus[0]))
    for call in (
        lambda: reader.tokens(0, 27),
        lambda: reader.tokens(-1, 2),
        lambda: reader.tokens(3, 2),
        lambda: reader.locate(0, 9),
        lambda: reader.locate(0, -1),
        lambda: reader.span(1, 1),
        lambda: reader.spans(3),
    ):
        with pytest.raises(IndexError):
            call()


def test_a_shard_of_another_size_is_refused_by_name(corpus: tuple[Path, list[Documents]]) -> None:
    path = corpus[0] / "shard_00001.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"shard_00001\.bin: has {size - 1} bytes, expected {size}"):
        ShardReader(str(corpus[0]))


@pytest.mark.parametrize("name", ["shard_00002.bin", "shard_00002.spans.parquet", "manifest.json"])
def test_a_missing_file_is_refused_by_name(corpus: tuple[Path, list[Documents]], name: str) -> None:
    (corpus[0] / name).unlink()
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        ShardReader(str(corpus[0]))


@pytest.mark.parametrize("name", ["shard_00002.bin", "shard_00000.spans.parquet"])
def test_a_changed_bit_is_found_by_verify(corpus: tuple[Path, list[Documents]], name: str) -> None:
    path = corpus[0] / name
    flip(path, 5)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        ShardReader(str(corpus[0]), verify=True)


def test_a_changed_manifest_is_refused(corpus: tuple[Path, list[Documents]]) -> None:
    path = corpus[0] / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))
    with pytest.raises(InputError, match=r"manifest\.json: missing or changed"):
        ShardReader(str(corpus[0]))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda version: {}, "version: expected an integer, got None"),
        (lambda version: [1], "version: expected an integer, got None"),
        (lambda version: version | {"sources": None}, "sources: expected a mapping, got None"),
        (lambda version: version | {"encoding": "gpt2"}, r"encoding\.ranks: expected text, got None"),
        (lambda version: version | {"sources": {"web": "x"}}, r"sources\.web\.manifest: expected text, got None"),
        (
            lambda version: version | {"sources": {"web": version["sources"]["web"] | {"shards": 3}}},
            r"sources\.web\.shards: expected a list, got 3",
        ),
    ],
)
def test_a_version_of_another_form_is_refused_by_field(
    corpus: tuple[Path, list[Documents]], change: Callable[[dict[str, Any]], Any], field: str
) -> None:
    path = corpus[0].parent / "VERSION.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(InputError, match=rf"VERSION\.json: {field}"):
        ShardReader(str(corpus[0]))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda manifest: {}, "encoding: expected text, got None"),
        (lambda manifest: manifest | {"dtype": "int64"}, "dtype: expected uint16 or uint32, got 'int64'"),
        (lambda manifest: manifest | {"shards": [{}]}, r"shards\.0\.bin: expected text, got None"),
    ],
)
def test_a_manifest_of_another_form_is_refused_by_field(
    corpus: tuple[Path, list[Documents]], change: Callable[[dict[str, Any]], Any], field: str
) -> None:
    manifest, path = corpus[0] / "manifest.json", corpus[0].parent / "VERSION.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    version = json.loads(path.read_text())
    version["sources"]["web"]["sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    path.write_text(json.dumps(version))
    with pytest.raises(InputError, match=rf"manifest\.json: {field}"):
        ShardReader(str(corpus[0]))


def test_spans_with_a_gap_are_refused(corpus: tuple[Path, list[Documents]]) -> None:
    path = corpus[0] / "shard_00000.spans.parquet"
    table = pq.read_table(path)
    starts = table["start"].to_pylist()
    pq.write_table(table.set_column(1, "start", [[starts[0], starts[1] + 1, starts[2]]]), path)
    with pytest.raises(InputError, match=r"shard_00000\.spans\.parquet.*without a gap"):
        ShardReader(str(corpus[0])).locate(0, 0)


def test_unreadable_spans_are_refused(corpus: tuple[Path, list[Documents]]) -> None:
    (corpus[0] / "shard_00000.spans.parquet").write_bytes(b"PAR1 no more PAR1")
    with pytest.raises(InputError, match=r"shard_00000\.spans\.parquet: cannot be read"):
        ShardReader(str(corpus[0])).locate(0, 0)


def test_files_that_the_version_does_not_list_are_not_seen(corpus: tuple[Path, list[Documents]]) -> None:
    folder, _ = corpus
    before = ShardReader(str(folder)).total_tokens
    (folder / "shard_00003.bin").write_bytes(b"\0" * 100)
    assert ShardReader(str(folder)).total_tokens == before
    (folder.parent / "other").mkdir()
    with pytest.raises(InputError, match="no source 'other' \\(it has web\\)"):
        ShardReader(str(folder.parent / "other"))


def test_an_open_reader_is_not_disturbed_by_a_replaced_shard(corpus: tuple[Path, list[Documents]]) -> None:
    folder, shards = corpus
    reader = ShardReader(str(folder))
    expected = [token for _, tokens in shards[0] for token in tokens]
    assert reader.tokens(0, len(expected)).tolist() == expected
    other = folder / "new"
    other.write_bytes(b"\xff" * 2 * len(expected))
    os.replace(other, folder / "shard_00000.bin")
    assert reader.tokens(0, len(expected)).tolist() == expected


def test_a_writer_left_by_an_error_leaves_nothing(tmp_path: Path) -> None:
    def write_and_fail() -> None:
        with ShardWriter(str(tmp_path), 0, "uint16") as writer:
            writer.add(b"x" * 16, np.array([1]), np.array([EOT], "uint16"))
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_refuses_lengths_that_are_not_those_of_the_tokens(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="expected 1 ids and 2 tokens"),
        ShardWriter(str(tmp_path), 0, "uint16") as writer,
    ):
        writer.add(b"x" * 16, np.array([2]), np.array([EOT], "uint16"))


@pytest.mark.slow
def test_reading_shards_needs_nothing_heavy(corpus: Callable[..., object]) -> None:
    program = (
        "import sys; from quern.tokenize.shards import ShardReader; "
        "print([m for m in ('torch', 'ray', 'tiktoken', 'tokenizers', 'pydantic', 'pandas') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_a_stream_goes_on_over_a_shard_without_documents(tmp_path: Path) -> None:
    first, last = make_shards([[3, 1], [4]])
    reader = ShardReader(str(write_corpus(tmp_path, [first, [], last])))
    flat = [token for documents in (first, last) for _, tokens in documents for token in tokens]
    assert reader.tokens(0, 8).tolist() == flat
    assert [len(reader.spans(shard)) for shard in range(3)] == [2, 0, 1]


OUTSIDE = ["../VERSION.json", "/etc/passwd", "web/../../x", "", ".", "..", "web//x", "web\\x", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("field", ["encoding.ranks", "sources.web.manifest"])
def test_a_name_in_the_version_that_leads_out_of_the_corpus_is_refused(
    corpus: tuple[Path, list[Documents]], field: str, name: str
) -> None:
    """What it names is there: a file of the right bytes beside the corpus."""
    path = corpus[0].parent / "VERSION.json"
    version = json.loads(path.read_text())
    *above, last = field.split(".")
    entry = version
    for part in above:
        entry = entry[part]
    if name == "../VERSION.json" and last == "manifest":
        shutil.copy(corpus[0] / "manifest.json", corpus[0].parent.parent / "VERSION.json")
    entry[last] = name
    path.write_text(json.dumps(version))
    with pytest.raises(InputError, match=rf"VERSION\.json: {field}: expected the name of a file of the corpus"):
        ShardReader(str(corpus[0]))


@pytest.mark.parametrize("name", [*OUTSIDE, "web/x"])
@pytest.mark.parametrize("field", ["bin", "spans"])
def test_a_name_in_the_manifest_that_leads_out_of_its_folder_is_refused(
    corpus: tuple[Path, list[Documents]], field: str, name: str
) -> None:
    manifest, path = corpus[0] / "manifest.json", corpus[0].parent / "VERSION.json"
    told, version = json.loads(manifest.read_text()), json.loads(path.read_text())
    told["shards"][1][field] = name
    manifest.write_text(json.dumps(told))
    version["sources"]["web"]["sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    version["sources"]["web"]["shards"][1][field] = f"web/{name}"
    path.write_text(json.dumps(version))
    with pytest.raises(InputError, match=rf"manifest\.json: shards\.1\.{field}: expected the name of a file"):
        ShardReader(str(corpus[0]))


def test_a_shard_under_another_name_than_the_version_s_is_refused(corpus: tuple[Path, list[Documents]]) -> None:
    path = corpus[0].parent / "VERSION.json"
    version = json.loads(path.read_text())
    version["sources"]["web"]["shards"][0]["bin"] = "web/shard_00001.bin"
    path.write_text(json.dumps(version))
    with pytest.raises(InputError, match=r"the manifest's shards are not those of VERSION\.json"):
        ShardReader(str(corpus[0]))
