"""A committed table that is missing or another: the proof names it, and nothing is purged by what is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quern.cli.lineage import app
from quern.lineage.purge.proof.verify import verify
from support.purge import corpus_scan as C
from support.purge import purge_case as P
from support.purge import small_run
from support.purge.proof_case import failed

pytestmark = pytest.mark.slow

Damage = Callable[[Path], None]


def overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[300:302] = bytes(byte ^ 0xFF for byte in data[300:302])
    path.write_bytes(data)


FAULTS = {
    "verdicts of one partition": lambda run: first(run, "verdicts").unlink(),
    "all verdicts": lambda run: shutil.rmtree(run / "verdicts"),
    "all texts": lambda run: shutil.rmtree(run / "documents"),
    "signatures of one partition": lambda run: first(run, "signatures").unlink(),
    "two bytes of verdicts": lambda run: overwrite(first(run, "verdicts")),
    "two bytes of texts": lambda run: overwrite(first(run, "documents")),
    "a table of nobody": lambda run: shutil.copy(
        first(run, "documents"), first(run, "documents").with_name("x.parquet")
    ),
}


def first(run: Path, folder: str) -> Path:
    return min((run / folder).rglob("*.parquet"))


def changed(run: Path, before: dict[str, str]) -> list[str]:
    after = C.tree(run)
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_names_the_files_that_are_not_as_committed(case: P.Case, fault: str) -> None:
    before = C.tree(case.run)
    FAULTS[fault](case.run)
    assert sorted(file for file, _, _ in failed(case)["files"]) == changed(case.run, before)


def test_also_of_a_run_that_was_never_purged(made: P.Case, tmp_path: Path) -> None:
    run = made.at(tmp_path).run
    before = C.tree(run)
    for fault in ("two bytes of verdicts", "signatures of one partition", "a table of nobody"):
        FAULTS[fault](run)
    (check,) = (check for check in verify(str(run)).checks if check.num_findings)
    assert (check.name, sorted(found.file for found in check.findings)) == ("files", changed(run, before))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("real")
    small_run.write_input(base / "in", documents=24)
    small_run.make(small_run.settings(str(base / "run"), base / "in"))
    return base


@pytest.fixture
def run(real: Path, tmp_path: Path) -> Path:
    shutil.copytree(real, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


PURGE = ("--domain", "leak.example", "--mode", "mask")


def called(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = app([*arguments], standalone_mode=False) or 0
    return code, *capfd.readouterr()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize("fault", ["missing", "overwritten", "other decisions", "no commit either"])
def test_nothing_is_purged_by_a_part_of_the_verdicts(
    run: Path, fault: str, dry: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = first(run, "verdicts")
    if fault == "overwritten":
        overwrite(path)
    elif fault == "other decisions":
        path = run / "duplicates/decisions.parquet"
        pq.write_table(pq.read_table(path).slice(1), path)
    else:
        path.unlink()
    if fault == "no commit either":
        path = run / "commits/pages"
        min(path.rglob("*.json")).unlink()
    files = C.tree(run)
    code, _, error = called(capfd, "purge", str(run), *PURGE, *dry)
    assert code == 2
    assert error.startswith(f"error: {path}: ")
    assert error.count("\n") == 1
    assert C.tree(run) == files


def test_texts_that_were_away_are_purged_when_they_are_back(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.move(run / "documents", run.parent / "away")
    code, _, warned = called(capfd, "purge", str(run), *PURGE)
    assert (code, f"documents/s/{first(run, 'verdicts').name} (and 2 more): is committed and missing" in warned) == (
        0,
        True,
    )
    assert {found.file.split("/")[0] for check in verify(str(run)).checks for found in check.findings} == {"documents"}
    shutil.move(run.parent / "away", run / "documents")
    assert not verify(str(run)).holds
    assert called(capfd, "purge", str(run), *PURGE)[0] == 0
    assert verify(str(run), deep=True).holds


def test_sql_names_the_tables_that_are_missing(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    query = "select count(*) as n, count(text) as texts from documents"
    code, out, notes = called(capfd, "sql", str(run), query, "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["texts"], notes) == (0, row["n"], "")
    away = sorted(path.name for path in (run / "documents/s").iterdir())
    shutil.rmtree(run / "documents")
    code, out, notes = called(capfd, "sql", str(run), query, "--json")
    assert (code, json.loads(out)["rows"]) == (0, [{"n": row["n"], "texts": 0}])
    assert f"3 committed tables missing, without which the views are: documents/s/{away[0]} (and 2 more)" in notes
    assert called(capfd, "sql", str(run), "select count(*) from verdicts", "--json")[2] == ""
