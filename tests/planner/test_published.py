"""The planner's time model against public runs: tests/planner/published.yaml, docs/planner.md."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from support.published import RUNS, TOLD

TESTS = [run for run in RUNS if not run.calibration]
CALIBRATION = [run for run in RUNS if run.calibration]
PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text("utf-8")


def test_few_runs_calibrate_and_many_test() -> None:
    assert len(CALIBRATION) <= 6
    assert len(TESTS) >= 15
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_every_run_has_a_source_and_known_assumptions() -> None:
    for run in RUNS:
        assert run.told["source"] in TOLD["sources"], run.name
        assumed = run.told.get("assumed", [])
        assert {*([assumed] if isinstance(assumed, str) else assumed)} <= set(TOLD["assumptions"]), run.name


@pytest.mark.parametrize("run", CALIBRATION, ids=lambda run: run.name)
def test_a_run_that_calibrates_is_met(run) -> None:
    assert abs(run.error) < 0.005


def test_the_median_error_of_runs_that_test_is_small() -> None:
    assert median(abs(run.error) for run in TESTS) <= 0.15


def test_parts_add_up_and_none_is_negative() -> None:
    for run in RUNS:
        time = run.predicted
        assert sum(time.parts.values()) == pytest.approx(time.seconds), run.name
        assert min(time.parts.values()) > -1e-9, run.name
        assert time.mfu_causal < time.mfu_full < 1, run.name


def test_the_page_has_every_run_and_the_median() -> None:
    for run in RUNS:
        assert run.row in PAGE, run.row
    errors = sorted(abs(run.error) for run in TESTS)
    within = sum(error <= 0.15 for error in errors)
    told = f"{len(TESTS)} runs that test: median error {100 * median(errors):.1f} %, {within} within 15 %"
    assert told in PAGE.replace("\n", " "), told
