"""The config's section ``watchdog``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quern.config import Section

__all__ = ["WatchdogConfig"]


class WatchdogConfig(Section):
    """Ends a run in which a rank hangs, and names the rank. A phase of a step (data, forward, backward, reduce,
    optimizer, metrics, validation, save) may take ``factor`` times as long as the longest of that kind before it; the
    first of its kind, and all in the first step, ``comm.first_timeout_s``; of one process, any time."""

    enabled: bool = True
    """Watch, on a thread beside each rank."""
    factor: Annotated[float, Field(gt=1)] = 10.0
    """[times] How much longer than the longest before."""
    least_s: Annotated[float, Field(gt=0)] = 300.0
    """[seconds] What every phase may take."""
