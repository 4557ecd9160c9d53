"""What a run checks of itself while it trains."""

from __future__ import annotations

from quern.config import Section
from quern.train.config.numbers import NonNegative

__all__ = ["ReplicasConfig"]


class ReplicasConfig(Section):
    """Comparison of what several ranks hold in copies, bit by bit: finds corruption that nothing else reports."""

    interval: NonNegative = 0
    """[steps] Steps between two comparisons of the copies along ``dp_replicate`` and ``tp``; before each save there is
    one too. 0 = none. Copies that differ end the run with exit code 4. Example: 100"""
