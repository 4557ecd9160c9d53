"""What can be done about a spike: the commands that go back, leave its data out, or look further."""

from __future__ import annotations

import shlex

from quern.errors import InputError
from quern.lineage.forensics_file import Record, StepRecord
from quern.lineage.steps import StepRead
from quern.lineage.training import TrainingRun
from quern.train.checkpoint.manifest import read_manifest

__all__ = ["commands"]


def commands(run: TrainingRun, record: Record, last: StepRecord, read: StepRead) -> list[dict[str, str]]:
    """What can be done about it."""
    found = []
    config = shlex.quote(f"{run.path}/config.yaml")
    usable = [seen for seen in run.checkpoints() if seen.abandoned is None and seen.step <= last.step]
    if read.surviving and usable:
        newest = usable[-1]
        try:
            skip = last.data_step + 1 - read_manifest(newest.path).data_step
        except InputError:
            skip = 0
        if skip > 0:
            found.append(
                {
                    "what": f"go back to the checkpoint after {newest.step} steps and never read data steps "
                    f"{last.data_step + 1 - skip} to {last.data_step}",
                    "command": f"quern train {config} resume.step={newest.step} data_skip={skip}",
                }
            )
    if record.decision == "continued":
        advice = [
            ("where the loss or the gradient norm spikes", "spike", {"loss_spike", "grad_norm_spike"}),
            ("where the loss or the gradient norm is not finite", "non_finite", {"non_finite"}),
        ]
        found += [
            {"what": f"from now on leave weights alone {where}", "command": f"quern train {config} guard.{key}=skip"}
            for where, key, kinds in advice
            if kinds & {*record.reasons}
        ]
    found.append(
        {
            "what": "every sequence of the step",
            "command": f"quern lineage step {shlex.quote(run.path)} {last.step} --attempt {record.attempt}",
        }
    )
    return found
