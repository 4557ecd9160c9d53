"""What an import refuses, naming file and record, and leaving nothing."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from quern.tokenize.encoding import Encoding
from quern.tokenize.exchange import foreign
from quern.tokenize.exchange import ingest as module
from quern.tokenize.exchange.ingest import ingest
from support.exchange import plain_formats as plain
from support.exchange.import_case import EOT, draw, options, refused, write

INDEX = plain.megatron_index
WRONG_INDEX: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "magic": (INDEX(8, [3], [0], [0, 1], magic=b"MMIDIDY\0\0"), "magic"),
    "version": (INDEX(8, [3], [0], [0, 1], version=2), "version: expected 1, got 2"),
    "floats": (INDEX(7, [3], [0], [0, 1]), "got 7 (float32)"),
    "no such type": (INDEX(99, [3], [0], [0, 1]), "got 99"),
    "truncated": (INDEX(8, [3], [0], [0, 1])[:-1], "has 61 bytes, expected 62"),
    "longer": (INDEX(8, [3], [0], [0, 1]) + b"12", "expected 62"),
    "modes": (INDEX(8, [3], [0], [0, 1]) + b"\0", "multimodal"),
    "counts beyond all bounds": (INDEX(8, [3], [0], [0, 1], sequences=2**64 - 1), "has 62 bytes"),
    "no entry": (INDEX(8, [3], [0], [0, 1], entries=0), "expected one entry or more"),
    "negative length": (INDEX(8, [1, -1], [0, 2], [0, 1, 2]), "sequence 1: length: expected tokens ≥ 0, got -1"),
    "too long": (INDEX(8, [1, 3], [0, 2], [0, 1, 2]), "sequence 1: pointer"),
    "pointer beyond the file": (INDEX(8, [1, 1], [0, 6], [0, 1, 2]), "sequence 1: pointer"),
    "pointer far beyond": (INDEX(8, [1, 2**31 - 1], [0, 2**63 - 1], [0, 1, 2]), "sequence 1: pointer"),
    "pointer before": (INDEX(8, [1, 1], [0, -2], [0, 1, 2]), "sequence 1: pointer"),
    "pointer between tokens": (INDEX(8, [1, 1], [0, 3], [0, 1, 2]), "sequence 1: pointer: expected a multiple of 2"),
    "pointer into the one before": (INDEX(8, [2, 1], [0, 2], [0, 1, 2]), "sequence 1: pointer: expected no byte"),
    "the same bytes again": (INDEX(8, [3, 3], [0, 0], [0, 1, 2]), "sequence 1: pointer: expected no byte"),
    "a torn document": (INDEX(8, [1, 1], [0, 4], [0, 2]), "document 0: expected its sequences"),
    "documents that do not begin": (INDEX(8, [1, 2], [0, 2], [1, 2]), "document entry 0"),
    "documents that go back": (INDEX(8, [1, 1, 1], [0, 2, 4], [0, 2, 1, 3]), "document entry 2"),
    "documents beyond": (INDEX(8, [1, 2], [0, 2], [0, 1, 3]), "document entry 2"),
    "documents that end early": (INDEX(8, [1, 2], [0, 2], [0, 1]), "document entry 1"),
    "documents below 0": (INDEX(8, [1, 2], [0, 2], [0, -(2**63), 2]), "document entry 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_INDEX)
def test_a_wrong_megatron_index_is_refused_by_record(ranks: str, tmp_path: Path, case: str) -> None:
    index, told = WRONG_INDEX[case]
    (tmp_path / "a.bin").write_bytes(plain.pack("uint16", [1, 2, EOT]))
    (tmp_path / "a.idx").write_bytes(index)
    refused([tmp_path / "a.bin"], tmp_path / "run", options(ranks, "megatron"), f"{tmp_path}/a.idx: ", told)


def test_an_index_that_nothing_is_wrong_with_is_not_refused(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(plain.pack("uint16", [1, 2, EOT]))
    (tmp_path / "a.idx").write_bytes(INDEX(8, [1, 2], [0, 2], [0, 1, 2]))
    assert ingest([str(tmp_path / "a.bin")], str(tmp_path / "run"), options(ranks, "megatron")).documents == 2


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([2, 1, 3], "document 1: end: expected a token from 2 to 3, got 1"),
        ([4], "document 0: end: expected a token from 0 to 3, got 4"),
        ([2**64 - 1], "document 0: end"),
        ([2], "ends at token 2, expected 3"),
        ([], "ends at token 0, expected 3"),
    ],
)
def test_a_wrong_datatrove_index_is_refused_by_document(ranks: str, tmp_path: Path, ends: list[int], told: str) -> None:
    plain.write_datatrove(tmp_path / "a.ds", [[1, 2, EOT]])
    (tmp_path / "a.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    refused([tmp_path / "a.ds"], tmp_path / "run", options(ranks, "datatrove"), f"{tmp_path}/a.ds.index: ", told)


def test_other_wrong_files_are_refused_by_name(ranks: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    plain.write_datatrove(tmp_path / "a.ds", [[1, 2, EOT]])
    (tmp_path / "a.ds.index").write_bytes(b"1234567")
    refused([tmp_path / "a.ds"], run, options(ranks, "datatrove"), "a.ds.index: has 7 bytes")
    (tmp_path / "a.ds.metadata").write_text("gpt2|3\n")
    refused([tmp_path / "a.ds"], run, options(ranks, "datatrove"), "a.ds.metadata: line 1")
    (tmp_path / "a.ds.loss").write_bytes(b"")
    refused([tmp_path / "a.ds"], run, options(ranks, "datatrove"), "a.ds.loss")
    (tmp_path / "odd.bin").write_bytes(b"123")
    refused([tmp_path / "odd.bin"], run, options(ranks, "bin"), "odd.bin: has 3 bytes, expected a multiple of 2")
    refused([tmp_path / "odd.bin"], run, options(ranks, "megatron"), "odd.idx: no such file")
    refused([tmp_path / "none.bin"], run, options(ranks, "bin"), "none.bin: no such file")
    (tmp_path / "folder.bin").mkdir()
    refused(
        [tmp_path / "folder.bin"],
        run,
        options(ranks, "bin"),
        "folder.bin: is a folder; expected a file of tokens, such as",
        "folder.bin/x.bin",
    )
    refused([tmp_path / "folder.bin"], run, options(ranks, "datatrove"), "is a folder", "folder.bin/x.ds")
    (tmp_path / "odd").mkdir()
    refused([tmp_path], run, options(ranks, "megatron"), f"{tmp_path}: is a folder; expected a file of tokens")
    refused([tmp_path / "odd"], run, options(ranks, "megatron"), "odd.idx: no such file")
    os.mkfifo(tmp_path / "pipe.bin")
    refused([tmp_path / "pipe.bin"], run, options(ranks, "bin"), "pipe.bin: expected a file")


def test_a_file_without_a_document_is_refused_beside_others_too(ranks: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for format in ("megatron", "datatrove", "bin"):
        good = write(format, tmp_path / format, "a", [[1, EOT]])
        empty = write(format, tmp_path / format, "b", [])
        refused([good, empty], run, options(ranks, format), f"{empty}: expected one document or more, got none (the")
    (tmp_path / "e.bin").touch()
    refused([tmp_path / "e.bin"], run, options(ranks, "bin"), "e.bin: expected one document or more", "has 0 bytes")
    plain.write_megatron(tmp_path / "c", [[[]], [[]]])
    refused([tmp_path / "c.bin"], run, options(ranks, "megatron"), "c.bin: expected one document or more")


@pytest.mark.parametrize("format", ["bin", "datatrove"])
def test_a_file_of_uint32_is_not_read_as_uint16_unless_told_to(ranks: str, tmp_path: Path, format: str) -> None:
    ids = [token for document in draw(3) for token in document]
    path, run = tmp_path / f"a.{'ds' if format == 'datatrove' else 'bin'}", tmp_path / "run"
    path.write_bytes(plain.pack("uint32", ids))
    refused([path], run, options(ranks, format), f"{path}: every second id is 0", "--dtype uint32")
    assert ingest([str(path)], str(run), options(ranks, format, dtype="uint32")).tokens == len(ids)
    assert ingest([str(path)], str(tmp_path / "as_told"), options(ranks, format, dtype="uint16")).tokens > len(ids)


@pytest.mark.parametrize(
    "ids",
    [
        [0] * 1000 + [EOT],
        [5, 0, *[0] * 1000, 7, EOT],
        [1, 0] * 10 + [EOT, EOT],
        [EOT] * 1000,
        [0, 5] * 500 + [EOT, 0],
        [5, 0] * 500 + [EOT, 1],
        [*range(1, 250), *[0] * 771, EOT, EOT],
    ],
    ids=["zeros", "padded", "few", "only EOTs", "first of two", "one is not", "a document and padding"],
)
def test_uint16_with_many_zeros_is_read(ranks: str, tmp_path: Path, ids: list[int]) -> None:
    (tmp_path / "a.bin").write_bytes(plain.pack("uint16", ids))
    ingest([str(tmp_path / "a.bin")], str(tmp_path / "run"), options(ranks, "bin"))


def test_an_id_beyond_the_encoding_names_the_type_that_was_assumed(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(plain.pack("uint16", [1, 257]))
    told = "got 257; they were read as uint16: give --dtype"
    refused([tmp_path / "a.bin"], tmp_path / "run", options(ranks, "bin"), told)


@pytest.mark.parametrize(("code", "wrong"), [(8, 257), (8, 65_535), (4, -1), (5, 2**40), (5, -(2**63))])
def test_an_id_that_the_encoding_has_not_is_refused_by_place(ranks: str, tmp_path: Path, code: int, wrong: int) -> None:
    plain.write_megatron(tmp_path / "a", [[[1, EOT]], [[2, 3, wrong, EOT]]], code)
    at = 2 * {8: 2, 4: 4, 5: 8}[code]
    told = f"a.bin: document at byte {at}: token 2: expected an id of own, 0 to 256, got {wrong}"
    refused([tmp_path / "a.bin"], tmp_path / "run", options(ranks, "megatron"), told)


def test_an_id_that_the_encoding_leaves_out_is_refused(
    ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {bytes([n]): n for n in range(256)}
    core = tiktoken.Encoding("holed", pat_str=".", mergeable_ranks=known, special_tokens={"<|endoftext|>": 260})
    monkeypatch.setattr(module, "load_encoding", lambda *_: Encoding("holed", None, core, known))
    write("bin", tmp_path, "a", [[1, 260], [258, 260]])
    told = "document at byte 4: token 0: expected an id of holed, 0 to 260 (it leaves this one out), got 258"
    refused([tmp_path / "a.bin"], tmp_path / "run", options(ranks, "bin"), told)
    write("bin", tmp_path, "b", [[1, 2]])
    told = "eot: expected an id of holed, which leaves 258 out"
    refused([tmp_path / "b.bin"], tmp_path / "run", options(ranks, "bin", eot=258), told)


def test_a_stream_without_an_eot_is_not_read_for_ever(
    ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "BATCH_TOKENS", 16)
    monkeypatch.setattr(foreign, "MAX_DOCUMENT_TOKENS", 100)
    write("bin", tmp_path, "a", [[7, EOT], [7] * 1000])
    refused([tmp_path / "a.bin"], tmp_path / "run", options(ranks, "bin"), "document at byte 4", "none of them is 256")
    plain.write_megatron(tmp_path / "b", [[[7] * 101]])
    refused([tmp_path / "b.bin"], tmp_path / "run", options(ranks, "megatron"), "document at byte 0: expected 100")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"source": "../x"}, "source"),
        ({"source": "web.val"}, "source"),
        ({"eot": 257}, "eot: expected an id of own, 0 to 256, got 257"),
        ({"dtype": "int8"}, "dtype"),
        ({"shard_tokens": 0}, "shard_tokens"),
        ({"format": "tar"}, "format"),
    ],
)
def test_wrong_options_are_refused(ranks: str, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    write("bin", tmp_path, "a", draw(1))
    refused([tmp_path / "a.bin"], tmp_path / "run", options(ranks, **{"format": "bin", **changes}), told)
    refused([], tmp_path / "run", options(ranks, "bin"), "one file or more")


def test_a_run_that_is_there_is_not_touched(ranks: str, tmp_path: Path, run_dir: Path) -> None:
    write("bin", tmp_path, "a", draw(1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    refused([tmp_path / "a.bin"], tmp_path / "run", options(ranks, "bin"), "is there already")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
