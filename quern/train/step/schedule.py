"""The learning rate as a pure function of the model step, so that resuming restores no state."""

from __future__ import annotations

import math
from collections.abc import Iterable

from quern.errors import InputError
from quern.train.config import GuardConfig, ScheduleConfig

__all__ = ["check_schedule", "decay_steps", "learning_rate", "share_after_spikes"]


def decay_steps(steps: int, schedule: ScheduleConfig) -> int:
    """Over how many of the last steps the rate falls; 0 for ``constant``."""
    if schedule.kind == "constant":
        return 0
    if schedule.kind == "wsd":
        return min(steps, max(1, round(schedule.decay * steps)))
    return steps - schedule.warmup


def check_schedule(steps: int, schedule: ScheduleConfig) -> None:
    """Refuse a schedule that does not fit into ``steps``.

    Raises:
        InputError: the warm-up, or the warm-up and the decay of ``wsd``, take more than ``steps``.
    """
    if schedule.warmup > steps:
        raise InputError(f"schedule.warmup: expected at most steps ({steps}), got {schedule.warmup}")
    if schedule.kind == "wsd" and schedule.warmup + decay_steps(steps, schedule) > steps:
        raise InputError(
            f"schedule.warmup: expected at most {steps - decay_steps(steps, schedule)}, for the last "
            f"{decay_steps(steps, schedule)} of {steps} steps decay (schedule.decay {schedule.decay:g}), "
            f"got {schedule.warmup}"
        )


def learning_rate(step: int, steps: int, lr: float, schedule: ScheduleConfig) -> float:
    """The learning rate of optimiser step ``step`` (the first is 0) of ``steps``, for a schedule that fits.

    Warm-up gives ``lr · (step + 1) / warmup``, so that no step has a rate of 0 and the last of the warm-up has ``lr``.
    After it, with p the share of the decay that lies before the step and f = ``final``:

    - ``cosine``: ``lr · (f + (1 - f) (1 + cos πp) / 2)`` (Loshchilov & Hutter 2017, without restarts)
    - ``linear``: ``lr · (1 - p (1 - f))``
    - ``wsd``: ``lr``, then the linear fall over the last ``decay`` of all steps (Hu et al. 2024, MiniCPM)
    - ``constant``: ``lr``

    p would be 1 at ``step = steps``, one after the last: with f = 0 too, every step moves the weights. Steps beyond
    have the rate of the end.

    Raises:
        ValueError: ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step: expected an integer ≥ 0, got {step}")
    if step < min(schedule.warmup, steps):
        return lr * (step + 1) / schedule.warmup
    falling = decay_steps(steps, schedule)
    if step < steps - falling or schedule.kind == "constant":
        return lr
    share = (step - (steps - falling)) / falling if step < steps else 1.0
    if schedule.kind == "cosine":
        left = (1.0 + math.cos(math.pi * share)) / 2
    else:
        left = 1.0 - share
    return lr * (schedule.final + (1.0 - schedule.final) * left)


def share_after_spikes(step: int, spikes: Iterable[int], guard: GuardConfig) -> float:
    """The share of the learning rate that ``guard.spike: lower_lr`` leaves in ``step`` after ``spikes``, which are
    steps. It begins with the second step after a spike: the host reads a step's figures one step late, or at once where
    it saves, so by then it always knows."""
    if guard.spike != "lower_lr":
        return 1.0
    felt = sum(spike + 2 <= step < spike + 2 + guard.lr_steps for spike in spikes)
    return float(guard.lr_factor**felt)
