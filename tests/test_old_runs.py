"""Runs that an earlier version left on users' disks open and go on: complete, unfinished, and in training.

``data/old_runs.tar.gz`` was written by the code of commit 1372051 (``data/old_runs.py``), and so was what it expects.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quern import storage
from quern.cli.main import app
from quern.config import load_config
from quern.data_pipeline.execution import run_directory
from quern.data_pipeline.source_chains import PAGES_FORMAT
from quern.data_run.config import DataRun
from quern.train.config import TrainConfig
from support.data_pipeline import in_process
from support.train import run_case

pytestmark = pytest.mark.slow


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The folder with the runs, in which their paths hold."""
    with tarfile.open(Path(__file__).parent / "data" / "old_runs.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tokens(run: Path) -> dict[str, str]:
    found = sorted(run.glob("tokens/**/*.bin"))
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def expected() -> Any:
    return json.loads(Path("expected.json").read_text())


def test_a_complete_data_run_stays_as_it_is(old):
    before = {path: path.read_bytes() for path in (old / "complete").rglob("*") if path.is_file()}
    with in_process.engine():
        stats = in_process.run.run_data(load_config("complete.yaml", DataRun))
    assert stats == storage.read_json("complete/stats.json")
    assert tokens(old / "complete") == expected()["tokens"]
    assert {path: path.read_bytes() for path in before} == before
    run = CliRunner().invoke
    commands = (
        ["data", "status", "complete"],
        ["lineage", "verify", "complete"],
        ["lineage", "purge", "complete", "--url", "https://example.org/3", "--mode", "mask", "--dry-run"],
        ["lineage", "show", "complete", "--url", "https://example.org/3"],
    )
    for command in commands:
        found = run(app, command)
        assert found.exit_code == 0, found.output
    assert "example.org/3" in found.output
    found = run(
        app, ["lineage", "sql", "complete", "select kept, count(*) n from documents group by kept order by kept"]
    )
    assert found.exit_code == 0, found.output
    assert [line.split() for line in found.output.splitlines()[-3:-1]] == [["False", "2"], ["True", "40"]]


def test_an_unfinished_data_run_reads_its_pages_again_and_says_so(old, caplog):
    record = storage.read_json("unfinished/run.json")
    record["versions"] = run_directory._versions()  # newer libraries are refused, by a line of their own
    storage.write_json("unfinished/run.json", record)
    with in_process.engine(), caplog.at_level("INFO"):
        in_process.run.run_data(load_config("unfinished.yaml", DataRun))
    assert tokens(old / "unfinished") == expected()["tokens"]
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "done again" in said
    assert f"quern's rules (pages format {PAGES_FORMAT})" in said


def test_a_training_run_goes_on(old):
    left = run_case.live(load_config("train/config.yaml", TrainConfig))
    assert (left.start.kind, left.start.step, left.start.attempt) == ("resume", 4, 1)
    assert left.complete
    # those of the straight run, to the rounding of another machine
    losses = {step: row["loss"] for step, row in run_case.rows("train").items() if step >= 4}
    straight = {int(step): loss for step, loss in expected()["losses"].items()}
    assert losses == pytest.approx({step: straight[step] for step in range(4, 8)}, rel=1e-5)
    for step in ("1", "6"):
        found = CliRunner().invoke(app, ["lineage", "step", "train", step])
        assert found.exit_code == 0, found.output
        assert "https://example.org/" in found.output
    found = CliRunner().invoke(app, ["checkpoint", "verify", "train"])
    assert found.exit_code == 0, found.output
