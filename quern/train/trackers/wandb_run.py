"""Writes a branch as a run of Weights & Biases; with ``WANDB_MODE=offline`` below ``RUN/trackers/wandb`` alone."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

from quern.train.trackers.backend import Opening, Point
from quern.train.trackers.branches import FOLDER

os.environ["WANDB_ERROR_REPORTING"] = "false"  # read when it is imported

import wandb

__all__ = ["WandbRun"]


class WandbRun:
    """A run in a project. See :class:`quern.train.trackers.backend.Backend`. W&B drops a row whose number was there
    before the run was resumed, so rows have numbers of their own; ``step`` is on the x-axis.

    Metrics, config and what ``run.json`` says are all that is sent: no code, git state, console, packages, host or
    use of the machine.
    """

    def __init__(self, opening: Opening) -> None:
        self.id = opening.id or uuid.uuid4().hex
        quiet = wandb.Settings(
            console="off", silent=True, save_code=False, disable_code=True, disable_git=True, host="",
            disable_job_creation=True, x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
            x_save_requirements=False,
        )  # fmt: skip
        config = {**opening.config, "quern": dict(opening.described)}
        if opening.parent is not None:
            config["parent"] = {"run": opening.parent.id, "step": opening.parent.step}
        self._run = wandb.init(
            project=opening.project, id=self.id, name=opening.name if opening.id is None else None, tags=opening.tags,
            group=opening.group, dir=os.path.join(os.path.abspath(opening.run_dir), FOLDER), resume="allow",
            settings=quiet,
        )  # fmt: skip
        self._run.config.update(config, allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, points: Sequence[Point]) -> None:
        """See the protocol."""
        for point in points:
            given = {**point.numbers, "step": point.step, "_timestamp": point.time_ms / 1000}
            self._run.log(given, step=point.number)

    def close(self, how: str) -> None:
        """See the protocol."""
        self._run.finish(exit_code=1 if how in ("failed", "killed") else 0)
