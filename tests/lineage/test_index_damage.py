"""There is an index of all that the run holds, or there is none: damaged files, kills, several builders at once."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError, QuernError
from quern.lineage.index import build as module
from quern.lineage.index.build import FOLDER
from quern.lineage.index.columns import DamagedIndexError
from quern.lineage.index.records import read_sealed
from quern.lineage.store import IndexedRun
from support.damage import flip, flip_any
from support.lineage.index_case import answers, open_run
from support.programs import kill, python

#: Files that nothing in :func:`answers` reads.
UNREAD = ("by_p", "rows")


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


# ---- what is wrong in the run


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.json: no such file"):
        IndexedRun(str(tmp_path))
    (tmp_path / "run.json").write_text('{"id": 3}')
    with pytest.raises(InputError, match="id: expected the identity of a data run"):
        IndexedRun(str(tmp_path))
    with pytest.raises(InputError, match="needs a local copy"):
        IndexedRun("memory://bucket/run")
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
    flip(path)
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
    for _ in range(5):
        path = draw.choice([path for path in index_files(run) if not path.name.startswith(UNREAD)])
        flip_any(path, draw)
        found, damaged = mended(run)
        assert found == expected, path
        said += damaged
    assert said > 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["segment", "spans", "duplicates"])
def test_a_flipped_bit_of_any_file_is_found_by_the_check(run: Path, kind: str) -> None:
    draw = random.Random(3)
    open_run(run)
    for path in index_files(run):
        if not path.parent.name.startswith(kind) or (path.name == "record.json" and kind != "segment"):
            continue
        whole = path.read_bytes()
        flip_any(path, draw)
        with pytest.raises(DamagedIndexError):
            open_run(run).check()
        path.write_bytes(whole)
    open_run(run).check()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "empty", "half", "longer", "swapped"])
def test_files_that_are_gone_or_cut_short(run: Path, expected: dict[str, Any], how: str) -> None:
    open_run(run)
    first, second = random.Random(how).sample([p for p in index_files(run) if not p.name.startswith(UNREAD)], 2)
    for path in (first, second):
        if not path.exists():  # of a part that was built anew
            assert path == second
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
    monkeypatch.setattr(module, "FORMAT", 99)
    assert open_run(run).built.segments_written == len(open_run(run).built.record["segments"])


def test_an_index_that_cannot_be_written_says_so(run: Path) -> None:
    (run / FOLDER).write_text("in the way")
    with pytest.raises(QuernError, match="the index cannot be written"):
        open_run(run)


# ---- kills, and two at once

BUILD = (
    "import sys; from quern.lineage.store import IndexedRun; "
    "print(IndexedRun(sys.argv[1], segment_documents=60).built.new)"
)


def num_files(run: Path) -> int:
    """Files of the index, while another process removes some."""
    return sum(len(names) for _, _, names in os.walk(run / FOLDER))


def stands(run: Path) -> bool:
    return (read_sealed(str(run / FOLDER / module.INDEX)) or {}).get("state") == module.survey(str(run)).digest


def start(run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python(), "-c", BUILD, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.long
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
        killed += kill(process) != 0
        if stands(run):  # never half of an index: none, or all of it when the kill came too late
            assert answers(IndexedRun(str(run))) == expected
        if draw.random() < 0.4:
            assert answers(open_run(run)) == expected
    assert killed > 2
    assert answers(open_run(run)) == expected
    assert not [path for path in (run / FOLDER).iterdir() if path.name.startswith(".building")]


@pytest.mark.slow
def test_two_builders_at_once_do_not_harm_each_other(run: Path, expected: dict[str, Any]) -> None:
    builders = [start(run) for _ in range(2)]
    outputs = [builder.communicate()[0].strip() for builder in builders]
    assert sorted(outputs) == ["False", "True"]
    lineage = IndexedRun(str(run))
    assert not lineage.built.new
    assert answers(lineage) == expected


@pytest.mark.slow
def test_a_reader_outlives_a_new_build(run: Path, expected: dict[str, Any]) -> None:
    reader = open_run(run)
    for path in (run / "verdicts").rglob("*.parquet"):
        os.utime(path, ns=(5, 5))
    assert answers(open_run(run)) == expected
    with pytest.raises(QuernError, match="its index was built anew meanwhile"):
        answers(reader)
    assert not open_run(run).built.new  # the reader has not thrown the new one away
