"""``quern train --nproc N --max-restarts R``: several ranks on this machine, started again after a failure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from quern.cli.output import plain_line
from quern.errors import QuernError
from quern.safe_path import module
from quern.train.config import TrainConfig
from quern.train.supervision.events import Events
from quern.train.supervision.restarts import Restarts
from quern.train.supervision.supervisor import Supervisor
from quern.words import counted

__all__ = ["supervise"]

#: Documents that are named of a step that has ended a run twice.
_NAMED = 8


def supervise(
    config: TrainConfig, file: str, overrides: Sequence[str], nproc: int, most_restarts: int, least: int | None = None,
    spares: int = 0, *, replace_slow: bool = False,
) -> int:  # fmt: skip
    """Train ``file`` with ``overrides``, which is ``config``, on ``nproc`` processes, after failures of one of them on
    at least ``least``, with ``spares`` places more; returns the exit code. ``replace_slow``: see
    :class:`Supervisor`."""
    restarts = Restarts(most_restarts, least=least)
    command = module("quern.train", file, *overrides)
    with closing(Events(config.run_dir, config.on_event)) as events:
        own = Supervisor(config.run_dir, command, nproc, restarts, events, _tell, spares, replace_slow=replace_slow)
        attempt = own.run()
    if restarts.why is not None:
        _tell(f"not started again: {restarts.why}")
    if restarts.why is not None and attempt.step is not None:
        _tell(_what_was_read(config.run_dir, attempt.step))
    return attempt.code


def _what_was_read(run_dir: str, step: int) -> str:
    """The documents of a step, as far as they can be known."""
    from quern.lineage.answers.opened import open_training_run
    from quern.lineage.answers.step import step_answer

    command = f"quern lineage step {run_dir} {step}"
    try:
        run = open_training_run(run_dir)
        newest = len(run.attempts) - 1
        command += f" --attempt {newest}"  # no ledger proves that it got to the step
        rows = list(step_answer(run, step, attempt=newest)["sequences"])
    except QuernError:
        return f"what step {step} read: {command}"
    documents = {own["doc_id"]: own["name"] or own["doc_id"] for row in rows for own in row["documents"]}
    named = ", ".join(plain_line(name, 200) for name in list(documents.values())[:_NAMED])
    more = f" and {len(documents) - _NAMED:,} more" if len(documents) > _NAMED else ""
    return f"step {step} read {counted(len(documents), 'document')}: {named}{more} ({command})"


def _tell(line: str) -> None:
    print(plain_line(line, 4000), file=sys.stderr, flush=True)  # it may quote an error of a rank
