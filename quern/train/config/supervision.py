"""The config's sections ``guard``, ``watchdog`` and ``replicas``: what a run checks of itself while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from quern.config import Section
from quern.train.config.numbers import Count, NonNegative

__all__ = ["GuardConfig", "ReplicasConfig", "WatchdogConfig"]


class GuardConfig(Section):
    """The reaction to a step whose loss or gradient norm is abnormal. Decided on device, the same on every rank."""

    later: ClassVar[Mapping[str, Any]] = {"rollback_steps": 1, "max_rollbacks": 3, "lr_factor": 0.5, "lr_steps": 500}
    non_finite: Literal["continue", "skip", "rollback_and_skip"] = "skip"
    """What happens to a step whose loss or gradient norm is not finite: apply it, skip it, or go back as for a
    spike."""
    spike: Literal["continue", "skip", "rollback_and_skip", "lower_lr"] = "continue"
    """What happens to a step that is a spike; it is reported in any case. ``continue``: apply it. ``skip``: read its
    data and do not apply them. ``rollback_and_skip``: go back to the last good checkpoint, and skip the step there.
    ``lower_lr``: apply it, and lower the learning rate of the steps that follow."""
    window: Annotated[int, Field(ge=8)] = 128
    """[steps] Healthy steps of history."""
    min_history: Annotated[int, Field(ge=4)] = 32
    """[steps] No spike is reported before this many healthy steps."""
    loss_z: Annotated[float, Field(gt=0)] = 6.0
    """[z-score] Robust z-score (median, MAD) above which a loss is a spike."""
    grad_norm_z: Annotated[float, Field(gt=0)] = 10.0
    """[z-score] The same for the gradient norm."""
    max_skips: Count = 100
    """[steps] The run fails after this many skipped steps in a row: a skipped step does not enter the history, so a
    lasting change would be skipped for ever."""
    health_window: Count = 100
    """[steps] Steps after a checkpoint that must be finite, applied and no spike before it is *good*."""
    rollback_steps: Count = 1
    """[steps] ``rollback_and_skip``: data steps that are skipped after going back; the last is the spike's."""
    max_rollbacks: Count = 3
    """[rollbacks] ``rollback_and_skip``: the run fails at one more of them whose steps lie within ``health_window`` of
    each other."""
    lr_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """[share] ``lower_lr``: of the learning rate that is left; spikes multiply."""
    lr_steps: Count = 500
    """[steps] ``lower_lr``: for so long, from the second step after the spike on."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_history > self.window:
            raise ValueError(f"min_history: expected at most window ({self.window}), got {self.min_history}")
        return self


class WatchdogConfig(Section):
    """Ends a run of several ranks of which one hangs, and names it. A phase of a step (data, forward, backward, reduce,
    recompute, optimizer, metrics, validation) may take ``factor`` times as long as the longest of its kind before it,
    up to 0.8 of ``comm.timeout_s`` or twice the longest; the first of its kind, and all in the first step,
    ``comm.first_timeout_s``. What waits for disks and stores (saves, the end) is not watched."""

    enabled: bool = True
    """Watch, on a thread beside each rank."""
    factor: Annotated[float, Field(gt=1)] = 10.0
    """[times] How much longer than the longest before."""
    least_s: Annotated[float, Field(gt=0)] = 300.0
    """[seconds] What every phase may take."""


class ReplicasConfig(Section):
    """Comparison of what several ranks hold in copies, or compute twice: finds corruption that nothing else reports."""

    later: ClassVar[Mapping[str, Any]] = {"recompute_interval": 0}
    interval: NonNegative = 0
    """[steps] Steps between two comparisons of the copies along ``dp_replicate`` and ``tp``; before each save there is
    one too. 0 = none. Copies that differ end the run with exit code 4. Example: 100"""
    recompute_interval: NonNegative = 0
    """[steps] Steps between two in which every data-parallel rank's last micro-batch is computed again on the next one,
    and loss and gradients compared; in the step before a save by ``checkpoint.interval`` too. Needs no copies. 0 =
    none. Results that differ end the run with exit code 4. Example: 100"""
