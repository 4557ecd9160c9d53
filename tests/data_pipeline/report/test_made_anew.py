"""stats.json and report.html of a complete run that are gone are made anew, byte for byte, or said to be missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.data_run.config import DataRun
from support.data_pipeline import in_process
from support.purge import small_run

pytestmark = pytest.mark.slow


def data(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", *arguments])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataRun:
    base = tmp_path_factory.mktemp("run")
    small_run.write_input(base / "in", documents=24)
    made = small_run.settings(str(base / "run"), base / "in")
    with in_process.engine():
        in_process.run.run_data(made)
    return made


@pytest.mark.parametrize("gone", [["report.html"], ["stats.json"], ["report.html", "stats.json"]])
def test_what_is_gone_is_as_it_was(config: DataRun, gone: list[str]) -> None:
    run = Path(config.run_dir)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for name in gone:
        (run / name).unlink()
    told = data("report", str(run))
    if "stats.json" in gone:
        assert (told.exit_code, told.stderr.split(";")[0]) == (
            2,
            f"error: {run}: expected a complete data run: its stats.json is missing",
        )
    else:
        assert "report.html is missing; quern data run" in " ".join(told.stdout.split())
    with in_process.engine():
        in_process.run.run_data(config)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_report_that_cannot_be_made_is_said_to_be_missing(
    config: DataRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(config.run_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/documents")
    (tmp_path / "run/report.html").unlink()
    stats = in_process.run.run_data(config.model_copy(update={"run_dir": str(tmp_path / "run")}))
    assert stats["pages"] == 24
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"{tmp_path}/run/report.html: is missing and cannot be made anew: {tmp_path}/run/documents/s/"
    )
