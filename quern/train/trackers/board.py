"""Writes TensorBoard's event files: ``RUN/tensorboard``, and a folder in it for each branch that a rollback opened; and
names the numbers of a line of metrics as every tracker shows them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from quern.closes import Closes
from quern.train.history.ledger import opening
from quern.train.history.metrics_file import held_out, numbers

__all__ = ["FOLDER", "Board", "branch_folder", "numbers_of"]

FOLDER = "tensorboard"

_SHOWN = {
    f"train/{name}" for name in ("loss", "grad_norm", "lr", "tokens_per_s", "data_wait_s", "memory_gib", "mfu_full")
}


def branch_folder(run_dir: str, entries: Iterable[Mapping[str, Any]]) -> str:
    """The folder of the branch that the run is on; ``entries``: its ledger's. TensorBoard takes each for a run."""
    folder = os.path.join(run_dir, FOLDER)
    moves = opening(entries)
    backs = [place for place, entry in enumerate(moves) if entry["kind"] == "rollback"]
    if not backs:
        return folder
    return os.path.join(folder, f"from_step_{moves[backs[-1]]['step']}.attempt_{backs[-1]}")


class Board(Closes):
    """Event files in ``folder``; TensorBoard leaves out what earlier files in it have from step ``step`` on.

    Raises:
        OSError: the folder cannot be written to; from :meth:`draw` too, since a thread of its own writes.
    """

    def __init__(self, folder: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # half a second that only a run with a board pays

        self.folder = folder
        self._hook, threading.excepthook = threading.excepthook, self._ended
        try:
            self.writer = SummaryWriter(folder, purge_step=step or None)
        except BaseException:
            threading.excepthook = self._hook
            raise

    def draw(self, row: Mapping[str, Any]) -> None:
        """Put the numbers of a line of metrics on the board."""
        for name, value in numbers_of(row).items():
            if name in _SHOWN or not name.startswith("train/"):
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write what is left."""
        try:
            self.writer.close()
        finally:
            threading.excepthook = self._hook

    def _ended(self, how: threading.ExceptHookArgs) -> None:
        """A thread has ended with an error: the writer's raises it again in :meth:`draw`, where it is one line."""
        if not (isinstance(how.exc_value, OSError) and type(how.thread).__module__.startswith("tensorboard.")):
            self._hook(how)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics: ``train/loss``, ``losses_by_source/web``, ``validation/web``; what is null is
    left out, true is 1."""
    told = {name: float(value) for name, value in numbers(row) if name != "step"}
    if row["kind"] == "validation":
        own = held_out(told)
        total = {"loss of all sources" if "loss" in own else "loss": told["loss"]} if "loss" in told else {}
        return {f"validation/{name}": loss for name, loss in (own | total).items()}
    return {name.replace(".", "/", 1) if "." in name else f"train/{name}": value for name, value in told.items()}
