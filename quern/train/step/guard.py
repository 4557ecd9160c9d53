"""Checks each step's loss and gradient norm on the device.

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
from dataclasses import dataclass, fields

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
    """The guard's verdict on a step: scalar tensors on the guard's device."""

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

    def figures(self) -> dict[str, Tensor]:
        """By the names of :class:`quern.train.step.figures.Figures`."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"skipped": own.pop("skip"), **own}


class Guard:
    """Judges steps; its history is part of a checkpoint, so that a resumed run decides like an uninterrupted one.

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
        # Losses, then norms; a value stands at (its number) mod window. Each judgement makes new tensors: a state that
        # was taken for a checkpoint does not change under its writer.
        self._history_2W = torch.zeros(2, config.window, dtype=dtype, device=device)
        self._entered = torch.zeros((), dtype=torch.int64, device=device)
        self._places = torch.arange(config.window, device=device)
        self._never = torch.zeros((), dtype=torch.bool, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor, *, left_out: bool = False) -> Health:
        """Judge a step by its loss and gradient norm (one element each, on the guard's device) and remember it. One
        that is ``left_out`` is skipped whatever it is, and is neither a spike nor remembered.

        Launches a fixed sequence of small kernels; no value is read back.
        """
        config = self._config
        if left_out:
            zero = torch.zeros_like(self._history_2W[0, 0])
            skip = torch.ones((), dtype=torch.float32, device=zero.device)
            return Health(self._never, self._never, self._never, skip, zero, zero)
        dtype = self._history_2W.dtype
        value_21 = torch.stack([value.detach().reshape(1).to(dtype) for value in (loss, grad_norm)])
        finite = value_21.isfinite().all()
        non_finite = ~finite
        known = self._entered.clamp(max=config.window)
        judged = finite & (known >= config.min_history)
        z_21 = self._z(value_21, known).masked_fill(~judged, 0.0)
        loss_z, norm_z = z_21[0, 0], z_21[1, 0]
        loss_spike, norm_spike = loss_z > config.loss_z, norm_z > config.grad_norm_z
        skip = self._never if config.non_finite == "continue" else non_finite
        if config.spike in ("skip", "rollback_and_skip"):
            skip = skip | loss_spike | norm_spike
        enters = finite & ~skip
        here = enters & (self._places == self._entered % config.window)
        self._history_2W = torch.where(here, value_21, self._history_2W)
        self._entered = self._entered + enters
        return Health(non_finite, loss_spike, norm_spike, skip.to(torch.float32), loss_z, norm_z)

    def _z(self, value_21: Tensor, known: Tensor) -> Tensor:
        """The robust z-scores against the first ``known`` places of the history, [2, 1]."""
        outside = self._places >= known
        middle_22 = torch.stack(((known - 1) // 2, known // 2)).clamp(min=0).expand(2, 2)

        def median(values_2W: Tensor) -> Tensor:
            """Of the places that are known; of an even number, the mean of the middle two."""
            ordered_2W = values_2W.masked_fill(outside, torch.inf).sort().values
            return ordered_2W.gather(1, middle_22).mean(1, keepdim=True)

        center_21 = median(self._history_2W)
        spread_21 = median((self._history_2W - center_21).abs())
        floor_21 = (_RELATIVE_FLOOR * center_21.abs()).clamp(min=_ABSOLUTE_FLOOR)
        return (value_21 - center_21) / torch.maximum(_SIGMA_PER_MAD * spread_21, floor_21)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors only: ``losses`` and ``grad_norms`` [window], and ``entered``, how many values ever entered."""
        return {"losses": self._history_2W[0], "grad_norms": self._history_2W[1], "entered": self._entered}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a checkpoint's state; with another window, its newest values that fit. Waits for the device."""
        entered = int(state["entered"])
        self._history_2W = torch.stack([self._refit(state[name], entered) for name in ("losses", "grad_norms")])
        kept = entered if len(state["losses"]) == self._config.window else min(entered, len(state["losses"]))
        self._entered = torch.full_like(self._entered, kept)

    def _refit(self, saved: Tensor, entered: int) -> Tensor:
        values = saved.to(self._history_2W)
        window = self._config.window
        if len(values) == window:
            return values
        known = min(entered, len(values))
        oldest_first = torch.roll(values, -(entered % len(values))) if entered > len(values) else values[:known]
        kept = oldest_first[-window:]
        # as many as were known have entered: the newest stands at (known - 1) mod window
        places = torch.arange(known - len(kept), known, device=values.device) % window
        fitted = torch.zeros_like(self._history_2W[0])
        fitted[places] = kept
        return fitted
