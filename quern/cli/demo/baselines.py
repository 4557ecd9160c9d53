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

import numpy as np

from quern.data_pipeline.page.keys import places
from quern.tokenize.shards import ShardReader

__all__ = ["TokenStream", "loss", "nll", "read_stream"]


@dataclass(frozen=True)
class TokenStream:
    """Tokens and the documents in them."""

    tokens: np.ndarray
    """Integers[T]."""
    ages: np.ndarray
    """int64[T]: how many tokens of its document precede a token; 0 also for every token of a purged document."""


def read_stream(path: str) -> TokenStream:
    """The stream in a folder of shards, ``RUN/tokens/<source>`` or ``….val``.

    Raises:
        InputError: see :class:`ShardReader`.
    """
    reader = ShardReader(path)
    ages = [np.empty(0, np.int64)]
    for shard in range(len(reader.shards)):
        spans = reader.spans(shard)
        lengths = spans["length"].to_numpy()
        ages += [np.arange(n) * (not gone) for n, gone in zip(lengths, spans["purged"].to_numpy(), strict=True)]
    return TokenStream(reader.tokens(0, reader.total_tokens), np.concatenate(ages))


def _grams(streams: Sequence[TokenStream], order: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """int64[t] and bool[t], the streams' targets: the ``order`` tokens that end there as the digits of a number, the
    oldest first, and if its document has them."""
    grams, whole = [], []
    for stream in streams:
        targets = np.flatnonzero(stream.ages > 0)
        gram = np.zeros(len(targets), np.int64)
        for back in range(order - 1, -1, -1):
            gram = gram * vocab_size + stream.tokens[np.maximum(targets - back, 0)].astype(np.int64)
        grams.append(gram)
        whole.append(stream.ages[targets] >= order - 1)
    return np.concatenate(grams), np.concatenate(whole)


def _find(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where it is not among the sorted keys."""
    at = places(keys, wanted)
    return np.where(at >= 0, np.append(values, 0)[at], 0)


def nll(train: Sequence[TokenStream], stream: TokenStream, order: int, vocab_size: int) -> np.ndarray:
    """float64[T]: nats of each token of ``stream`` given those before it, by a model of ``order`` (2 = bigram) counted
    on ``train``; NaN for documents' first tokens and purged ones. Memory: about 60 bytes a token.

    Raises:
        ValueError: an n-gram does not fit into 63 bits (order 3: up to two million ids).
    """
    if vocab_size**order >= 2**63:
        raise ValueError(f"expected vocab_size ** order < 2 ** 63, got {vocab_size} and {order}")
    chances = np.array([1.0 / vocab_size])
    for length in range(1, order + 1):
        grams, whole = _grams(train, length, vocab_size)
        keys, counts = np.unique(grams[whole], return_counts=True)
        contexts, first, distinct = np.unique(keys // vocab_size, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first) if len(counts) else counts
        asked, whole = _grams([stream], length, vocab_size)
        total = np.where(whole, _find(contexts, totals, asked // vocab_size), 0)
        others = _find(contexts, distinct, asked // vocab_size)
        known = (_find(keys, counts, asked) + others * chances) / np.maximum(total + others, 1)
        chances = np.where(total > 0, known, chances)
    losses = np.full(len(stream.tokens), np.nan)
    losses[stream.ages > 0] = -np.log(chances)
    return losses


def loss(losses: np.ndarray, seq_len: int, windows: int | None = None) -> tuple[float, int]:
    """The total nats and the number of targets in a stream's first ``windows`` windows (null = all), of :func:`nll`.

    They are those a model with document masks is evaluated on: window i ends in target ``(i + 1) · seq_len``, and what
    is left after the last whole window is nobody's target.
    """
    whole = max(0, len(losses) - 1) // seq_len
    targets = losses[1 : 1 + seq_len * (whole if windows is None else min(windows, whole))]
    return float(np.nansum(targets)), int(np.count_nonzero(~np.isnan(targets)))
