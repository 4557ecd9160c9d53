"""Starting configs: what each case sets is in the file, explained, and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.config.init import DATA_CASES, TRAIN_CASES
from quern.cli.main import app
from quern.config import load_config
from quern.data_run.config import DataRun
from quern.train.config import TrainConfig

GROUPS: dict[str, tuple[type[Any], Any]] = {"data": (DataRun, DATA_CASES), "train": (TrainConfig, TRAIN_CASES)}


@pytest.mark.parametrize(("group", "case"), [(group, case) for group, (_, cases) in GROUPS.items() for case in cases])
def test_a_case_is_a_config_that_loads_with_every_key_explained(tmp_path: Path, group: str, case: str) -> None:
    out = tmp_path / "config.yaml"
    assert CliRunner().invoke(app, [group, "init", str(out), "--case", case]).exit_code == 0
    model, cases = GROUPS[group]
    assert yaml.safe_load(out.read_text()) == cases[case][1]
    assert load_config(str(out), model, ()).run_dir == cases[case][1]["run_dir"]
    lines = out.read_text().splitlines()
    keys = [at for at, line in enumerate(lines) if line and not line.lstrip().startswith("#")]
    assert len(keys) > 8
    assert all(lines[at - 1].lstrip().startswith("#") for at in keys)


def test_a_file_that_is_there_is_left_and_a_case_must_be_known(tmp_path: Path) -> None:
    out = tmp_path / "config.yaml"
    out.write_text("mine")
    told = CliRunner().invoke(app, ["data", "init", str(out)])
    assert (told.exit_code, out.read_text()) == (2, "mine")
    assert "is there already" in told.stderr
    told = CliRunner().invoke(app, ["train", "init", str(tmp_path / "other"), "--case", "moon"])
    assert told.exit_code == 2
    assert "--case: expected one of laptop, gpu, cluster, continue, got 'moon'" in told.stderr
    assert not (tmp_path / "other").exists()
