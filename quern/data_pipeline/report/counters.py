"""What a survey counts with: keys in bounded memory, and the tokens of documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from quern.data_pipeline.report.clusters import id_keys

__all__ = ["TokenLengths", "TopCounter"]


class TopCounter:
    """Counts a stream of keys in bounded memory (lossy counting: the rarest half goes when it is full).

    A key's counts are exact as long as ``lost`` is 0; otherwise each may be short by at most ``lost``.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity, self.width, self.lost = capacity, width, 0
        self.counts: dict[str, list[int]] = {}

    def add(self, key: str, index: int, count: int) -> None:
        """Add ``count`` to column ``index`` of ``key``."""
        row = self.counts.get(key)
        if row is None:
            if len(self.counts) >= self.capacity:
                self._shrink()
            row = self.counts[key] = [0] * self.width
        row[index] += count

    def _shrink(self) -> None:
        ranked = sorted(self.counts.items(), key=lambda item: (-sum(item[1]), item[0]))
        keep = max(1, self.capacity // 2)
        self.lost += sum(ranked[keep][1]) if len(ranked) > keep else 0
        self.counts = dict(ranked[:keep])

    def top(self, num: int) -> list[tuple[str, list[int]]]:
        """The ``num`` keys of the largest sums, largest first, ties by key."""
        return sorted(self.counts.items(), key=lambda item: (-sum(item[1]), item[0]))[:num]


@dataclass(frozen=True)
class TokenLengths:
    """How many tokens each document of a corpus has; parallel arrays, sorted by key."""

    keys: np.ndarray
    """Of the doc_ids, as :func:`.clusters.id_keys` makes them."""
    tokens: np.ndarray

    @classmethod
    def of(cls, doc_ids: pa.ChunkedArray, tokens: np.ndarray) -> TokenLengths:
        """Of the documents ``doc_ids`` in any order."""
        keys = id_keys(doc_ids)
        order = np.argsort(keys)
        return cls(keys[order], tokens[order])
