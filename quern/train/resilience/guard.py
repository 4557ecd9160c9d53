"""Whether a step's loss and gradient norm are as they should be, decided on the device.

The loop never waits: :meth:`Guard.judge` reads no value back, and what it answers is a handful of scalar tensors. Loss
and norm come in already reduced, the same bits on every rank, so every rank answers the same without a word.

A value is a *spike* when its robust z-score ``(value - median) / (1.4826 · MAD)`` over the last ``window`` steps of
history is above a threshold (Iglewicz & Hoaglin 1993: median and median absolute deviation do not move with the
outliers they are to find; 1.4826 makes the MAD of a normal distribution its standard deviation). Only above: a loss
that falls is what training is for.

What enters the history: every step whose loss and norm are finite and whose update is applied. So a skipped step
changes nothing here, as it changes no weight. A spike that is not skipped does enter: its update is in the weights, and
the history is there to say what is normal for these weights. One spike among ``window`` values barely moves a median;
and after a lasting change (a new mixture, a longer context) the new level is normal once it fills half of the window,
where a history without spikes would call every later step one. With ``spike: skip`` that cannot happen, for nothing
enters: the loop has to end a run that skips step after step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quern.errors import InputError
from quern.train.config import GuardConfig

__all__ = ["Guard", "Health"]

#: Standard deviation of a normal distribution in units of its median absolute deviation: 1 / Φ⁻¹(3/4).
_SIGMA_PER_MAD = 1.482602218505602

#: The scale is at least this share of the median, so that in a history without spread rounding is no spike.
_RELATIVE_FLOOR = 1e-3

#: … and at least this, for a median of 0.
_ABSOLUTE_FLOOR = 1e-6


@dataclass(frozen=True)
class Health:
    """What the guard says of a step: scalar tensors on the guard's device."""

    non_finite: Tensor
    """bool: the loss or the gradient norm is NaN or infinite."""
    loss_spike: Tensor
    """bool; false for a step that is not finite."""
    norm_spike: Tensor
    """bool; false for a step that is not finite."""
    skip: Tensor
    """float32, 0 or 1: ``found_inf`` of a fused optimiser, whose kernels take no other type."""
    loss_z: Tensor
    """Robust z-score; 0 while there is no history to judge by, and for a step that is not finite."""
    norm_z: Tensor


class Guard:
    """Judges steps; its history is part of a checkpoint, so that a resumed run decides as the uninterrupted one.

    ``dtype`` is that of the history and of its arithmetic: float32, or float64 in a float64 run.

    Raises:
        InputError: ``min_history`` is more than the window can hold.
    """

    def __init__(self, config: GuardConfig, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        if config.min_history > config.window:
            raise InputError(
                f"guard.min_history: expected at most guard.window ({config.window}), got {config.min_history}"
            )
        self._config = config
        # The values stand at (their number) mod window. Each judgement makes new tensors: a state that was taken for a
        # checkpoint does not change under its writer.
        self._losses = torch.zeros(config.window, dtype=dtype, device=device)
        self._norms = torch.zeros(config.window, dtype=dtype, device=device)
        self._entered = torch.zeros((), dtype=torch.int64, device=device)
        self._places = torch.arange(config.window, device=device)
        self._never = torch.zeros((), dtype=torch.bool, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Health:
        """Judge a step by its loss and gradient norm (one element each, on the guard's device) and remember it.

        Launches a fixed sequence of small kernels; no value is read back.
        """
        config = self._config
        loss, norm = (value.detach().reshape(()).to(self._losses.dtype) for value in (loss, grad_norm))
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        known = self._entered.clamp(max=config.window)
        judged = finite & (known >= config.min_history)
        loss_z = torch.where(judged, self._z(self._losses, known, loss), 0.0)
        norm_z = torch.where(judged, self._z(self._norms, known, norm), 0.0)
        loss_spike, norm_spike = loss_z > config.loss_z, norm_z > config.grad_norm_z
        skip = ~finite if config.non_finite == "skip" else self._never
        if config.spike == "skip":
            skip = skip | loss_spike | norm_spike
        enters = finite & ~skip
        here = enters & (self._places == self._entered % config.window)
        self._losses = torch.where(here, loss, self._losses)
        self._norms = torch.where(here, norm, self._norms)
        self._entered = self._entered + enters
        return Health(~finite, loss_spike, norm_spike, skip.to(torch.float32), loss_z, norm_z)

    def _z(self, history: Tensor, known: Tensor, value: Tensor) -> Tensor:
        """The robust z-score of ``value`` against the first ``known`` places of ``history``."""
        center = self._median(history, known)
        spread = self._median((history - center).abs(), known)
        floor = (_RELATIVE_FLOOR * center.abs()).clamp(min=_ABSOLUTE_FLOOR)
        return (value - center) / torch.maximum(_SIGMA_PER_MAD * spread, floor)

    def _median(self, values: Tensor, known: Tensor) -> Tensor:
        """The median of the first ``known`` values; of an even number, the mean of the middle two."""
        ordered = torch.where(self._places < known, values, torch.inf).sort().values
        middle = torch.stack(((known - 1) // 2, known // 2)).clamp(min=0)
        return ordered.gather(0, middle).mean()

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors only: ``losses`` and ``grad_norms`` [window], and ``entered``, how many values ever entered."""
        return {"losses": self._losses, "grad_norms": self._norms, "entered": self._entered}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; with another window, from its newest values that fit. Waits for the device."""
        entered = int(state["entered"])
        self._losses = self._refit(state["losses"], entered)
        self._norms = self._refit(state["grad_norms"], entered)
        kept = entered if len(state["losses"]) == self._config.window else min(entered, len(state["losses"]))
        self._entered = torch.full_like(self._entered, kept)

    def _refit(self, saved: Tensor, entered: int) -> Tensor:
        values = saved.to(self._losses)
        window = self._config.window
        if len(values) == window:
            return values.clone()
        known = min(entered, len(values))
        oldest_first = torch.roll(values, -(entered % len(values))) if entered > len(values) else values[:known]
        kept = oldest_first[-window:]
        # as many as were known have entered: the newest stands at (known - 1) mod window
        places = torch.arange(known - len(kept), known, device=values.device) % window
        fitted = torch.zeros_like(self._losses)
        fitted[places] = kept
        return fitted
