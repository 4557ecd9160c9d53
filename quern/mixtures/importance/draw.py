"""The documents with the greatest scores of any number, in memory for those that are kept."""

from __future__ import annotations

import numpy as np

__all__ = ["CANDIDATE", "Draw"]

#: A document with its score. ``high`` and ``low``: doc_id as big-endian halves; ``part`` and ``row``: where it stands.
CANDIDATE = np.dtype(
    [("score", "<f8"), ("high", "<u8"), ("low", "<u8"), ("tokens", "<i8"), ("part", "<i4"), ("row", "<i4")]
)
#: Candidates that wait at least, before the least of all are dropped.
_WAITING = 1 << 17


class Draw:
    """Keeps the first documents by descending score, equal ones by doc_id: ``most`` documents, or with ``by_tokens``
    those that come before the tokens of all so far are more than that. The order in which they are added decides
    nothing. Memory: about 200 bytes a document that is kept, and those of 2^17 more."""

    def __init__(self, most: int, *, by_tokens: bool = False) -> None:
        self._most, self._by_tokens = most, by_tokens
        self._held = np.empty(0, CANDIDATE)
        self._waiting: list[np.ndarray] = []
        self._least = -np.inf
        """What is below it is not kept, whatever comes."""

    def add(self, candidates: np.ndarray) -> None:
        """Documents of :data:`CANDIDATE`, each once."""
        self._waiting.append(candidates[candidates["score"] >= self._least])
        if sum(map(len, self._waiting)) >= max(_WAITING, len(self._held)):
            self._drop()

    def _drop(self) -> int:
        """How many of those held are kept; the next one is held too, since nothing behind it is kept."""
        found = np.concatenate([self._held, *self._waiting])
        self._waiting = []
        found = found[np.lexsort((found["low"], found["high"], -found["score"]))]
        costs = found["tokens"] if self._by_tokens else np.ones(len(found), np.int64)
        kept = int(np.searchsorted(np.cumsum(costs), self._most, "right"))
        if kept < len(found):
            self._least = found["score"][kept]
        self._held = found[: kept + 1].copy()
        return kept

    def first(self) -> np.ndarray:
        """Those that are kept, by rank."""
        kept = self._drop()
        return self._held[:kept]
