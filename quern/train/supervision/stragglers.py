"""Finds ranks whose computation takes longer than that of the others, over windows of steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quern.train.history.ledger import Ledger

__all__ = ["Straggler", "Stragglers"]

log = logging.getLogger(__name__)

WINDOW = 50
"""[steps] Of which a rank's median counts."""

_FEWEST = 3
"""Of fewer ranks none can be told to be the slow one."""
_Z, _NORMAL, _OF_MEDIAN = 5.0, 1.4826, 1.2533
"""Standard deviations; of a normal distribution over its median absolute deviation; of a median over that of a mean."""
_LEAST = 0.1
"""What is less than 10 % slower than the median is named by no one, however alike the others are."""


@dataclass(frozen=True)
class Straggler:
    """What is slow, or not any more."""

    what: str
    """``rank 3 on node-7``, or ``node-7`` if all of its ranks are."""
    ranks: tuple[int, ...]
    slower: float
    """Its time over the median of all ranks, less 1; 0: it has recovered."""


class Stragglers:
    """Told of each step's times, it answers once a window: in the ledger (rank 0's, None: of nobody), and as a warning.
    ``hosts``: of each rank."""

    def __init__(self, hosts: Sequence[str], ledger: Ledger | None, window: int = WINDOW) -> None:
        self._hosts, self._ledger, self._window = list(hosts), ledger, window
        self._times: list[NDArray[np.float64]] = []
        self._slow: dict[str, tuple[int, ...]] = {}

    def observe(self, step: int, work_s: NDArray[np.float64]) -> None:
        """``work_s`` [ranks]: seconds of computation in the step, without waiting; NaN: not known."""
        for found in self.judge(work_s):
            if found.slower:
                log.warning(
                    "step %d: %s computes %.0f %% longer than the median of all ranks",
                    step,
                    found.what,
                    100 * found.slower,
                )
            else:
                log.info("step %d: %s is as fast as the others again", step, found.what)
            if self._ledger is not None:
                self._ledger.append("straggler", step=step, what=found.what, ranks=[*found.ranks], slower=found.slower)

    def judge(self, work_s: NDArray[np.float64]) -> list[Straggler]:
        """What is slow since this window, and what has recovered in it; nothing while a window is not whole."""
        if len(work_s) < _FEWEST or np.isnan(work_s).any():
            return []
        self._times.append(work_s.copy())
        if len(self._times) < self._window:
            return []
        times, self._times = np.array(self._times), []
        shares = times / np.maximum(np.median(times, axis=1, keepdims=True), 1e-9)  # what slows all down is nobody's
        slow, most = self._found(shares), np.median(shares, axis=0)
        new = [
            Straggler(what, ranks, float(np.median(most[[*ranks]]) / np.median(most)) - 1)
            for what, ranks in slow.items()
            if what not in self._slow
        ]
        over = [Straggler(what, ranks, 0.0) for what, ranks in self._slow.items() if what not in slow]
        self._slow = slow
        return new + over

    def _found(self, shares: NDArray[np.float64]) -> dict[str, tuple[int, ...]]:
        own = np.median(shares, axis=0)
        middle = float(np.median(own))
        across = _NORMAL * float(np.median(np.abs(own - middle)))
        within = _NORMAL * np.median(np.abs(shares - own), axis=0) * _OF_MEDIAN / np.sqrt(len(shares))
        least = max(_LEAST * middle, _Z * max(across, float(np.median(within))))
        slow = set(np.flatnonzero(own > middle + least).tolist())
        found: dict[str, tuple[int, ...]] = {}
        for host, ranks in self._by_host().items():
            if len(ranks) > 1 and slow.issuperset(ranks):
                found[host] = ranks
                slow.difference_update(ranks)
        return found | {f"rank {rank} on {self._hosts[rank]}": (rank,) for rank in sorted(slow)}

    def _by_host(self) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for rank, host in enumerate(self._hosts):
            found[host] = (*found.get(host, ()), rank)
        return found
