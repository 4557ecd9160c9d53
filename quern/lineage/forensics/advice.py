"""Suggests commands after a spike: go back, leave its data out, or investigate further."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from quern.errors import InputError
from quern.lineage.forensics.cause import BY_LOSS
from quern.lineage.forensics.file import ForensicsRecord, StepRecord
from quern.lineage.steps import StepRead
from quern.lineage.training import TrainingRun
from quern.train.checkpoint.format.manifest import read_manifest
from quern.train.history.health import last_good

__all__ = ["commands"]


def commands(
    run: TrainingRun,
    record: ForensicsRecord,
    last: StepRecord,
    read: StepRead,
    named: Sequence[tuple[str, str]],
    kind: str,
) -> list[dict[str, str]]:
    """What can be done about it. ``named``: data run and doc_id of the documents that are, or may be, its cause;
    ``kind``: of the cause."""
    from quern.train.config import GuardConfig

    found: list[dict[str, str]] = []

    def propose(what: str, command: str) -> None:
        found.append({"what": what, "command": command})

    config, folder = shlex.quote(f"{run.path}/config.yaml"), shlex.quote(run.path)
    usable = [seen for seen in run.checkpoints() if seen.abandoned is None and seen.step <= last.step]
    if read.surviving and usable:
        newest = usable[-1]
        try:
            skip = last.data_step + 1 - read_manifest(newest.path).data_step
        except InputError:
            skip = 0
        if skip > 0:
            propose(
                f"go back to the checkpoint after {newest.step} steps and never read data steps "
                f"{last.data_step + 1 - skip} to {last.data_step}",
                f"quern train {config} resume.step={newest.step} data_skip={skip}",
            )
    window = run.of_config(lambda config: config.guard, GuardConfig()).health_window
    good = last_good(run.entries, [seen.step for seen in usable], window) if read.surviving else None
    if good is not None and good != usable[-1].step:
        propose(
            f"go back to the last good checkpoint, after {good} steps, where the newest may be spoilt too",
            f"quern train {config} resume.step={good}",
        )
    # of a gradient alone the documents' losses tell nothing: what is named by them may have had no part in it
    by_gradient = kind == "documents" and "grad_norm_spike" in record.reasons and not BY_LOSS & {*record.reasons}
    for data in dict.fromkeys(() if by_gradient else (data for data, _ in named)):
        ids = [doc_id for own, doc_id in named if own == data]
        whom = "document" if len(ids) == 1 else f"{len(ids)} documents"
        condition = ", if it is the cause" if kind == "unclear" else ""
        docs = " ".join(f"--doc {doc_id}" for doc_id in ids)
        propose(
            f"take the {whom} out of the data for good{condition}; the report has the command by which this run goes "
            "on from its last clean checkpoint",
            f"quern lineage purge {shlex.quote(data)} --mode mask {docs} --train-run {folder}",
        )
    if record.decision == "continued":
        for where, key, kinds in (
            ("where the loss or the gradient norm spikes", "spike", {"loss_spike", "grad_norm_spike"}),
            ("where the loss or the gradient norm is not finite", "non_finite", {"non_finite"}),
        ):
            if kinds & {*record.reasons}:
                propose(f"from now on leave weights alone {where}", f"quern train {config} guard.{key}=skip")
    propose("every sequence of the step", f"quern lineage step {folder} {last.step} --attempt {record.attempt}")
    return found
