"""Runs made of files that were written from the formats' definitions: every document, its id, its record."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern import storage
from quern.errors import InputError
from quern.tokenize.exchange import foreign
from quern.tokenize.exchange.ingest import ingest
from quern.tokenize.shards import ShardReader
from support.exchange import plain_formats as plain
from support.exchange.import_case import EOT, FORMATS, draw, options, verdicts, write


@pytest.mark.slow
@pytest.mark.parametrize(("format", "shard_tokens"), [*((name, 200) for name in FORMATS), (FORMATS[0], 2**30)])
def test_every_document_is_known_by_its_file_and_byte(
    ranks: str, tmp_path: Path, format: Any, shard_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "BATCH_TOKENS", 64)
    files = {f"{name}": draw(seed) for seed, name in enumerate(("b", "a", "c d"))}
    paths = [write(format, tmp_path / "in", name, documents) for name, documents in files.items()]
    run = tmp_path / "run"
    report = ingest([str(path) for path in paths], str(run), options(ranks, format, shard_tokens=shard_tokens))
    found = plain.read_run(run, "imported")
    rows = verdicts(run)
    assert [tokens for _, tokens in found] == [document for documents in files.values() for document in documents]
    assert len(rows) == len(found)
    at = 0
    for path, documents in zip(paths, files.values(), strict=True):
        offset = 0
        for document in documents:
            doc_id, tokens = found[at]
            assert doc_id == plain.place_id("imported", path.name, offset)
            row, data = rows[doc_id], path.read_bytes()
            assert (row["source"], row["source_file"], row["record_offset"]) == ("imported", str(path), offset)
            assert plain.unpack("uint16", data[offset : offset + row["record_length"]]) == tokens
            text = bytes(tokens[:-1]).decode("utf-8", "replace").encode()
            assert row["post_filter_hash"] == hashlib.blake2b(text, digest_size=16).digest()
            assert (row["stage"], row["url"], row["pre_filter_hash"]) == (None, None, None)
            offset, at = offset + 2 * len(document), at + 1
    reader = ShardReader(str(run / "tokens" / "imported"), verify=True)
    assert (reader.num_documents, reader.eot_id, reader.vocab_size) == (150, EOT, 257)
    assert len(reader.shards) == 3 if shard_tokens > 200 else len(reader.shards) > 9
    assert asdict(report)["tokens"] == reader.total_tokens
    held = {doc_id for shard in range(len(reader.shards)) for doc_id in reader.spans(shard)["doc_id"].to_pylist()}
    assert held == {doc_id for doc_id, _ in found}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_stream_is_cut_behind_each_eot(ranks: str, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Whatever the size of what is read at once; the last document gets an EOT if it has none."""
    ids = data.draw(st.lists(st.sampled_from([0, 65, 255, EOT]), min_size=1, max_size=30))
    folder = tmp_path_factory.mktemp("stream")
    (folder / "a.bin").write_bytes(plain.pack("uint16", ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "BATCH_TOKENS", data.draw(st.integers(1, 9)))
        report = ingest([str(folder / "a.bin")], str(folder / "run"), options(ranks, "bin"))
    wanted: list[list[int]] = [[]]
    for token in ids:
        wanted[-1].append(token)
        if token == EOT:
            wanted.append([])
    last = wanted.pop()
    wanted += [[*last, EOT]] if last else []
    assert [tokens for _, tokens in plain.read_run(folder / "run", "imported")] == wanted
    assert report.files[0].eots_added == bool(last)


def test_documents_of_several_sequences_without_eot_with_gaps_and_without_tokens(ranks: str, tmp_path: Path) -> None:
    documents = [[[1, 2], [3]], [], [[4, EOT]], [[]], [[], [5, EOT, 6], []], [[7]]]
    plain.write_megatron(tmp_path / "a", documents, gap=b"\xff\xff")
    report = ingest([str(tmp_path / "a.idx")], str(tmp_path / "run"), options(ranks, "megatron"))
    found = plain.read_run(tmp_path / "run", "imported")
    assert [tokens for _, tokens in found] == [[1, 2, 3, EOT], [4, EOT], [5, EOT, 6, EOT], [7, EOT]]
    offsets = [2, 12, 20, 28]  # two bytes before each document, and the documents without tokens
    assert [doc_id for doc_id, _ in found] == [plain.place_id("imported", "a.bin", offset) for offset in offsets]
    (file,) = report.files
    assert (file.eots_added, file.empty, file.passed_over_bytes) == (3, 2, 12)


@pytest.mark.parametrize("code", plain.CODES)
def test_every_type_of_ids_that_megatron_has(ranks: str, tmp_path: Path, code: int) -> None:
    plain.write_megatron(tmp_path / "a", [[[1, 127]], [[5]]], code)
    ingest([str(tmp_path / "a")], str(tmp_path / "run"), options(ranks, "megatron", eot=5))
    assert [tokens for _, tokens in plain.read_run(tmp_path / "run", "imported")] == [[1, 127, 5], [5]]
    assert ShardReader(str(tmp_path / "run" / "tokens" / "imported")).eot_id == 5


def test_the_size_of_ids_is_the_metadata_s_or_the_option_s(ranks: str, tmp_path: Path) -> None:
    plain.write_datatrove(tmp_path / "a.ds", [[1, EOT]], "uint32")
    plain.write_datatrove(tmp_path / "b.ds", [[2, EOT]], "uint32", metadata=False)
    ingest([str(tmp_path / "a.ds")], str(tmp_path / "one"), options(ranks, "datatrove"))
    ingest([str(tmp_path / "b.ds")], str(tmp_path / "two"), options(ranks, "datatrove", dtype="uint32"))
    assert [plain.read_run(tmp_path / run, "imported")[0][1][0] for run in ("one", "two")] == [1, 2]
    (tmp_path / "b.ds.index").unlink()
    ingest([str(tmp_path / "b.ds")], str(tmp_path / "three"), options(ranks, "datatrove", dtype="uint32"))
    assert [tokens for _, tokens in plain.read_run(tmp_path / "three", "imported")] == [[2, EOT]]


def test_files_of_one_name_are_told_apart_below_a_root(ranks: str, tmp_path: Path) -> None:
    paths = [str(write("bin", tmp_path / name, "a", draw(n))) for n, name in enumerate("xy")]
    with pytest.raises(InputError, match="same relative path") as caught:
        ingest(paths, str(tmp_path / "run"), options(ranks, "bin"))
    assert all(path in str(caught.value) for path in paths)
    ingest(paths, str(tmp_path / "run"), options(ranks, "bin", root=str(tmp_path)))
    assert plain.read_run(tmp_path / "run", "imported")[50][0] == plain.place_id("imported", "y/a.bin", 0)
    with pytest.raises(InputError, match="outside the root"):
        ingest(paths, str(tmp_path / "other"), options(ranks, "bin", root=str(tmp_path / "x")))


def test_the_same_files_are_the_same_run_wherever_they_lie(ranks: str, tmp_path: Path) -> None:
    kept = []
    for name in "xy":
        path = write("megatron", tmp_path / name, "a", draw(3))
        ingest([str(path)], str(tmp_path / f"run-{name}"), options(ranks, "megatron"))
        root = tmp_path / f"run-{name}" / "tokens"
        files = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        kept.append((files, storage.read_json(str(root.parent / "run.json"))["id"]))
    assert kept[0] == kept[1]


def test_very_short_documents_are_taken_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_ENDS", 64)
    documents = [[EOT]] * 200 + [[7, EOT]] * 10 + [[8]]
    path = write("bin", tmp_path, "a", documents)
    with closing(foreign.TokenFile("bin", str(path), None, "uint16")) as file:
        batches = list(file.batches_by_eot(EOT))
    assert [len(batch.lengths) for batch in batches] == [64, 64, 64, 18, 1]
    taken = []
    for batch in batches:
        edges = [0, *np.cumsum(batch.lengths).tolist()]
        places = zip(batch.offsets.tolist(), edges[:-1], edges[1:], strict=True)
        taken += [(offset, batch.tokens[first:last].tolist()) for offset, first, last in places]
    offsets = [0, *np.cumsum([2 * len(document) for document in documents]).tolist()][:-1]
    assert taken == list(zip(offsets, documents, strict=True))


def test_several_sources_are_each_as_a_run_of_its_own(ranks: str, tmp_path: Path) -> None:
    """Also where two have files of one name; the order of the files is that of each source."""
    given = {"web": ("b", "a"), "code": ("a",), "imported": ("c",)}
    files = {
        source: [write(FORMATS[0], tmp_path / source, name, draw(sum(map(ord, source + name)))) for name in names]
        for source, names in given.items()
    }
    words = [
        f"web={files['web'][0]}",
        str(files["imported"][0]),
        f"code={tmp_path / 'code'}/*",
        f"web={files['web'][1]}",
    ]
    report = ingest(words, str(tmp_path / "run"), options(ranks, FORMATS[0]))
    assert report.source == "web, imported, code"
    version = storage.read_json(str(tmp_path / "run" / "tokens" / "VERSION.json"))
    assert version["sources"].keys() == given.keys()
    for source, paths in files.items():
        alone = tmp_path / f"{source}-alone"
        ingest(list(map(str, paths)), str(alone), options(ranks, FORMATS[0], source=source))
        assert plain.read_run(tmp_path / "run", source) == plain.read_run(alone, source)
        own = storage.read_json(str(alone / "tokens" / "VERSION.json"))
        assert version["sources"][source] == own["sources"][source]
        assert verdicts(alone, source) == verdicts(tmp_path / "run", source)
    # which file is of which source is in the identity of the run
    one, other = files["web"]
    ids = set()
    for number, names in enumerate(("xx", "xy", "yx", "yy")):
        out = tmp_path / f"named{number}"
        ingest([f"{names[0]}={one}", f"{names[1]}={other}"], str(out), options(ranks, FORMATS[0]))
        ids.add(storage.read_json(str(out / "run.json"))["id"])
    assert len(ids) == 4


def test_a_file_whose_name_has_an_equals_sign_is_a_file(ranks: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(FORMATS[0], tmp_path, "part=3", draw(1))
    assert ingest([path.name], "run", options(ranks, FORMATS[0])).source == "imported"
    with pytest.raises(InputError, match=r"nothing-\*"):
        ingest(["web=nothing-*"], "other", options(ranks, FORMATS[0]))
