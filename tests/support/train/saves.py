"""A manager of checkpoints that saves and prunes at once, as no trainer does."""

from __future__ import annotations

from collections.abc import Iterable

from quern.train.checkpoint.format.manifest import Checkpoint, Position
from quern.train.checkpoint.format.state import TrainState
from quern.train.checkpoint.retention.prune import prune
from quern.train.checkpoint.save import manager


class CheckpointManager(manager.CheckpointManager):
    def save(self, step: int, state: TrainState, position: Position) -> Checkpoint:
        """Saves after the save in flight; returns the durable checkpoint, or raises what the save failed of."""
        self.async_save.finish()
        self.async_save.begin(step, state, position)
        self.async_save.wait_staged()
        outcome = self.async_save.finish()
        assert outcome is not None
        if outcome.error is not None:
            raise outcome.error
        return outcome.checkpoint

    def prune(self, steps: Iterable[int] = ()) -> list[str]:
        return prune(self.keep(steps)) if self.agreement.rank == 0 else []
