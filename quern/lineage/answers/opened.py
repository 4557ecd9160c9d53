"""Opens data runs and training runs for questions; a purge that was cut off is finished or undone first."""

from __future__ import annotations

from quern import storage
from quern.lineage.purge.apply.transaction import take_up
from quern.lineage.purge.record import journal
from quern.lineage.store import IndexedRun
from quern.lineage.training import TrainingRun

__all__ = ["open_data_run", "open_training_run"]


def open_data_run(run: str) -> IndexedRun:
    """``run``, in which a purge that was cut off is finished or undone first, if it can be written to."""
    _finish_purge(run)
    return IndexedRun(run)


def open_training_run(path: str) -> TrainingRun:
    """The training run in a folder; :func:`open_data_run` says what happens in the data runs that it read."""
    train = TrainingRun(path)
    for run in train.data_folders():
        _finish_purge(run)
    return train


def _finish_purge(run: str) -> None:
    if storage.is_local(run) and journal.is_under_way(run):
        take_up(run)
