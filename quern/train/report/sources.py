"""Counts the tokens that the present weights were made of, by source, from the ledger alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from quern.errors import QuernError
from quern.train.history.ledger import latest_order, surviving
from quern.train.report.history import Run

__all__ = ["SourceTokens", "tokens_by_source"]


@dataclass(frozen=True)
class SourceTokens:
    """What the surviving steps have read of a source: ``tokens``, and ``epochs`` of all it has."""

    name: str
    tokens: int
    available: int
    """Tokens of an epoch."""

    @property
    def epochs(self) -> float:
        """How often each token was read on average."""
        return self.tokens / self.available if self.available else 0.0


def tokens_by_source(run: Run) -> list[SourceTokens]:
    """A row a source, as the newest order tells it (it explains every surviving step); none where the ledger has no
    order that says how long a window is.

    Raises:
        QuernError: the order in the ledger cannot be made again.
    """
    order = latest_order(run.entries)
    if order is None or order.seq_len is None:
        return []
    samples: Counter[int] = Counter()
    for own in surviving(run.entries, run.reached):
        if own.data_stop is None:
            raise QuernError(f"{run.path}: the steps from {own.step} on have no end")
        for sign, step in ((1, own.data_stop), (-1, own.data_step)):
            for source, count in enumerate(order.consumed(order.first_sample(step))):
                samples[source] += sign * count
    parts = [ident.rsplit("/", 2) for ident in order.ids]
    names = Counter(own[1] for own in parts if len(own) == 3)
    return [
        SourceTokens(
            own[1] if len(own) == 3 and names[own[1]] == 1 else ident, samples[source] * order.seq_len,
            order.windows[source] * order.seq_len,
        )
        for source, (ident, own) in enumerate(zip(order.ids, parts, strict=True))
    ]  # fmt: skip
