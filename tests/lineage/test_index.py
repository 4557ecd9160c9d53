"""The index is of what the run holds now: built once, and anew where the run has changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.lineage.index.build import FOLDER
from quern.lineage.store import IndexedRun
from support.lineage import runs
from support.lineage.index_case import answers, open_run, parts


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def test_what_stands_is_not_built_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert open_run(run).built.new
    assert capsys.readouterr().err == f"building the lineage index of {run}\n"
    before = parts(run)
    lineage = IndexedRun(str(run))
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    lineage = IndexedRun(str(moved))
    assert not lineage.built.new
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
    with pytest.raises(InputError, match="no such file"):
        lineage.verdict(number)
