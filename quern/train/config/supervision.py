"""What a run checks of itself while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quern.config import Section
from quern.train.config.numbers import NonNegative

__all__ = ["ReplicasConfig"]


class ReplicasConfig(Section):
    """Comparison of what several ranks hold in copies, or compute twice: finds corruption that nothing else reports."""

    later: ClassVar[Mapping[str, Any]] = {"recompute_interval": 0}
    interval: NonNegative = 0
    """[steps] Steps between two comparisons of the copies along ``dp_replicate`` and ``tp``; before each save there is
    one too. 0 = none. Copies that differ end the run with exit code 4. Example: 100"""
    recompute_interval: NonNegative = 0
    """[steps] Steps between two in which every data-parallel rank's last micro-batch is computed again on the next one,
    and loss and gradients compared; in the step before a save by ``checkpoint.interval`` too. Needs no copies. 0 =
    none. Results that differ end the run with exit code 4. Example: 100"""
