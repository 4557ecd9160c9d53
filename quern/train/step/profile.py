"""Writes a ``torch.profiler`` trace of chosen steps, and a memory snapshot when memory runs out."""

from __future__ import annotations

import os
from typing import Any, Self

import torch
from torch import profiler

from quern.train.config import ProfileConfig
from quern.train.debug.dumps import debug_folder
from quern.train.step.trace import STEP

__all__ = ["Profiler", "recording"]


def recording() -> Any:
    """The profiler as a context: operations with their shapes, and the device's kernels."""
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    return profiler.profile(activities=activities, record_shapes=True)


class Profiler:
    """Around the loop; :meth:`step` after each step. Traces go to ``RUN/profile/``, one file a rank, with a
    mark for each step, as ``quern train profile --trace`` reads them; the snapshot of memory to ``RUN/debug/``, in the
    form that pytorch.org/memory_viz reads.

    ``start``: the loop's first step. A run that is taken up among the chosen steps traces those that are left.
    """

    def __init__(self, run_dir: str, config: ProfileConfig, rank: int, start: int = 0) -> None:
        self._folder, self._debug = os.path.join(run_dir, "profile"), debug_folder(run_dir)
        self._config = config
        self._rank = rank
        self._start = start
        self._active: Any = None
        self._mark: Any = None

    def __enter__(self) -> Self:
        if self._config.memory_snapshot and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        first = self._config.first_step
        if first is not None and first <= self._start < first + self._config.steps:
            self._begin(self._start)
        return self

    def step(self, step: int) -> None:
        """Record that step ``step`` is done."""
        first = self._config.first_step
        if first is None:
            return
        if step + 1 == first:
            self._begin(step + 1)
        elif step + 1 == first + self._config.steps:
            self._end()
        elif self._active is not None:
            self._begin_step(step + 1)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end()
        if isinstance(error, torch.OutOfMemoryError) and self._config.memory_snapshot:
            os.makedirs(self._debug, exist_ok=True)
            torch.cuda.memory._dump_snapshot(os.path.join(self._debug, f"memory_rank{self._rank}.pickle"))

    def _begin(self, step: int) -> None:
        self._active = recording()
        self._active.__enter__()
        self._begin_step(step)

    def _begin_step(self, step: int) -> None:
        self._end_step()
        self._mark = profiler.record_function(f"{STEP}{step}")
        self._mark.__enter__()

    def _end_step(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _end(self) -> None:
        if self._active is None:
            return
        self._end_step()
        self._active.__exit__(None, None, None)
        os.makedirs(self._folder, exist_ok=True)
        self._active.export_chrome_trace(os.path.join(self._folder, f"trace_rank{self._rank}.json"))
        self._active = None
