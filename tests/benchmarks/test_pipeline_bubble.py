"""The pipeline's benchmark runs, and its stages sleep as often as its simulation says they compute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quern.parallel.planning.schedules import SCHEDULES

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "pipeline_bubble.py"


@pytest.mark.long
def test_a_row_for_every_schedule() -> None:
    sizes = ["--pp", "2", "--micro-batches", "3", "4", "--unit-ms", "1", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, "--json"], capture_output=True, text=True, check=True, timeout=120
    )
    rows = json.loads(done.stdout)["rows"]
    assert {(row["schedule"], row["micro_batches"]) for row in rows} == {
        (schedule, number) for schedule in SCHEDULES for number in (3, 4) if (schedule, number) != ("dualpipe_v", 3)
    }
    for row in rows:
        assert 0 < row["simulated"] < 1
        assert 0 < row["measured"] < 1
