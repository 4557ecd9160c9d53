"""The rows of the SQL view ``steps``: the steps of training runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from quern.errors import QuernError
from quern.lineage.training import Attempt, TrainingRun

__all__ = ["steps_table"]


def steps_table(runs: Iterable[str], note: Callable[[str], None]) -> pa.Table:
    """A row for each step of the training runs in folders ``runs`` that is complete for certain: the view ``steps``.

    A run that cannot be read is left out, and ``note`` is told why.
    """
    schema = pa.schema(
        [
            ("train_run", pa.string()), ("attempt", pa.int32()), ("step", pa.int64()), ("data_step", pa.int64()),
            ("first_sample", pa.int64()), ("global_batch", pa.int64()), ("applied", pa.bool_()),
            ("surviving", pa.bool_()),
        ]
    )  # fmt: skip
    parts = []
    for folder in runs:
        try:
            found = TrainingRun(folder)
            parts += [
                pa.table({"train_run": pa.repeat(folder, attempt.stop - attempt.step), **columns}, schema)
                for attempt, kept in zip(found.attempts, found.kept(), strict=True)
                for columns in [_steps(found, attempt, int(kept))]
            ]
        except QuernError as error:
            note(f"{error}; it is registered as a reader of the run, and its steps are left out")
    return pa.concat_tables(parts) if parts else schema.empty_table()


def _steps(run: TrainingRun, attempt: Attempt, kept: int) -> dict[str, np.ndarray]:
    """The columns of one attempt's steps, of which those below ``kept`` survive."""
    step = np.arange(attempt.step, attempt.stop)
    data_step = step + (attempt.data_step - attempt.step)
    phases = run.order_of(attempt).phases
    first_steps, first_samples, batches = (
        np.array([getattr(phase, name) for phase in phases], np.int64)
        for name in ("first_step", "first_sample", "global_batch")
    )
    phase = np.searchsorted(first_steps, data_step, "right") - 1
    return {
        "attempt": np.full(len(step), attempt.number, np.int32),
        "step": step,
        "data_step": data_step,
        "first_sample": first_samples[phase] + (data_step - first_steps[phase]) * batches[phase],
        "global_batch": batches[phase],
        "applied": ~np.isin(step, attempt.skipped),
        "surviving": step < kept,
    }
