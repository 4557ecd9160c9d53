"""The index is of what the run holds now, or there is none: stale, interrupted, shared, damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError, QuernError
from quern.lineage.index.build import FOLDER
from quern.lineage.index.columns import DamagedIndexError
from quern.lineage.store import Lineage

from . import runs

SEGMENT = 60
#: Files that nothing in :func:`answers` reads.
UNREAD = ("by_p", "rows")


def open_run(run: Path, **arguments: Any) -> Lineage:
    return Lineage(str(run), segment_documents=SEGMENT, **arguments)


def answers(lineage: Lineage) -> dict[str, Any]:
    """What it says of a quarter of the documents, by doc_id: the same for every numbering."""
    numbers = np.arange(lineage.num_documents)
    documents = lineage.documents(numbers)
    ids = documents.doc_ids
    spans = lineage.spans_of(numbers)
    columns = (getattr(spans, name).tolist() for name in ("numbers", "streams", "starts", "lengths", "purged"))
    span_of = {ids[row[0]]: (lineage.streams[row[1]].identity, *row[2:]) for row in zip(*columns, strict=True)}
    return {
        doc_id: (
            url,
            source,
            span_of.get(doc_id),
            lineage.decision(number),
            sorted(ids[other] for other in lineage.removed_for(number)),
            sorted(ids[other] for other in lineage.cluster(number)),
            sorted(ids[other] for other in (lineage.find(url=url) if url is not None else ())),
            [ids[other] for other in lineage.find(doc=doc_id)],
        )
        for number, (doc_id, url, source) in enumerate(zip(ids, documents.urls, documents.sources, strict=True))
        if doc_id[0] % 4 == 0
    }


def parts(run: Path) -> dict[str, int]:
    """Folders of the index, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in (run / FOLDER).iterdir() if path.is_dir()}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_run(tmp_path_factory.mktemp("index") / "run", seed=4, documents=240, files=6)


@pytest.fixture(scope="module")
def expected(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    copy = tmp_path_factory.mktemp("expected") / "run"
    shutil.copytree(pristine, copy)
    return answers(open_run(copy))


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def test_what_stands_is_not_built_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert open_run(run).built.new
    assert capsys.readouterr().err == f"building the lineage index of {run}\n"
    before = parts(run)
    lineage = Lineage(str(run), build=False)
    assert not lineage.built.new
    assert capsys.readouterr().err == ""
    assert parts(run) == before
    assert len(before) > 4


def test_nothing_but_the_index_folder_is_written_to(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    open_run(run)
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and FOLDER not in path.parts}
    assert before == after
    left = {path.name.partition("_")[0] for path in (run / FOLDER).iterdir()}
    assert left == {"segment", "spans", "duplicates", "index.json", ".lock"}


def test_two_builds_are_the_same_bytes(run: Path) -> None:
    def files() -> dict[str, bytes]:
        return {str(p.relative_to(run)): p.read_bytes() for p in (run / FOLDER).rglob("*") if p.is_file()}

    open_run(run)
    first = files()
    shutil.rmtree(run / FOLDER)
    open_run(run)
    assert files() == first


def test_without_leave_to_build_a_missing_or_old_index_is_refused(run: Path) -> None:
    with pytest.raises(InputError, match="has no index, or one older than its files"):
        Lineage(str(run), build=False)
    assert not (run / FOLDER).exists()
    open_run(run)
    os.utime(next((run / "verdicts" / "web").iterdir()), ns=(1, 1))
    with pytest.raises(InputError, match="older than its files"):
        Lineage(str(run), build=False)


@pytest.mark.parametrize("what", ["verdicts/web/part-001.warc.gz.parquet", "duplicates/decisions.parquet"])
def test_a_file_that_was_touched_makes_the_index_stale(run: Path, expected: dict[str, Any], what: str) -> None:
    open_run(run)
    before = parts(run)
    os.utime(run / what, ns=(1, 1))
    lineage = open_run(run)
    assert lineage.built.new
    kept = set(before) & set(parts(run))
    if what.startswith("verdicts"):
        assert 0 < lineage.built.segments_written < len(lineage.built.record["segments"])
    else:
        assert lineage.built.segments_written == 0
        assert [name for name in before if name not in kept] == [n for n in before if n.startswith("duplicates")]
    assert all(parts(run)[name] == before[name] for name in kept)
    assert answers(lineage) == expected


def test_a_new_partition_leaves_the_old_segments(run: Path) -> None:
    old = runs.listing(seed=4, documents=240, files=6)
    more = runs.listing(seed=5, documents=90, files=2, sources=("news",))
    open_run(run)
    before = parts(run)
    both = runs.Listing(
        {**old.verdicts, **more.verdicts}, {**old.documents, **more.documents}, old.decisions + more.decisions,
        old.clusters + more.clusters, {**old.spans, **more.spans}, {**old.texts, **more.texts},
    )  # fmt: skip
    times = {path: path.stat().st_mtime_ns for path in (run / "verdicts").rglob("*.parquet")}
    runs.write_listing(run, both, identity="run00004")
    for path, stamp in times.items():  # the old files as they were
        os.utime(path, ns=(stamp, stamp))
    lineage = open_run(run)
    segments = [name for name in before if name.startswith("segment")]
    assert sum(name in parts(run) for name in segments) >= len(segments) - 1
    assert lineage.num_documents == 330
    found = answers(lineage)
    shutil.rmtree(run / FOLDER)
    assert answers(open_run(run)) == found


def test_answers_after_an_addition_are_those_of_a_new_index(run: Path) -> None:
    hidden = run / "verdicts" / "web" / "part-003.warc.gz.parquet"
    found = runs.listing(seed=4, documents=240, files=6)
    kept = {row["doc_id"] for name, rows in found.verdicts.items() for row in rows if "web/part-003" not in name}
    less = runs.Listing(
        found.verdicts,
        found.documents,
        [row for row in found.decisions if {row["doc_id"], row["duplicate_of"], row["cluster_id"]} <= kept],
        [row for row in found.clusters if {row["doc_id"], row["cluster_id"]} <= kept],
        {},
        found.texts,
    )
    runs.write_listing(run, less, identity="run00004")
    shutil.rmtree(run / "tokens")
    hidden.rename(run / "aside")
    assert open_run(run).num_documents == len(kept)
    segments = {name for name in parts(run) if name.startswith("segment")}
    (run / "aside").rename(hidden)
    runs.write_tokens(run, found)
    lineage = open_run(run)
    assert lineage.num_documents == 240
    assert segments & set(parts(run))
    joined = answers(lineage)
    shutil.rmtree(run / FOLDER)
    assert answers(open_run(run)) == joined


def test_a_new_corpus_version_makes_new_spans_alone(run: Path) -> None:
    open_run(run)
    before = parts(run)
    path = run / "tokens" / "VERSION.json"
    version = json.loads(path.read_text())
    version["version"] = 2
    version["sources"]["web"]["since"] = 2
    del version["sources"]["text"], version["sources"]["text.val"]
    path.write_text(json.dumps(version))
    lineage = open_run(run)
    assert (lineage.version, [stream.name for stream in lineage.streams]) == (2, ["web", "web.val"])
    assert [stream.identity for stream in lineage.streams] == ["run00004/web/2", "run00004/web.val/1"]
    gone = [name for name in before if name not in parts(run)]
    assert [name.partition("_")[0] for name in gone] == ["spans"]
    assert set(lineage.spans_of(np.arange(240)).streams.tolist()) == {0, 1}


def test_a_run_that_moved_keeps_its_index(run: Path, tmp_path: Path) -> None:
    open_run(run)
    moved = run.rename(tmp_path / "moved {} run")
    lineage = Lineage(str(moved), build=False)
    assert lineage.streams[0].path == str(moved / "tokens" / "web")
    assert len(lineage.spans_of(np.arange(240)))
    assert lineage.verdict(0)["doc_id"] == lineage.documents(0).doc_ids[0]


def test_a_row_that_changed_after_the_run_was_opened_is_not_shown(run: Path) -> None:
    lineage = open_run(run)
    number = 17
    file = lineage.verdict(number)["file"]
    path = run / "verdicts" / file
    table = pq.read_table(path)
    pq.write_table(table.take(list(range(len(table)))[::-1]), path)
    with pytest.raises(InputError, match="is of another document"):
        lineage.verdict(number)
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(InputError, match="has changed"):
        lineage.verdict(number)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        lineage.verdict(number)


# ---- what is wrong in the run


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.json: no such file"):
        Lineage(str(tmp_path))
    (tmp_path / "run.json").write_text('{"id": 3}')
    with pytest.raises(InputError, match="id: expected the identity of a data run"):
        Lineage(str(tmp_path))
    with pytest.raises(InputError, match="needs a local copy"):
        Lineage("memory://bucket/run")
    assert not (tmp_path / FOLDER).exists()


def test_a_damaged_verdict_file_is_named(run: Path) -> None:
    path = run / "verdicts" / "web" / "part-002.warc.gz.parquet"
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[:-9], whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"part-002\.warc\.gz\.parquet: cannot be read"):
            open_run(run)
    pq.write_table(pa.table({"doc_id": [b"x" * 16]}), path)
    with pytest.raises(InputError, match="has no column 'host'; expected a verdict table"):
        open_run(run)
    path.write_bytes(whole)
    assert open_run(run).num_documents == 240


def test_a_span_of_a_document_without_a_verdict_is_refused(run: Path) -> None:
    (run / "verdicts" / "web" / "part-002.warc.gz.parquet").unlink()
    with pytest.raises(
        InputError, match=r"spans\.parquet: row \d+: expected document [0-9a-f]{32} to have one verdict"
    ):
        open_run(run)
    shutil.rmtree(run / "tokens")
    with pytest.raises(
        InputError, match=r"(decisions|clusters)\.parquet: row \d+: .*expected a document with one verd"
    ):
        open_run(run)


def test_two_rows_of_one_document_are_refused(run: Path) -> None:
    shutil.copy(run / "verdicts" / "web" / "part-002.warc.gz.parquet", run / "verdicts" / "web" / "zzz.parquet")
    with pytest.raises(InputError, match="to have one verdict row, got two"):
        open_run(run)


def test_damaged_spans_are_refused(run: Path) -> None:
    path = run / "tokens" / "web" / "shard_00001.spans.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="is damaged: its SHA-256"):
        open_run(run)


# ---- damage of the index


def index_files(run: Path) -> list[Path]:
    return sorted(path for path in (run / FOLDER).rglob("*") if path.is_file() and path.name != ".lock")


def mended(run: Path) -> tuple[dict[str, Any], bool]:
    """What the run answers, and whether it first had to say that its index is damaged."""
    try:
        return answers(open_run(run)), False
    except QuernError as error:
        if not str(error).startswith(str(run / FOLDER)):
            raise
    return answers(open_run(run)), True


@pytest.mark.slow
def test_a_flipped_bit_is_mended_or_said_and_never_answers_wrongly(run: Path, expected: dict[str, Any]) -> None:
    open_run(run)
    draw = random.Random(2)
    said = 0
    for _ in range(20):
        path = draw.choice([path for path in index_files(run) if not path.name.startswith(UNREAD)])
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        found, damaged = mended(run)
        assert found == expected, path
        said += damaged
    assert said > 5


@pytest.mark.parametrize("kind", ["segment", "spans", "duplicates"])
def test_a_flipped_bit_of_any_file_is_found_by_the_check(run: Path, kind: str) -> None:
    draw = random.Random(3)
    open_run(run)
    for path in index_files(run):
        if not path.parent.name.startswith(kind) or (path.name == "record.json" and kind != "segment"):
            continue
        whole = path.read_bytes()
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(DamagedIndexError):
            open_run(run).check()
        path.write_bytes(whole)
    open_run(run).check()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "empty", "half", "longer", "swapped"])
def test_files_that_are_gone_or_cut_short(run: Path, expected: dict[str, Any], how: str) -> None:
    open_run(run)
    for path in random.Random(6).sample(index_files(run), 8):
        if not path.exists() or path.name.startswith(UNREAD):  # of a part that was built anew
            continue
        data = path.read_bytes()
        if how == "gone":
            path.unlink()
        elif how == "swapped":
            for other in [own for own in index_files(run) if own.name == path.name and own != path][:1]:
                path.write_bytes(other.read_bytes())
        else:
            path.write_bytes({"empty": b"", "half": data[: len(data) // 2], "longer": data + b"\0" * 8}[how])
        assert mended(run)[0] == expected, path


def test_an_index_of_another_format_is_built_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_run(run)
    monkeypatch.setattr("quern.lineage.index.build.FORMAT", 99)
    assert open_run(run).built.segments_written == len(open_run(run).built.record["segments"])


def test_an_index_that_cannot_be_written_says_so(run: Path) -> None:
    (run / FOLDER).write_text("in the way")
    with pytest.raises(QuernError, match="the index cannot be written"):
        open_run(run)


# ---- kills, and two at once

BUILD = (
    "import sys; from quern.lineage.store import Lineage; print(Lineage(sys.argv[1], segment_documents=60).built.new)"
)


def num_files(run: Path) -> int:
    """Files of the index, while another process removes some."""
    return sum(len(names) for _, _, names in os.walk(run / FOLDER))


def start(run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_build_killed_at_any_moment_leaves_the_old_index_or_none(run: Path, expected: dict[str, Any]) -> None:
    """Each round kills a build at one more file than the last, and then opens what is left."""
    draw = random.Random(8)
    killed = 0
    for moment in (0, 3, 12, 20, 30):
        os.utime(draw.choice(sorted((run / "verdicts" / "web").iterdir())), ns=(moment + 1, moment + 1))
        before = num_files(run)
        process = start(run)
        while process.poll() is None and num_files(run) <= before + moment:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() != 0
        with suppress(InputError):  # never half of an index: none, or all of it when the kill came too late
            assert answers(Lineage(str(run), build=False)) == expected
        if draw.random() < 0.4:
            assert answers(open_run(run)) == expected
    assert killed > 2
    assert answers(open_run(run)) == expected
    assert not [path for path in (run / FOLDER).iterdir() if path.name.startswith(".building")]


@pytest.mark.slow
def test_two_builders_at_once_do_not_harm_each_other(run: Path, expected: dict[str, Any]) -> None:
    builders = [start(run) for _ in range(3)]
    outputs = [builder.communicate()[0].strip() for builder in builders]
    assert sorted(outputs) == ["False", "False", "True"]
    assert answers(Lineage(str(run), build=False)) == expected


def test_a_reader_outlives_a_new_build(run: Path, expected: dict[str, Any]) -> None:
    reader = open_run(run)
    for path in (run / "verdicts").rglob("*.parquet"):
        os.utime(path, ns=(5, 5))
    assert answers(open_run(run)) == expected
    with pytest.raises(QuernError, match="its index was built anew meanwhile"):
        answers(reader)
    assert not open_run(run).built.new  # the reader has not thrown the new one away
