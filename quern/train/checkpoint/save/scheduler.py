"""Decides when a run saves, drives the save in flight, measures what saves cost, and records them in the ledger.

The training loop (``train/trainer.py``) calls the scheduler in each step; the scheduler drives :mod:`.async_save`, in
this order:

1. ``Trainer.save_if_due`` asks :meth:`~CheckpointScheduler.due` and calls :meth:`~CheckpointScheduler.save`. Rank 0
   writes the line ``checkpoint`` to the ledger; ``AsyncSave.begin`` makes a staging folder, agrees on the plan
   (``format/plan.py``) and starts to copy the state (:mod:`.snapshot`). When the copy is complete, the rank's writer
   (:mod:`.background`: this thread, another, or a process that runs :mod:`.writer`) writes its files (:mod:`.work`).
2. ``Trainer.update`` calls :meth:`~CheckpointScheduler.wait_staged` before the weights change.
3. ``Trainer.forward_backward`` adds :meth:`~CheckpointScheduler.progress` to the figures that are summed with the loss,
   and ``Trainer.drain_metrics`` passes the sum to :meth:`~CheckpointScheduler.advance`. When all ranks have written,
   rank 0's writer publishes: it writes the manifest, renames the folder and prunes (:mod:`.work`). When it has, the
   save has ended; the copies of it to other nodes and the store begin (``tiers/replication.py``).
4. A save that is still in flight when the next one is due, or the last of the run, is waited for.

If a rank raises while it copies or writes, it counts as done; the ranks learn of the error together when the checksums
are gathered, or in ``begin``. If a writer process dies, its rank gets an error in place of an answer, and the next
save starts another process. If the publication fails, all ranks get rank 0's error. In each of these cases the staging
folder is removed, the ledger gets the line ``checkpoint_failed``, and training continues, until
``checkpoint.max_failures`` saves in a row or the last one have failed. If a rank is killed, the others fail in their
next collective, and the launcher ends what is left of them: that of ``quern train --nproc`` (``processes/launch.py``)
after 20 seconds, torchrun by its own rules. What the save has written is then a staging folder, which the next start
removes (``format/folder.py``), or a complete checkpoint: once rank 0's writer publishes, it needs no other rank. With
``checkpoint.local`` a node's disk may also hold the tensor files under the step's own name, without a manifest; the
next start removes these too (``tiers/tiers.py``), and an earlier checkpoint of the same step is then gone. A signal
that asks for an end (SIGTERM) kills nobody: the loop finishes the step and saves once more.

``checkpoint.interval: auto`` follows :class:`quern.train.checkpoint.retention.save_interval.SaveInterval`, fed with
what saves cost here; rank 0 decides, and tells the others when a save begins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.manifest import Checkpoint, Position, checkpoint_name, list_checkpoints
from quern.train.checkpoint.format.state import TrainState
from quern.train.checkpoint.retention.save_interval import SaveInterval, estimate_mtbf
from quern.train.checkpoint.save.async_save import Outcome, Progress
from quern.train.checkpoint.save.manager import CheckpointManager
from quern.train.config import CheckpointConfig
from quern.train.history.branch import find_checkpoint
from quern.train.history.health import HealthTracker, protected
from quern.train.history.ledger import Ledger

__all__ = ["CheckpointScheduler"]

log = logging.getLogger(__name__)

#: The prefix of the measured costs in a manifest's scalars.
_PREFIX = "cadence."


@dataclass
class CheckpointScheduler:
    """The saves of a run in progress; every rank has one."""

    config: CheckpointConfig
    checkpoints: CheckpointManager
    health: HealthTracker
    """Which checkpoints have become good; rank 0's alone is told of steps."""
    ledger: Ledger | None
    """On rank 0 only."""
    ranks: int
    saved: int
    """Steps that were done at the last save, or the start."""
    _failures: int = 0
    """In a row."""
    _next: int | None = None
    """Steps that are done when the next save is due; None: never but at the end."""
    _began: float = 0.0
    _stall_s: float = 0.0
    """For which the save in flight has held up the loop."""
    _interval: SaveInterval | None = field(init=False)
    """On rank 0, where the interval is chosen."""

    def __post_init__(self) -> None:
        self._save, self._interval = self.checkpoints.async_save, None
        if self.config.interval == "auto" and self.ledger is not None:
            mtbf_s = None if self.config.mtbf_hours is None else self.config.mtbf_hours * 3600
            mtbf = estimate_mtbf(self.ledger.entries, self.ranks, configured_s=mtbf_s)
            self._interval = SaveInterval(mtbf, max_interval_s=self.config.max_interval_s)

    def restore(self, scalars: Mapping[str, object]) -> None:
        """Restore the measured costs of saves from the manifest of the checkpoint that the run resumes from.

        What another version has left there and this one cannot read is measured anew, with a warning.
        """
        kept = {name.removeprefix(_PREFIX): value for name, value in scalars.items() if name.startswith(_PREFIX)}
        if self._interval is not None:
            try:
                self._interval.restore(kept)
            except InputError as error:  # on rank 0 alone: the others would wait for it
                log.warning(
                    "what saves cost is measured anew; the checkpoint's manifest: scalars: %s%s", _PREFIX, error
                )

    def prepare(self, state: TrainState) -> None:
        """Plan and allocate memory before the first step. Collective."""
        self._save.prepare(state)
        self._plan_next()

    def _plan_next(self) -> None:
        wanted = self.config.interval
        interval = self.checkpoints.agreement.broadcast_from_rank0(self._decide) if wanted == "auto" else wanted
        if interval == 0:
            self._next = None
        elif wanted == "auto":
            self._next = self.saved + interval
        else:  # multiples, so that a resumed run saves where it would have
            self._next = (self.saved // interval + 1) * interval

    def _decide(self) -> int:
        assert self._interval is not None
        decision = self._interval.next_interval()
        log.info("%s", decision)
        return decision.steps

    def due(self, done: int) -> bool:
        """Whether a save is due by the interval after ``done`` steps."""
        return self._next is not None and done >= self._next and self.saved != done

    def progress(self) -> Progress:
        """This rank's progress of the save in flight, for :meth:`advance`."""
        return self._save.progress()

    def wait_staged(self) -> None:
        """Wait for the copy of the state; call it before weights change."""
        if self._save.in_flight:
            with self._stalls():
                self._save.wait_staged()

    def advance(self, total: Progress) -> None:
        """Process the progress of all ranks in one step. Collective where the save goes on.

        Raises:
            QuernError: too many saves have failed.
        """
        if self._save.in_flight:
            with self._stalls():
                outcome = self._save.advance(total)
            self._ended(outcome)

    def step(self, step: int, healthy: bool, seconds: float) -> None:
        """Record a step's health, write `good` lines of checkpoints that it confirms, and its duration; on rank 0."""
        self.health.observe(step, healthy)
        self._note_good()
        if self._interval is not None and seconds > 0:
            self._interval.observe("step", seconds)

    def save(
        self,
        done: int,
        data_step: int,
        state: Callable[[], TrainState],
        position: Callable[[int], Position],
        last: bool,
    ) -> None:
        """Begin a save of the state after ``done`` steps, and end it too if it is the ``last`` or the mode is sync.

        All steps so far have been told. ``position`` is asked for with the ledger's size. Collective.

        Raises:
            QuernError: too many saves have failed, or the last one.
        """
        self._ended(self._finish(), counts=not last)  # the last one is tried whatever became of those before
        offset, kept = self.checkpoints.agreement.broadcast_from_rank0(lambda: self._announce(done, data_step))
        self.saved = done
        self._began, self._stall_s = time.perf_counter(), 0.0
        error = None
        with self._stalls():
            try:
                self._save.begin(done, state(), position(offset), self.checkpoints.keep(kept), last)
            except QuernError as failure:
                error = failure
            if last or not self.config.overlap:
                self._save.wait_staged()
        if error is not None:
            self._ended(Outcome(Checkpoint(done, checkpoint_name(done)), error), last)
        elif last or self.config.mode == "sync":
            self._ended(self._finish(), last)
        self._plan_next()

    def _announce(self, done: int, data_step: int) -> tuple[int, set[int]]:
        """Write a save down before it begins; the ledger's size, and the steps that are not to be pruned for it."""
        assert self.ledger is not None, "rank 0 has the ledger"
        self.ledger.append("checkpoint", step=done, data_step=data_step, name=checkpoint_name(done))
        standing = {found.step for found in list_checkpoints(self.checkpoints.run_dir)} | {done}
        return self.ledger.offset, protected(self.ledger.entries, standing, self.health.window)

    def _finish(self) -> Outcome | None:
        with self._stalls():
            return self._save.finish()

    def scalars(self) -> dict[str, float | int]:
        """The measured costs of saves, for the manifest."""
        state = {} if self._interval is None else self._interval.state()
        return {_PREFIX + name: value for name, value in state.items()}

    @contextmanager
    def _stalls(self) -> Generator[None, None, None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._stall_s += time.perf_counter() - began

    def _ended(self, outcome: Outcome | None, last: bool = False, counts: bool = True) -> None:
        """A save has ended, if it has: say so, and go on without one that failed unless too many have."""
        if outcome is None:
            return
        step, error = outcome.checkpoint.step, outcome.error
        self._failures = 0 if error is None else self._failures + 1
        if error is None and self._interval is not None:
            self._interval.observe("cost", self._stall_s)
            self._interval.observe("delay", time.perf_counter() - self._began)
        if self.ledger is not None and error is None:
            log.info("checkpoint after step %d saved", step)
            self.health.published(step, outcome.checkpoint.name)
            self._note_good()
        elif self.ledger is not None:
            log.warning("the checkpoint after step %d was not saved: %s", step, error)
            try:
                self.ledger.append("checkpoint_failed", step=step, why=str(error))
            except QuernError as full:
                raise self._final(full, step) from error
            self.health.failed(step)
        if error is not None and (last or (counts and self._failures >= self.config.max_failures)):
            raise self._final(error, step) from error

    def _final(self, error: QuernError, step: int) -> QuernError:
        """What ends the run: ``error``, how many saves have failed and what there is to go on from."""
        try:
            newest = f"the newest checkpoint is {find_checkpoint(self.checkpoints.run_dir)}"
        except QuernError:
            newest = "there is no checkpoint to go on from"
        failed = f"the checkpoint after step {step} was not saved"
        if self._failures > 1:
            failed = f"{self._failures} saves in a row failed (checkpoint.max_failures {self.config.max_failures})"
        return QuernError(f"{error}; {failed}, and {newest}")

    def _note_good(self) -> None:
        """Asked after each step that is read and each publication."""
        if self.ledger is not None:
            for found in self.health.take():
                self.ledger.append("good", step=found.step, name=found.name)
