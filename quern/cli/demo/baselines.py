"""Interpolated n-gram models, the baseline that a trained model has to beat.

Each order leaves as much weight to the next lower one as it has seen different tokens after the context (Witten & Bell
1991, "The Zero-Frequency Problem", method C),

    p_n(w | c) = (count(c w) + distinct(c) · p_(n-1)(w | c without its oldest token)) / (count(c) + distinct(c))

down to the uniform distribution. As in training with document masks, a context never crosses into another document and
a document's first token is no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from quern.data_pipeline.page.keys import places
from quern.tokenize.shards import ShardReader

__all__ = ["NGram", "TokenStream", "read_stream"]


def read_stream(path: str) -> TokenStream:
    """The stream in a folder of shards, ``RUN/tokens/<source>`` or ``….val``.

    Raises:
        InputError: see :class:`ShardReader`.
    """
    reader = ShardReader(path)
    starts, purged = [np.empty(0, np.int64)], [np.empty(0, bool)]
    for shard in range(len(reader.shards)):
        starts.append(reader.starts(shard) + reader.offsets[shard])
        purged.append(reader.spans(shard)["purged"].to_numpy())
    return TokenStream(reader.tokens(0, reader.total_tokens), np.concatenate(starts), np.concatenate(purged))


@dataclass(frozen=True)
class TokenStream:
    """Tokens and the documents in them."""

    tokens: np.ndarray
    """Integers[T]."""
    starts: np.ndarray
    """int64[n], ascending, the first 0: where documents start."""
    purged: np.ndarray | None = None
    """bool[n]: documents that are neither counted nor predicted; null = none."""

    def __post_init__(self) -> None:
        if len(self.starts) == 0 and len(self.tokens) == 0:
            return
        rising = len(self.starts) > 0 and self.starts[0] == 0 and bool((np.diff(self.starts) > 0).all())
        if not rising or self.starts[-1] >= len(self.tokens):
            raise ValueError(f"starts: expected 0 first, then rising numbers below {len(self.tokens)}")

    @property
    def ages(self) -> np.ndarray:
        """int64[T]: how many tokens of its document precede a token; 0 also for every token of a purged one."""
        lengths = np.diff(self.starts, append=len(self.tokens))
        ages = np.arange(len(self.tokens)) - np.repeat(self.starts, lengths)
        if self.purged is not None:
            ages[np.repeat(self.purged, lengths)] = 0
        return ages


@dataclass(frozen=True)
class _Table:
    """The n-grams of one order. A key is a token's id in base ``vocab_size``, the oldest token first."""

    keys: np.ndarray
    """int64, ascending."""
    counts: np.ndarray
    contexts: np.ndarray
    """int64, ascending: keys without their last token."""
    totals: np.ndarray
    """Of each context: count(c)."""
    distinct: np.ndarray
    """Of each context: how many different tokens were seen after it."""


def _table(keys: np.ndarray, vocab_size: int) -> _Table:
    keys, counts = np.unique(keys, return_counts=True)
    contexts, first, distinct = np.unique(keys // vocab_size, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first) if len(counts) else counts
    return _Table(keys, counts, contexts, totals, distinct)


def _find(sorted_keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where it is not among the keys."""
    found = np.zeros(len(wanted), np.int64)
    at = places(sorted_keys, wanted)
    found[at >= 0] = values[at[at >= 0]]
    return found


def _keys(stream: TokenStream, order: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """int64[t] and bool[t], a stream's targets: the ``order`` tokens that end there, and if its document has them."""
    ages = stream.ages
    targets = np.flatnonzero(ages > 0)
    whole = ages[targets] >= order - 1
    keys = np.zeros(len(targets), np.int64)
    for back in range(order - 1, -1, -1):
        keys = keys * vocab_size + stream.tokens[np.maximum(targets - back, 0)].astype(np.int64)
    return keys, whole


class NGram:
    """An interpolated n-gram model of tokens 0 … ``vocab_size - 1``: 1 = unigram, 2 = bigram, 3 = trigram.

    Memory: 16 bytes a distinct n-gram and order, and while fitting about 60 bytes a token.

    Raises:
        ValueError: ``order`` is below 1, or an n-gram does not fit into 63 bits (order 3: up to two million ids).
    """

    def __init__(self, order: int, vocab_size: int) -> None:
        if order < 1 or vocab_size < 1 or vocab_size**order >= 2**63:
            raise ValueError(f"expected order ≥ 1 and vocab_size ** order < 2 ** 63, got {order} and {vocab_size}")
        self.order = order
        self.vocab_size = vocab_size
        self._tables: list[_Table] = []

    def fit(self, streams: Sequence[TokenStream]) -> Self:
        """Count the streams' documents.

        Raises:
            ValueError: a token is not below ``vocab_size``.
        """
        if any(len(stream.tokens) and int(stream.tokens.max()) >= self.vocab_size for stream in streams):
            raise ValueError(f"expected tokens below {self.vocab_size}, got a larger one")
        self._tables = []
        for order in range(1, self.order + 1):
            parts = [_keys(stream, order, self.vocab_size) for stream in streams]
            self._tables.append(_table(np.concatenate([keys[whole] for keys, whole in parts]), self.vocab_size))
        return self

    def _chances(self, stream: TokenStream) -> np.ndarray:
        """float64[t], the probability of each target."""
        chances = np.array([1.0 / self.vocab_size])
        for order, table in enumerate(self._tables, start=1):
            keys, whole = _keys(stream, order, self.vocab_size)
            contexts = keys // self.vocab_size
            totals = np.where(whole, _find(table.contexts, table.totals, contexts), 0)
            counts, distinct = _find(table.keys, table.counts, keys), _find(table.contexts, table.distinct, contexts)
            known = (counts + distinct * chances) / np.maximum(totals + distinct, 1)
            chances = np.where(totals > 0, known, chances)
        return chances

    def nll(self, stream: TokenStream) -> np.ndarray:
        """float64[T]: nats of each token given those before it; NaN for documents' first tokens and purged ones."""
        losses = np.full(len(stream.tokens), np.nan)
        losses[stream.ages > 0] = -np.log(self._chances(stream))
        return losses

    def loss(self, streams: Sequence[TokenStream], seq_len: int, windows: int | None = None) -> tuple[float, int]:
        """The total nats and the number of targets, over the targets of each stream's first ``windows`` windows.

        They are those a model with document masks is evaluated on: window i ends in target ``(i + 1) · seq_len``, and
        what is left after the last whole window is nobody's target. null = all windows.
        """
        total, count = 0.0, 0
        for stream in streams:
            whole = max(0, len(stream.tokens) - 1) // seq_len
            stop = seq_len * (whole if windows is None else min(windows, whole))
            losses = self.nll(stream)[1 : stop + 1]
            valid = ~np.isnan(losses)
            total += float(losses[valid].sum())
            count += int(valid.sum())
        return total, count
