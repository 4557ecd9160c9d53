"""Reads the state of a rank's GPU beside the run, and ends the run where the GPU is failing. **Unverified on GPU.**"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quern.errors import DeviceError
from quern.train.processes.agree import Agreement
from quern.train.processes.gpus import open_nvml, watched
from quern.train.processes.machine import pci_address
from quern.train.processes.ranks import Ranks

__all__ = ["DeviceWatch", "Failing", "as_fact", "failure"]

log = logging.getLogger(__name__)

FATAL_XIDS = frozenset({48, 64, 74, 79, 94, 95, 119, 120, 140})
"""Memory that could not be corrected (48, 94, 95, 140) or remapped (64), NVLink (74), a GPU that has fallen off the bus
(79) or whose processor does not answer (119, 120). Source: NVIDIA's list of XID errors."""

_WAIT_S = 30.0
"""The launcher ends ranks within it, once the one with the failing GPU has left."""


def failure(first: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What has happened to a GPU since ``first``, that makes its results doubtful; None: nothing. Both as
    :func:`quern.train.processes.gpus.watched` reads them."""
    if fatal := sorted(FATAL_XIDS.intersection(now.get("xids") or ())):
        return f"XID {', '.join(map(str, fatal))}"
    before, errors = first.get("ecc_errors"), now.get("ecc_errors")
    if errors is not None and errors > (before or 0):
        return f"{errors - (before or 0):,} uncorrected memory errors"
    if now.get("remap_failed") and not first.get("remap_failed"):
        return "a row of its memory could not be remapped"
    if first.get("sm_clock_mhz") is not None and now.get("sm_clock_mhz") is None:
        return "it does not answer NVML any more"
    return None


@dataclass(frozen=True)
class Failing:
    """A GPU."""

    rank: int
    host: str
    what: str

    def __str__(self) -> str:
        return f"the GPU of rank {self.rank} on {self.host} fails: {self.what}"


def as_fact(found: Sequence[Failing], signal: str) -> dict[str, Any]:
    """What the ledger says of the end of a run: these GPUs and their ranks, or else the ``signal``."""
    return {"signal": _line(found), "failing": [own.rank for own in found]} if found else {"signal": signal}


def _line(found: Sequence[Failing]) -> str:
    return "; ".join(map(str, found))


class DeviceWatch:
    """Watches within its block, on a thread, where the rank has a GPU and nvidia-ml-py is installed.

    Attributes: ``failing``, what is wrong with the GPU, or None.
    """

    def __init__(self, interval_s: float, ranks: Ranks) -> None:
        self.failing: str | None = None
        self._interval_s, self._ranks = interval_s, ranks
        self._ends = threading.Event()
        watches = bool(interval_s) and ranks.device.type == "cuda"
        self._thread = threading.Thread(target=self._watch, name="device", daemon=True) if watches else None

    def __enter__(self) -> DeviceWatch:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ends.set()

    def found(self) -> list[Failing]:
        """The ranks whose GPUs are failing. Collective."""
        shares = Agreement(self._ranks.rank, self._ranks.world).gather((self.failing, socket.gethostname()))
        return [Failing(rank, host, what) for rank, (what, host) in enumerate(shares) if what is not None]

    def leave_if(self, found: Sequence[Failing], done: int) -> None:
        """End the run, which has saved a checkpoint after ``done`` steps, where GPUs are failing.

        Raises:
            DeviceError: on ranks with such a GPU; on the others later, if they are still there.
        """
        if not found:
            return
        if self.failing is None:
            time.sleep(_WAIT_S)
        raise DeviceError(
            f"{_line(found)}; a checkpoint after step {done} was saved, and the same command goes on; take "
            f"{'the GPU' if len(found) == 1 else 'these GPUs'} out of service"
        )

    def _watch(self) -> None:
        with open_nvml() as api:
            if api is None:
                return
            with watched(api, pci_address(self._ranks.device)) as state:
                first = state()
                slowed = first.get("throttled", [])
                while self.failing is None and not self._ends.wait(self._interval_s):
                    now = state()
                    if (found := failure(first, now)) is not None:
                        log.error("rank %d: its GPU fails: %s", self._ranks.rank, found)
                        self.failing = found
                    elif (throttled := now.get("throttled", [])) != slowed:
                        slowed = throttled
                        why = f"slowed by {', '.join(slowed)}" if slowed else "free again"
                        log.warning("rank %d: the clock of its GPU is %s", self._ranks.rank, why)
