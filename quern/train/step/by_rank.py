"""Tells rank 0 how long each rank works and waits for data and for other ranks, and its memory, in the sum that a step
takes anyway.

Each rank has a slot of its own in which all others add 0. There are at most :data:`SLOTS`; more ranks take turns, a
step each, and rank 0 keeps what a rank said last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from quern.parallel.waits import tell_waits
from quern.train.processes.ranks import Ranks
from quern.train.step.metrics import Mark, memory_gib

__all__ = ["SLOTS", "RankFigures"]

SLOTS = 1024

_FIGURES = ("work_s", "data_wait_s", "memory_gib", "comm_wait_s")


@dataclass
class _Step:
    """Of a step that the device may still be at."""

    began: Mark
    worked: Mark | None = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    counted: int = 0
    """Of them, those before ``worked``."""
    waiting: Mark | None = None


class RankFigures:
    """The figures of this rank, and on rank 0 of all. Of a single process there are none. ``model``: what FSDP2 has
    put its units on, if it has."""

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self._ranks = ranks
        self._slots = min(SLOTS, ranks.world) if ranks.world > 1 else 0
        self._turns = -(-ranks.world // SLOTS)
        self._running: deque[_Step] = deque()
        self._own = (0.0, 0.0, 0.0, 0.0)
        """Of the newest step that has ended."""
        self._known = np.full((len(_FIGURES), ranks.world if ranks.first else 0), np.nan)
        if self._slots:
            tell_waits(model, self.wait, self.waited)

    def begin(self) -> None:
        """A step has its data."""
        if self._slots:
            self._running.append(_Step(Mark(self._ranks.device)))

    def worked(self) -> None:
        """A micro-batch's loss is there: of a step's last one, before any rank waits for gradients under DDP. In a
        pipeline on the last stage alone."""
        if self._slots:
            step = self._running[-1]
            step.worked, step.counted = Mark(self._ranks.device), len(step.waits)

    def wait(self) -> None:
        """From here on this rank waits for others, until :meth:`waited`."""
        if self._running:
            self._running[-1].waiting = Mark(self._ranks.device)

    def waited(self) -> None:
        """This rank goes on."""
        step = self._running[-1] if self._running else None
        if step is not None and step.waiting is not None:
            step.waits.append((step.waiting, Mark(self._ranks.device)))
            step.waiting = None

    def settle(self, wait_s: float) -> None:
        """The oldest of the steps that have begun has ended, on the device too."""
        if self._slots:
            step, work = self._running.popleft(), 0.0
            waits = [end.since(begin) for begin, end in step.waits]
            if step.worked is not None:
                work = step.worked.since(step.began) - sum(waits[: step.counted])
            self._own = (work, wait_s, memory_gib(self._ranks.device), sum(waits))

    def of_this_rank(self, data_step: int, like: Tensor) -> Tensor:
        """[4 S]: work, waits for data, memory and waits for ranks, in this rank's slot of each if it has its turn."""
        mine = like.new_zeros(len(_FIGURES), self._slots)
        turn, slot = divmod(self._ranks.rank, SLOTS)
        if self._slots and data_step % self._turns == turn:
            for row, value in enumerate(self._own):
                mine[row, slot] = value
        return mine.flatten()

    @property
    def work_s(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds [ranks] of work that each has last said; NaN: none yet. On rank 0; empty where there is one rank."""
        return self._known[0] if self._slots else self._known[0, :0]

    @property
    def comm_wait_s(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The same of waits for other ranks."""
        return self._known[3] if self._slots else self._known[3, :0]

    def read(self, data_step: int, values: Sequence[float]) -> dict[str, Any]:
        """``slowest_rank``, None where not every rank tells its work, as in a pipeline; and ``ranks``: by figure, the
        least, the median and the most of all ranks. On rank 0."""
        if not self._slots:
            return {}
        given = np.array(values[: len(_FIGURES) * self._slots]).reshape(len(_FIGURES), self._slots)
        first = data_step % self._turns * SLOTS
        known = self._known[:, first : first + SLOTS]
        np.copyto(known, given[:, : known.shape[1]], where=given[:, : known.shape[1]] != 0)
        rows = {name: row[~np.isnan(row)] for name, row in zip(_FIGURES, self._known, strict=True)}
        busy = np.nan_to_num(self._known[0]) + np.nan_to_num(self._known[1])
        return {
            "slowest_rank": None if np.isnan(self._known[0]).any() else int(busy.argmax()),
            "ranks": {
                name: {"min": float(row.min()), "median": float(np.median(row)), "max": float(row.max())}
                for name, row in rows.items() if row.size
            },
        }  # fmt: skip
