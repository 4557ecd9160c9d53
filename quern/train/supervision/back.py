"""Ends a run whose weights are to be left, so that its next start goes back to an earlier checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from quern.errors import GoBackError, QuernError
from quern.train.config import TrainConfig
from quern.train.history.branch import newest_until
from quern.train.history.ledger import Ledger
from quern.train.processes.ranks import Ranks
from quern.train.step.figures import Figures
from quern.train.supervision.replicas import Corruption

__all__ = ["GoingBack"]

log = logging.getLogger(__name__)


class GoingBack:
    """Decides by figures that are the same on every rank. ``order``: hash of the run's. ``before``: steps in which it
    has gone back. ``ledger``: rank 0's, None on the others."""

    def __init__(
        self, config: TrainConfig, order: str, before: Sequence[int], ledger: Ledger | None, ranks: Ranks
    ) -> None:
        self._config, self._order, self._before, self._ledger, self._ranks = config, order, before, ledger, ranks

    def judge(self, step: int, data_step: int, found: Figures, skips: int) -> None:
        """Go back where the guard's policy is ``rollback_and_skip`` and the step was what it is for. ``skips``: steps
        that were skipped in a row, up to it.

        Raises:
            GoBackError: on every rank.
            QuernError: on every rank: it has gone back or skipped steps too often.
        """
        config = self._config.guard
        if skips > config.max_skips:
            raise self._too_many(step, skips)
        spike = (found.loss_spike or found.norm_spike) and config.spike == "rollback_and_skip"
        if not spike and not (found.non_finite and config.non_finite == "rollback_and_skip"):
            return
        reason = "loss or gradient norm is not finite" if found.non_finite else "spike"
        self._end_if_too_often(step, reason)
        first = max(0, data_step - config.rollback_steps + 1)
        self.now(step, reason, before=step, leave_out=range(first, data_step + 1))

    def judge_copies(self, found: Sequence[Corruption]) -> None:
        """Go back where copies have differed, behind the step after which they were last equal.

        Raises:
            GoBackError: on every rank.
            QuernError: on every rank: it has gone back too often.
        """
        for corruption in found:
            if self._ledger is not None:
                log.error("silent corruption: %s", corruption)
                self._ledger.append("corrupt", **{name: own for name, own in vars(corruption).items() if own != ()})
        if found:
            self._end_if_too_often(found[0].step - 1, "silent corruption")
            self.now(
                found[0].step - 1, f"silent corruption: {found[0]}", before=min(own.since for own in found), good=False
            )

    def now(self, step: int, reason: str, *, before: int, leave_out: Iterable[int] = (), good: bool = True) -> None:
        """Write down that the next start goes back to the last good checkpoint, or to the newest, after at most
        ``before`` steps, and from there does not apply the data steps ``leave_out``. Collective.

        Raises:
            GoBackError: always, on every rank.
        """
        data_steps = list(leave_out)
        if self._ledger is not None:
            self._ledger.append(
                "back",
                step=step,
                reason=reason,
                before=before,
                leave_out=data_steps,
                good=good,
                order=self._order,
            )
        self._ranks.barrier()  # the launcher ends the others when one has left
        skipped = f", and skips data steps {data_steps[0]} to {data_steps[-1]}" if data_steps else ""
        raise GoBackError(
            f"step {step}: {reason}: the next start goes back to the {'last good' if good else 'newest'} checkpoint "
            f"at or before step {before}{skipped}"
        )

    def _end_if_too_often(self, step: int, reason: str) -> None:
        config = self._config.guard
        near = [own for own in self._before if abs(own - step) <= config.health_window]
        if len(near) >= config.max_rollbacks:
            raise QuernError(
                f"step {step}: {reason}, and the run has gone back {len(near)} times from steps within "
                f"guard.health_window ({config.health_window}) of it (guard.max_rollbacks {config.max_rollbacks}); "
                f"look at the ledger and at quern lineage forensics, then give another lr, guard.spike or "
                f"guard.max_rollbacks, or leave the machine out"
            )

    def _too_many(self, step: int, skips: int) -> QuernError:
        done = step + 1 - skips
        before = newest_until(self._config.run_dir, done)
        way = f"go on with resume.step={before}, the newest checkpoint from before, and data_skip or another lr"
        if before is None:
            stored = ", or resume.step=N with one that the store has" if self._config.checkpoint.store else ""
            way = f"give another run_dir to start over{stored}: here is no checkpoint from before the skips"
        return QuernError(
            f"step {step}: {skips} steps in a row were skipped (guard.max_skips {self._config.guard.max_skips}); the "
            f"weights are those after {done} steps. Look at the ledger, then {way}"
        )
