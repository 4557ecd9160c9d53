"""Notices that ranks wait longer for transfers than before, and measures the links between them.

The rank that is last to begin a collective waits for the transfer alone, so the least time that any rank waits in a
step is what transfers cost. A slow rank makes the others wait and not itself; a slow link, all of them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from quern.train.history.ledger import Ledger
from quern.train.processes.agree import Agreement
from quern.train.processes.exchange import exchange
from quern.train.processes.links import FEWEST, planned_rounds, slow_links
from quern.train.processes.ranks import Ranks
from quern.words import counted

__all__ = ["LinkProbe"]

log = logging.getLogger(__name__)

WINDOW = 50
"""[steps] Whose median counts."""

_REMEMBERED = 20
"""[windows] With whose median a window is compared."""
_OTHER, _LEAST = 1.5, 0.05
"""Waits have grown that are 1.5 times those before and 5 % of the work longer, and shrunk that are so much less."""
_ROUNDS, _REPEATS = 8, 7
_BYTES = {"cuda": 32 << 20, "cpu": 4 << 20}


class LinkProbe:
    """On rank 0 told of each step's times; measures on all ranks, which are on ``hosts``. ``ledger``: rank 0's. Where
    there are too few links to compare them it does neither.

    Attributes: ``asked``, on all ranks, whether they are to measure.
    """

    def __init__(self, hosts: Sequence[str], ledger: Ledger | None, ranks: Ranks) -> None:
        self._ranks, self._ledger = ranks, ledger
        by_host: dict[str, int] = defaultdict(int)
        self._places = dict[int, tuple[str, int]]()
        for rank, host in enumerate(hosts):
            self._places[rank] = host, by_host[host]
            by_host[host] += 1
        rounds = [(kind, pairs) for kind, pairs in planned_rounds(self._places, _ROUNDS) if kind != "ring"]
        links = Counter(kind for kind, pairs in rounds for _ in pairs)
        self._rounds = [(kind, pairs) for kind, pairs in rounds if links[kind] >= FEWEST]
        self._shares: list[float] = []
        self._before: deque[float] = deque(maxlen=_REMEMBERED)
        self._grown = math.nan, math.nan
        self._wanted = self.asked = False

    def observe(self, work_s: NDArray[np.float64], wait_s: NDArray[np.float64]) -> None:
        """``work_s``, ``wait_s`` [ranks]: seconds that each computed and waited for others in a step; NaN: not
        known."""
        if not self._rounds or np.isnan(wait_s).all() or not np.nanmax(work_s, initial=0.0) > 0:
            return
        self._shares.append(float(np.nanmin(wait_s) / np.nanmedian(work_s)))
        if len(self._shares) < WINDOW:
            return
        now, self._shares = median(self._shares), []
        usual = median(self._before) if self._before else now
        if now > max(_OTHER * usual, usual + _LEAST):
            self._grown, self._wanted = (usual, now), True
        if self._wanted or now < min(usual / _OTHER, usual - _LEAST):
            self._before.clear()  # what follows is compared with this
        self._before.append(now)

    def take_request(self) -> bool:
        """Whether waits have grown and links are to be measured, once. On rank 0."""
        wanted, self._wanted = self._wanted, False
        return wanted

    def measure(self, step: int) -> None:
        """Exchange tensors in pairs, and say which links are slower than the others, in the log and the ledger. All
        ranks, after ``step``; waits for the device. Nothing where a rank has no memory for it."""
        self.asked = False
        device, size = self._ranks.device, _BYTES[self._ranks.device.type]
        got = None
        try:
            got, sent = torch.empty(size // 4, device=device), torch.ones(size // 4, device=device)
        except torch.OutOfMemoryError:
            log.warning("step %d: rank %d has no memory to measure its links", step, self._ranks.rank)
        if self._ranks.sum(torch.tensor([float(got is None)], device=device)).item():
            return
        assert got is not None
        own: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
        for kind, pairs in self._rounds:
            pair = next((pair for pair in pairs if self._ranks.rank in pair), None)
            for number in range(_REPEATS + 1):
                self._ranks.sum(torch.zeros(1, device=device)).item()  # all begin at one time
                if pair is not None:
                    speed = exchange(got, sent, sum(pair) - self._ranks.rank)
                    if number:  # the first makes the connections
                        own[kind, pair].append(speed)
        by_kind: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)
        for told in Agreement(self._ranks.rank, self._ranks.world).gather(own):
            for (kind, pair), speeds in told.items():
                by_kind[kind][pair] = min(median(speeds), by_kind[kind].get(pair, math.inf))
        if self._ledger is not None:
            self._tell(step, by_kind, self._ledger)

    def _tell(self, step: int, by_kind: Mapping[str, dict[tuple[int, ...], float]], ledger: Ledger) -> None:
        nodes = {rank: node for rank, (node, _) in self._places.items()}
        found = [
            f"{', '.join(named)}{where and f' ({where})'}: {text}"
            for kind, speeds in by_kind.items()
            for _, named, where, text in slow_links(kind, speeds, {}, nodes)
        ]
        (before, now), links = self._grown, sum(map(len, by_kind.values()))
        what = "; ".join(found) or f"none of {counted(links, 'link')} is slower than the others"
        times = now / before if before else math.inf
        log.warning("step %d: all ranks wait %.1f times as long for transfers as before: %s", step, times, what)
        ledger.append("slow_links", step=step, found=found, links=links, before=before, now=now)
