"""Interpolated n-gram models, the baseline that a trained model has to beat.

Jelinek-Mercer smoothing (Jelinek & Mercer 1980) in the form Chen & Goodman (1998, "An Empirical Study of Smoothing
Techniques for Language Modeling", section 4.1) found better than one weight a total count: contexts share a weight when
the average count of the tokens seen after them is similar,

    p_n(w | c) = l_n(c) · count(c w) / count(c) + (1 - l_n(c)) · p_(n-1)(w | c without its oldest token)

down to the uniform distribution. The weights come from expectation maximisation on training documents that are not
counted meanwhile; then everything is counted. As in training with document masks, a context never crosses into another
document and a document's first token is no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from quern.data_pipeline.page.keys import places
from quern.tokenize.shards import ShardReader

__all__ = ["NGram", "TokenStream", "read_stream"]

_TUNING_SHARE = 0.05
_BUCKETS_AN_OCTAVE = 4
_NUM_BUCKETS = 64
_UNSEEN = -1
"""Bucket of a context that was never seen: nothing of its order enters."""
_MAX_ROUNDS = 400
_LEAST_GAIN = 2e-7
"""Nats a target: a round that gains less is the last."""


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
    buckets: np.ndarray
    """Of each context's weight: logarithm of its mean count of a distinct continuation."""


@dataclass(frozen=True)
class _Evidence:
    """What one order says of each target."""

    shares: np.ndarray
    """float64: count(c w) / count(c), 0 where the context is unseen."""
    buckets: np.ndarray
    """int64; -1 where the context is unseen or not that long."""


def _table(keys: np.ndarray, vocab_size: int) -> _Table:
    keys, counts = np.unique(keys, return_counts=True)
    contexts, first, distinct = np.unique(keys // vocab_size, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first) if len(counts) else counts
    octaves = np.log2(totals / np.maximum(distinct, 1))
    buckets = np.minimum((octaves * _BUCKETS_AN_OCTAVE).astype(np.int64), _NUM_BUCKETS - 1)
    return _Table(keys, counts, contexts, totals, buckets)


def _find(sorted_keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: int) -> np.ndarray:
    found = np.full(len(wanted), missing, np.int64)
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


def _tuning_split(stream: TokenStream, rng: np.random.Generator) -> tuple[TokenStream, TokenStream]:
    """Documents to count and documents to tune on: about a twentieth of the tokens, whole documents if any is small.

    Both are the stream with the other's documents marked as purged.
    """
    lengths = np.diff(stream.starts, append=len(stream.tokens))
    purged = np.zeros(len(lengths), bool) if stream.purged is None else stream.purged
    budget = int(_TUNING_SHARE * lengths[~purged].sum())
    held = np.zeros(len(lengths), bool)
    for document in rng.permutation(np.flatnonzero(~purged)):
        if lengths[document] <= budget:
            held[document] = True
            budget -= int(lengths[document])
    if held.any() or not len(lengths):
        counted = TokenStream(stream.tokens, stream.starts, purged | held)
        return counted, TokenStream(stream.tokens, stream.starts, purged | ~held)
    cut = len(stream.tokens) - budget  # a few long documents: the end of the last one
    if budget < 2 or cut <= stream.starts[-1] or purged[-1]:
        return stream, TokenStream(stream.tokens[:0], stream.starts[:0])
    counted = TokenStream(stream.tokens[:cut], stream.starts, purged)
    return counted, TokenStream(stream.tokens[cut:], np.zeros(1, np.int64))


def _chances(evidence: Sequence[_Evidence], weights: Sequence[np.ndarray], vocab_size: int) -> list[np.ndarray]:
    """p_0, p_1, … p_order of each target."""
    chances = [np.full(len(evidence[0].shares), 1.0 / vocab_size)]
    for level, weight in zip(evidence, weights, strict=True):
        own = np.where(level.buckets == _UNSEEN, 0.0, weight[level.buckets])
        chances.append(own * level.shares + (1.0 - own) * chances[-1])
    return chances


def _tune(evidence: Sequence[_Evidence], vocab_size: int) -> list[np.ndarray]:
    """float64[buckets] for each order: the weights under which the tuning targets are likeliest.

    A bucket without a target keeps the weight of the nearest that has one.
    """
    weights = [np.full(_NUM_BUCKETS, 0.5) for _ in evidence]
    before = -np.inf
    for _ in range(_MAX_ROUNDS):
        chances = _chances(evidence, weights, vocab_size)
        likelihood = float(np.log(chances[-1]).mean())
        if likelihood - before < _LEAST_GAIN:
            break
        before = likelihood
        reached = np.ones(len(chances[0]))  # probability, given the target, that this order or a lower one made it
        for order in range(len(evidence), 0, -1):
            level, weight = evidence[order - 1], weights[order - 1]
            seen = level.buckets != _UNSEEN
            own = np.where(seen, weight[level.buckets], 0.0)
            made = reached * own * level.shares / chances[order]
            mass = np.bincount(level.buckets[seen], reached[seen], _NUM_BUCKETS)
            taken = np.bincount(level.buckets[seen], made[seen], _NUM_BUCKETS)
            known = np.flatnonzero(mass)
            if len(known):
                nearest = known[np.abs(np.arange(_NUM_BUCKETS)[:, None] - known).argmin(axis=1)]
                # never quite 1: a target outside the counts must keep a chance
                weights[order - 1] = np.minimum(taken[nearest] / mass[nearest], 1.0 - 1e-6)
            reached = reached - made
    return weights


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
        self._tables: tuple[_Table, ...] = ()
        self._weights: list[np.ndarray] = []

    def fit(self, streams: Sequence[TokenStream], *, seed: int = 0) -> Self:
        """Count the streams' documents. ``seed`` chooses those on which the weights are tuned.

        Raises:
            ValueError: there is no target, too little text to tune on, or a token is not below ``vocab_size``.
        """
        if any(len(stream.tokens) and int(stream.tokens.max()) >= self.vocab_size for stream in streams):
            raise ValueError(f"expected tokens below {self.vocab_size}, got a larger one")
        rng = np.random.default_rng(seed)
        counted, tuning = zip(*(_tuning_split(stream, rng) for stream in streams), strict=True)
        self._count(counted)
        evidence = [self._evidence(stream) for stream in tuning]
        joined = [
            _Evidence(
                np.concatenate([parts[n].shares for parts in evidence]),
                np.concatenate([parts[n].buckets for parts in evidence]),
            )
            for n in range(self.order)
        ]
        if not len(joined[0].shares):
            raise ValueError("expected enough documents to hold a twentieth of the tokens out for tuning")
        self._weights = _tune(joined, self.vocab_size)
        self._count(streams)
        return self

    def _count(self, streams: Sequence[TokenStream]) -> None:
        tables = []
        for order in range(1, self.order + 1):
            parts = [_keys(stream, order, self.vocab_size) for stream in streams]
            tables.append(_table(np.concatenate([keys[whole] for keys, whole in parts]), self.vocab_size))
        self._tables = tuple(tables)

    def _evidence(self, stream: TokenStream) -> list[_Evidence]:
        found = []
        for order, table in enumerate(self._tables, start=1):
            keys, whole = _keys(stream, order, self.vocab_size)
            contexts = keys // self.vocab_size
            totals = np.where(whole, _find(table.contexts, table.totals, contexts, 0), 0)
            counts = np.where(whole, _find(table.keys, table.counts, keys, 0), 0)
            buckets = np.where(totals > 0, _find(table.contexts, table.buckets, contexts, _UNSEEN), _UNSEEN)
            found.append(_Evidence(counts / np.maximum(totals, 1), buckets))
        return found

    def nll(self, stream: TokenStream) -> np.ndarray:
        """float64[T]: nats of each token given those before it; NaN for documents' first tokens and purged ones."""
        losses = np.full(len(stream.tokens), np.nan)
        targets = np.flatnonzero(stream.ages > 0)
        losses[targets] = -np.log(_chances(self._evidence(stream), self._weights, self.vocab_size)[-1])
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
