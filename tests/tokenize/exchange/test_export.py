"""What an export leaves, read back from the formats' definitions, held against what stands in the run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.tokenize.exchange import export as module
from quern.tokenize.exchange.export import export
from support.damage import flip
from support.exchange import plain_formats as plain
from support.lineage import runs

pytestmark = pytest.mark.slow

FORMATS = ("megatron", "datatrove", "bin")
EOT = 999


def expected(
    listing: Any, stream: str, eot: bool = True, eot_id: int = EOT
) -> dict[int, list[tuple[bytes, list[int]]]]:
    """By shard, the (doc_id, tokens) that are not purged."""
    found: dict[int, list[tuple[bytes, list[int]]]] = {}
    for row in listing.spans[stream]:
        own = found.setdefault(row["shard"], [])
        if not row["purged"]:
            ids = list(listing.texts[row["doc_id"]].encode())
            own.append((row["doc_id"], [*ids, eot_id] if eot else ids))
    return {shard: own for shard, own in found.items() if own}


def read(format: str, folder: Path, name: str, eot_id: int = EOT) -> list[list[int]]:
    if format == "megatron":
        _, documents = plain.read_megatron(folder / name)
        assert all(len(sequences) == 1 for sequences in documents)
        return [sequences[0] for sequences in documents]
    if format == "datatrove":
        return plain.read_datatrove(folder / f"{name}.ds")[1]
    ids, documents = plain.unpack("uint16", (folder / f"{name}.bin").read_bytes()), []
    while ids:
        end = ids.index(eot_id) + 1
        documents.append(ids[:end])
        ids = ids[end:]
    return documents


@pytest.mark.parametrize(
    ("format", "eot", "merge", "held_out"),
    [
        pytest.param(*form, merge, held_out, marks=() if (number + merge) % 2 != held_out else pytest.mark.long)
        for number, form in enumerate(
            [*((format, True) for format in FORMATS), ("megatron", False), ("datatrove", False)]
        )
        for merge in (False, True)
        for held_out in (False, True)
    ],
)  # each form with each of merge and held_out; all together in the long ones
def test_a_file_holds_the_documents_of_its_shard_that_are_not_purged(
    run_dir: Path, listing: Any, tmp_path: Path, format: Any, eot: bool, merge: bool, held_out: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 501)  # documents lie across chunks, and end where one ends
    report = export(str(run_dir), format, str(tmp_path / "out"), merge=merge, eot=eot, held_out=held_out)
    files = {}
    for source in ("text", "web"):
        stream = f"{source}.val" if held_out else source
        shards = expected(listing, stream, eot)
        assert held_out or sum(map(len, shards.values())) < len(listing.spans[stream])  # some are purged
        named = {f"{stream}_{shard:05d}": own for shard, own in shards.items()}
        files |= {stream: [doc for own in shards.values() for doc in own]} if merge else named
    assert len(files) > (2 if merge or held_out else 4) - 1
    for name, documents in files.items():
        assert read(format, tmp_path / "out", name) == [tokens for _, tokens in documents]
        rows = pq.read_table(tmp_path / "out" / f"{name}.documents.parquet").to_pylist()
        assert [row["doc_id"] for row in rows] == [doc_id for doc_id, _ in documents]
        start = 0
        for row, (_, tokens) in zip(rows, documents, strict=True):
            assert (row["start"], row["length"]) == (start, len(tokens))
            start += len(tokens)
    suffix = ".ds" if format == "datatrove" else ".bin"
    assert [own.file for own in report.files] == [f"{name}{suffix}" for name in files]
    for own in report.files:
        data = (tmp_path / "out" / own.file).read_bytes()
        assert (own.sha256, own.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    beside = {"megatron": 3, "datatrove": 4, "bin": 2}[format]
    assert len(list((tmp_path / "out").iterdir())) == beside * len(files) + 1
    told = json.loads((tmp_path / "out" / "export.json").read_text())
    assert told == json.loads(json.dumps(asdict(report)))
    streams = [name for name in listing.spans if name.endswith(".val") is held_out]
    assert told["purged_documents"] == sum(row["purged"] for name in streams for row in listing.spans[name])


def test_the_table_tells_where_each_document_comes_from(run_dir: Path, listing: Any, tmp_path: Path) -> None:
    export(str(run_dir), "bin", str(tmp_path / "out"), sources=["web"], merge=True)
    rows = pq.read_table(tmp_path / "out" / "web.documents.parquet").to_pylist()
    verdicts = {row["doc_id"]: row for row in listing.rows}
    assert {row["doc_id"] for row in rows} <= verdicts.keys()
    own = [name for name in rows[0] if name not in ("start", "length")]
    assert {"url", "source_file", "record_offset", "fetched_at", "post_filter_hash"} < set(own)
    assert [[row[name] for name in own] for row in rows] == [
        [verdicts[row["doc_id"]][name] for name in own] for row in rows
    ]
    assert not list((tmp_path / "out").glob("text*"))


def test_ids_of_a_large_vocabulary(tmp_path: Path) -> None:
    run = runs.write_run(tmp_path / "run", documents=40, vocab_size=65_700)
    eot = 65_699
    shards = expected(runs.listing(documents=40, vocab_size=65_700), "web", eot_id=eot)
    for format, dtype in (("megatron", "int32"), ("datatrove", "uint32"), ("bin", "uint32")):
        report = export(str(run), format, str(tmp_path / format), sources=["web"])  # type: ignore[arg-type]
        assert report.dtype == dtype
        documents = [tokens for _, tokens in shards[0]]
        if format == "bin":
            ids = plain.unpack("uint32", (tmp_path / format / "web_00000.bin").read_bytes())
            assert ids == [token for tokens in documents for token in tokens]
        elif format == "megatron":
            assert plain.read_megatron(tmp_path / format / "web_00000") == (dtype, [[d] for d in documents])
        else:
            assert plain.read_datatrove(tmp_path / format / "web_00000.ds") == (dtype, documents)


def test_equal_runs_give_equal_bytes(run_dir: Path, tmp_path: Path) -> None:
    def bytes_of(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    for name in ("one", "two"):
        export(str(run_dir), "megatron", str(tmp_path / name))
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


# ---- what is refused


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(run_dir, tmp_path / "own"))


def refused(run: Path, out: Path, *names: str, format: Any = "megatron", **options: Any) -> None:
    before = sorted(out.parent.iterdir())
    with pytest.raises(InputError) as caught:
        export(str(run), format, str(out), **options)
    for name in names:
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(out.parent.iterdir()) == before


@pytest.mark.parametrize("name", ["shard_00001.bin", "shard_00001.spans.parquet"])
def test_a_damaged_file_of_the_run_is_refused_by_name(own_run: Path, tmp_path: Path, name: str) -> None:
    flip(own_run / "tokens" / "web" / name)
    refused(own_run, tmp_path / "out", f"web/{name}", "SHA-256")


def test_a_damaged_verdict_file_is_refused_by_name(own_run: Path, tmp_path: Path) -> None:
    path = next((own_run / "verdicts" / "web").iterdir())
    path.write_bytes(path.read_bytes()[:-9])
    refused(own_run, tmp_path / "out", path.name)


def test_a_document_with_two_verdicts_is_refused(own_run: Path, tmp_path: Path) -> None:
    path = next((own_run / "verdicts" / "web").iterdir())
    shutil.copy(path, path.with_name("twice.parquet"))
    refused(own_run, tmp_path / "out", "verdicts/web", "one verdict row")


def test_a_document_that_does_not_end_with_the_eot_is_refused(own_run: Path, tmp_path: Path) -> None:
    """A corpus whose manifest says another EOT than its documents have, checksums and all."""
    for path in (own_run / "tokens").rglob("*.json"):
        path.write_text(path.read_text().replace('"eot_id": 999', '"eot_id": 998'))
    version = json.loads((own_run / "tokens" / "VERSION.json").read_text())
    for entry in version["sources"].values():
        entry["sha256"] = hashlib.sha256((own_run / "tokens" / entry["manifest"]).read_bytes()).hexdigest()
    (own_run / "tokens" / "VERSION.json").write_text(json.dumps(version))
    refused(own_run, tmp_path / "out", "998")


@pytest.mark.parametrize("there", [".", "a file", "a link"])
def test_nothing_is_overwritten(run_dir: Path, tmp_path: Path, there: str) -> None:
    out = tmp_path / "out"
    if there == ".":
        out.mkdir()
        (out / "kept").write_text("kept")
    elif there == "a file":
        out.write_text("kept")
    else:
        out.symlink_to(tmp_path / "nowhere")
    refused(run_dir, out, "is there already")
    assert there != "." or (out / "kept").read_text() == "kept"


def test_an_empty_folder_is_taken(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(str(run_dir), "bin", str(tmp_path / "out"))
    assert (tmp_path / "out" / "export.json").exists()


def test_wrong_options_are_refused(run_dir: Path, tmp_path: Path) -> None:
    refused(run_dir, tmp_path / "out", "books", "text, web", sources=["books"])
    refused(run_dir, tmp_path / "out", "web.val", sources=["web.val"])
    refused(run_dir, tmp_path / "out", "EOT", format="bin", eot=False)
    refused(run_dir, tmp_path / "out", "format", format="tar")
    refused(tmp_path, tmp_path / "out", f"{tmp_path}: expected a data run with tokens: it has no tokens/VERSION.json")


def test_a_run_of_which_no_document_is_left_is_refused(tmp_path: Path) -> None:
    found = runs.listing(documents=20)
    for row in (row for rows in found.spans.values() for row in rows):
        row["purged"] = True
    runs.write_listing(tmp_path / "run", found, identity="run")
    num = len(found.spans["text"]) + len(found.spans["web"])
    told = f"{tmp_path}/run: has no documents to export in text, web ({num} documents purged)"
    for merge in (False, True):
        refused(tmp_path / "run", tmp_path / "out", told, merge=merge)


@pytest.mark.parametrize("name", ["../own/tokens/web", "/etc", "web/../web", "Web"])
def test_a_source_that_leads_elsewhere_is_refused(own_run: Path, tmp_path: Path, name: str) -> None:
    path = own_run / "tokens" / "VERSION.json"
    version = json.loads(path.read_text())
    version["sources"][name] = version["sources"].pop("web")
    path.write_text(json.dumps(version))
    refused(own_run, tmp_path / "out", "VERSION.json: sources", repr(name))


# ---- others' readers

_READ = """
import json, sys
import numpy as np
from datatrove.utils.dataset import DatatroveFileDataset
path, size, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dataset = DatatroveFileDataset(path, length, token_size=size, return_positions=True)
rows = [dataset[number] for number in range(len(dataset))]
print(json.dumps([[row["input_ids"].tolist(), row["positions"].tolist()] for row in rows]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1000, 65_700])
def test_datatrove_reads_what_is_exported_to_it(tmp_path: Path, vocab_size: int) -> None:
    """Its own dataset class: every window's ids, and each token's place in its document, from the index."""
    python = os.environ.get("QUERN_PEER_PYTHON")
    if python is None:
        pytest.skip("QUERN_PEER_PYTHON, a Python that has datatrove and torch, is not set")
    has = subprocess.run([python, "-c", "import torch, datatrove"], capture_output=True, text=True, env={})
    if has.returncode:
        pytest.skip(f"{python} has no torch or no datatrove: {has.stderr.splitlines()[-1]}")
    run = runs.write_run(tmp_path / "run", documents=60, vocab_size=vocab_size)
    export(str(run), "datatrove", str(tmp_path / "out"), sources=["web"], merge=True)
    length, size = 40, 2 if vocab_size < 65_536 else 4
    done = subprocess.run(
        [python, "-c", _READ, str(tmp_path / "out" / "web.ds"), str(size), str(length)],
        capture_output=True, text=True, env={}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    documents = expected(runs.listing(documents=60, vocab_size=vocab_size), "web", eot_id=vocab_size - 1)
    whole = [tokens for own in documents.values() for _, tokens in own]
    ids = [token for tokens in whole for token in tokens]
    places = [place for tokens in whole for place in range(len(tokens))]
    windows = json.loads(done.stdout)
    assert len(windows) == len(ids) // (length + 1) > 20
    for number, (got, positions) in enumerate(windows):
        start = number * (length + 1)
        assert got == ids[start : start + length + 1]
        # it counts anew in each window
        within = places[start : start + length + 1]
        cut = next((n for n, place in enumerate(within) if place == 0), len(within))
        assert positions == [*range(cut), *within[cut:]]
