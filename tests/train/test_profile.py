"""Traces of chosen steps: there when asked for, of those steps, and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.train.config import ProfileConfig
from quern.train.debug.report import report
from quern.train.step.profile import Profiler


def loop(folder: Path, total: int, rank: int = 0, start: int = 0, **values: Any) -> None:
    """Steps that name themselves in the trace."""
    with Profiler(str(folder), ProfileConfig(**values), rank, start) as profiler:
        for step in range(start, total):
            with torch.profiler.record_function(f"step number {step}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step(step)


def traced(path: Path) -> list[str]:
    """The steps that a trace holds."""
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return sorted({event["name"] for event in events if str(event.get("name")).startswith("step number")})


@pytest.mark.parametrize(
    ("first", "steps", "expected"),
    [(0, 2, [0, 1]), (3, 1, [3]), (2, 3, [2, 3, 4]), (4, 10, [4, 5])],
    ids=["from the first", "one", "the middle", "cut off by the end"],
)
def test_the_chosen_steps_are_in_the_trace(tmp_path, first, steps, expected):
    loop(tmp_path, 6, first_step=first, steps=steps)
    assert traced(tmp_path / "profile" / "trace_rank0.json") == [f"step number {step}" for step in expected]


def test_every_rank_has_a_file_of_its_own(tmp_path):
    loop(tmp_path, 2, rank=3, first_step=0, steps=1)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["trace_rank3.json"]


@pytest.mark.parametrize(
    ("start", "first", "expected"),
    [(1, 0, [1]), (3, 3, [3, 4]), (4, 3, [4]), (2, 3, [3, 4])],
    ids=["among them", "at the first", "at the last", "before"],
)
def test_a_run_that_is_taken_up_traces_the_chosen_steps_that_are_left(tmp_path, start, first, expected):
    loop(tmp_path, 6, start=start, first_step=first, steps=2)
    assert traced(tmp_path / "profile" / "trace_rank0.json") == [f"step number {step}" for step in expected]


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_that_is_taken_up_behind_the_chosen_steps_traces_nothing(tmp_path, first):
    """Recording to the run's end would take all memory."""
    loop(tmp_path, 6, start=3, first_step=first, steps=2)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_unless_asked_for(tmp_path):
    loop(tmp_path, 3)
    loop(tmp_path, 3, first_step=7)
    assert not list(tmp_path.iterdir())


def test_a_step_that_fails_leaves_its_trace(tmp_path):
    profiler = Profiler(str(tmp_path), ProfileConfig(first_step=0, steps=5), 0)

    def failing() -> None:
        with profiler:
            with torch.profiler.record_function("step number 0"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step(0)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        failing()
    assert traced(tmp_path / "profile" / "trace_rank0.json") == ["step number 0"]


def test_a_snapshot_of_memory_that_ran_out_is_where_debug_looks(tmp_path, monkeypatch):
    """CUDA's allocator is replaced by one that writes where it is told."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"x"))
    with (
        pytest.raises(torch.OutOfMemoryError),
        Profiler(str(tmp_path), ProfileConfig(memory_snapshot=True), 2),
    ):
        raise torch.OutOfMemoryError
    assert report(str(tmp_path))["memory"] == [str(tmp_path / "debug" / "memory_rank2.pickle")]
