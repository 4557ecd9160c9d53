"""Notices that ranks wait longer for transfers than before, and measures the links between them.

The rank that is last to begin a collective waits for the transfer alone, so the least time that any rank waits in a
step is what transfers cost. A slow rank makes the others wait and not itself; a slow link, all of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from quern.train.history.ledger import Ledger
from quern.train.processes.agree import Agreement
from quern.train.processes.links import planned_rounds, slow_links
from quern.train.processes.ranks import Ranks
from quern.words import counted

__all__ = ["LinkProbe", "exchange"]

log = logging.getLogger(__name__)

WINDOW = 50
"""[steps] Whose median counts."""

_REMEMBERED = 20
"""[windows] With whose median a window is compared."""
_GROWN, _BACK, _LEAST = 1.5, 1.2, 0.05
"""Waits have grown that are 1.5 times those before and 5 % of the work longer; they are as before below 1.2 times."""
_ROUNDS, _REPEATS = 8, 7
_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}


class LinkProbe:
    """On rank 0 told of each step's times; measures on all ranks, which are on ``hosts``. ``ledger``: rank 0's."""

    def __init__(self, hosts: Sequence[str], ledger: Ledger | None, ranks: Ranks, window: int = WINDOW) -> None:
        self._ranks, self._ledger, self._window = ranks, ledger, window
        by_host: dict[str, int] = defaultdict(int)
        self._places = dict[int, tuple[str, int]]()
        for rank, host in enumerate(hosts):
            self._places[rank] = host, by_host[host]
            by_host[host] += 1
        self._shares: list[float] = []
        self._before: deque[float] = deque(maxlen=_REMEMBERED)
        self._grown: tuple[float, float] | None = None
        self._wanted = False

    def observe(self, work_s: NDArray[np.float64], wait_s: NDArray[np.float64]) -> None:
        """``work_s``, ``wait_s`` [ranks]: seconds that each computed and waited for others in a step; NaN: not
        known."""
        known = ~np.isnan(wait_s)
        if len(wait_s) < 2 or not known.any() or not np.nanmax(work_s, initial=0.0) > 0:
            return
        self._shares.append(float(wait_s[known].min() / np.nanmedian(work_s)))
        if len(self._shares) < self._window:
            return
        now, self._shares = median(self._shares), []
        usual = median(self._before) if self._before else math.inf
        if self._grown is None and now > max(_GROWN * usual, usual + _LEAST):
            self._grown, self._wanted = (usual, now), True
        elif self._grown is not None and now < _BACK * usual:
            self._grown = None
        if self._grown is None:
            self._before.append(now)

    def take_request(self) -> bool:
        """Whether waits have grown and links are to be measured, once. On rank 0."""
        wanted, self._wanted = self._wanted, False
        return wanted

    def measure(self, step: int, enter: Callable[[str], object]) -> list[str]:
        """Exchange tensors in pairs, and say which links are slower than the others, in the log and the ledger. All
        ranks, after ``step``; ``enter`` is told of the phase. Waits for the device."""
        enter("links")
        device, size = self._ranks.device, _BYTES[self._ranks.device.type]
        got, sent = torch.empty(size // 4, device=device), torch.ones(size // 4, device=device)
        own: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        for kind, groups in planned_rounds(self._places, _ROUNDS):
            if kind == "ring":
                continue
            pair = next((pair for pair in groups if self._ranks.rank in pair), None)
            for number in range(_REPEATS + 1):
                self._ranks.sum(torch.zeros(1, device=device)).tolist()  # all begin at one time
                if pair is not None:
                    speed = exchange(got, sent, sum(pair) - self._ranks.rank)
                    if number:  # the first makes the connections
                        own.setdefault((kind, pair), []).append(speed)
        by_kind: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)
        for told in Agreement(self._ranks.rank, self._ranks.world).gather(own):
            for (kind, pair), speeds in told.items():
                by_kind[kind][pair] = min(median(speeds), by_kind[kind].get(pair, math.inf))
        nodes = {rank: node for rank, (node, _) in self._places.items()}
        found = [
            f"{', '.join(named)}{where and f' ({where})'}: {text}"
            for kind, speeds in by_kind.items()
            for _, named, where, text in slow_links(kind, speeds, {}, nodes)
        ]
        if self._ledger is not None:
            self._tell(step, found, sum(map(len, by_kind.values())))
        return found

    def _tell(self, step: int, found: list[str], links: int) -> None:
        assert self._ledger is not None
        before, now = self._grown or (math.nan, math.nan)
        what = "; ".join(found) or f"none of {counted(links, 'link')} is slower than the others"
        log.warning("step %d: all ranks wait %.1f times as long for transfers as before: %s", step, now / before, what)
        self._ledger.append("slow_links", step=step, found=found, links=links, before=before, now=now)


def exchange(got: Tensor, sent: Tensor, other: int) -> float:
    """Bytes a second and direction between this rank and the rank ``other`` of the default group: both send at once,
    what the other has ``sent`` into ``got``."""
    synchronise = torch.cuda.synchronize if got.is_cuda else lambda: None
    began = time.perf_counter()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]):
        work.wait()
    synchronise()
    return got.nbytes / (time.perf_counter() - began)
