"""The figures of a step: one tensor while they are on the device, named numbers once they have reached the host."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quern.train.history.back import LEFT_OUT
from quern.train.history.ledger import Ledger
from quern.train.step.metrics import Mark

__all__ = [
    "Figures",
    "Pending",
    "has_counts",
    "note_abnormal",
    "of_this_rank",
    "pack",
    "skip_reason",
    "unpack",
    "warn_of_skip",
]

log = logging.getLogger(__name__)


class Figures(NamedTuple):
    """What is known of a step when it has ended; the same on every rank."""

    objective: float
    loss: float
    """Both are means over the targets of the global batch, in nats."""
    stop: float
    """The sum of the signals that ranks have had; 0: none."""
    saves_ended: float
    saves_published: float
    """How far the newest asynchronous save is, summed over ranks."""
    asked: float
    """How many ranks were asked for forensics of this step."""
    links: float
    """Whether rank 0 wants links to be measured."""
    norm: float
    """Of the gradient, before it was clipped."""
    non_finite: float
    loss_spike: float
    norm_spike: float
    skipped: float
    """Whether the guard found the step so, and whether it left the update out: 0 or 1."""
    loss_z: float
    norm_z: float
    """Robust z-scores of loss and norm."""
    scale: float
    """Of the loss, in fp16."""

    @property
    def flags(self) -> dict[str, bool]:
        """What a step of which nothing is to be said has none of, as the metrics name it."""
        return {
            "loss_spike": bool(self.loss_spike), "grad_norm_spike": bool(self.norm_spike),
            "non_finite": bool(self.non_finite), "skipped": bool(self.skipped),
        }  # fmt: skip


@dataclass(frozen=True)
class Pending:
    """A step whose figures are still on the device."""

    step: int
    data_step: int
    valid_tokens: int
    values: torch.Tensor
    """:class:`Figures`, on their way to the host."""
    lr: float
    tokens: int
    wait_s: float
    loads: torch.Tensor | None
    """What was noted of experts, on its way to the host; None without any."""
    learned: torch.Tensor | None
    """What DoReMi has learned, so too."""
    ended: Mark


_COUNTED = 500
"""Steps of a run, at most: so many lines of many experts leave a file small."""
_SUMMED = Figures._fields.index("norm")
"""How many, from the first, are sums over ranks."""


def of_this_rank(objective_and_loss: torch.Tensor, dtype: torch.dtype, **counts: float) -> torch.Tensor:
    """[7]: what this rank adds to the figures that are summed. ``counts``: those behind the first two, by name; they
    travel with the loss, so that all ranks know them at the same step. More may be put behind them."""
    mine = torch.zeros(_SUMMED, dtype=dtype, device=objective_and_loss.device)
    mine[:2] = objective_and_loss
    for name, value in counts.items():
        if value:
            mine[Figures._fields.index(name)] = value
    return mine


def pack(summed: torch.Tensor, **own: torch.Tensor) -> torch.Tensor:
    """[15 + n], on its way to the host: the summed figures, the others by name, which are the same on every rank, and
    the n that were put behind those of :func:`of_this_rank`."""
    rest = torch.stack([own[name].to(summed.dtype) for name in Figures._fields[_SUMMED:]])
    return torch.cat((summed[:_SUMMED], rest, summed[_SUMMED:])).to("cpu", non_blocking=True)


def unpack(values: torch.Tensor) -> tuple[Figures, list[float]]:
    """The figures and those behind them, once the copy to the host has ended."""
    numbers = values.tolist()
    return Figures(*numbers[: len(Figures._fields)]), numbers[len(Figures._fields) :]


def has_counts(step: int, steps: int) -> bool:
    """Whether the line of a step has the counts of all experts, beside that of the last: each n-th of ``steps``."""
    return step % -(-steps // _COUNTED) == 0


def skip_reason(found: Figures, left_out: bool) -> str:
    """Why a step was skipped, as the ledger's lines say it."""
    return LEFT_OUT if left_out else "non_finite" if found.non_finite else "spike"


def warn_of_skip(step: Pending, found: Figures, left_out: bool, in_a_row: int, most: int) -> None:
    """Log that a step was skipped, and why. ``in_a_row``: how many were, of at most ``most``."""
    why = "" if step.valid_tokens else ": no position of its batch is a target"
    again = f"{in_a_row} in a row of {most}"
    log.warning("step %d skipped (%s%s), %s", step.step, skip_reason(found, left_out), why, again)


def note_abnormal(ledger: Ledger, where: Mapping[str, int], found: Figures, left_out: bool) -> None:
    """Write the ledger's lines of a step that was skipped, not finite or a spike. ``where``: step and data step."""
    losses = {"loss": found.loss, "grad_norm": found.norm}
    if found.skipped:
        ledger.append("skipped", **where, reason=skip_reason(found, left_out))
    elif found.non_finite:
        ledger.append("non_finite", **where, **losses)
    if found.loss_spike or found.norm_spike:
        ledger.append("spike", **where, **losses, loss_z=found.loss_z, grad_norm_z=found.norm_z)
