"""Tells rank 0 how long each rank works and waits for data, and its memory, in the sum that a step takes anyway.

Each rank has a slot of its own in which all others add 0. There are at most :data:`SLOTS`; more ranks take turns, a
step each, and rank 0 keeps what a rank said last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from quern.train.processes.ranks import Ranks
from quern.train.step.metrics import Mark, memory_gib

__all__ = ["SLOTS", "RankFigures"]

SLOTS = 1024

_FIGURES = ("work_s", "data_wait_s", "memory_gib")


class RankFigures:
    """The figures of this rank, and on rank 0 of all. Of a single process there are none."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._slots = min(SLOTS, ranks.world) if ranks.world > 1 else 0
        self._turns = -(-ranks.world // SLOTS)
        self._running: deque[list[Mark]] = deque()
        self._own = (0.0, 0.0, 0.0)
        """Of the newest step that has ended."""
        self._known = np.full((len(_FIGURES), ranks.world if ranks.first else 0), np.nan)

    def begin(self) -> None:
        """A step has its data."""
        if self._slots:
            self._running.append([Mark(self._ranks.device)])

    def worked(self) -> None:
        """A micro-batch's loss is there: of a step's last one, before any rank waits for gradients under DDP. In a
        pipeline on the last stage alone."""
        if self._slots:
            self._running[-1][1:] = [Mark(self._ranks.device)]

    def settle(self, wait_s: float) -> None:
        """The oldest of the steps that have begun has ended, on the device too."""
        if self._slots:
            began, *worked = self._running.popleft()
            work = worked[0].since(began) if worked else 0.0
            self._own = (work, wait_s, memory_gib(self._ranks.device))

    def of_this_rank(self, data_step: int, like: Tensor) -> Tensor:
        """[3 S]: work, waiting and memory in this rank's slot of each row, if it has its turn."""
        mine = like.new_zeros(len(_FIGURES), self._slots)
        turn, slot = divmod(self._ranks.rank, SLOTS)
        if self._slots and data_step % self._turns == turn:
            for row, value in enumerate(self._own):
                mine[row, slot] = value
        return mine.flatten()

    def read(self, data_step: int, values: Sequence[float]) -> dict[str, Any]:
        """``slowest_rank``, None where not every rank tells its work, as in a pipeline; and ``ranks``: by figure, the
        least, the median and the most of all ranks. On rank 0."""
        if not self._slots:
            return {}
        given = np.array(values).reshape(len(_FIGURES), self._slots)
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
