"""The config's section ``watchdog``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quern.config import Section

__all__ = ["WatchdogConfig"]


class WatchdogConfig(Section):
    """Ends a run of several ranks of which one hangs, and names it. A phase of a step (data, forward, backward, reduce,
    recompute, optimizer, metrics, validation) may take ``factor`` times as long as the longest of its kind before it,
    up to 0.8 of ``comm.timeout_s`` or twice the longest; the first of its kind, and all in the first step,
    ``comm.first_timeout_s``. What waits for disks and stores (saves, the end) is not watched."""

    enabled: bool = True
    """Watch, on a thread beside each rank."""
    factor: Annotated[float, Field(gt=1)] = 10.0
    """[times] How much longer than the longest before."""
    least_s: Annotated[float, Field(gt=0)] = 300.0
    """[seconds] What every phase may take."""
