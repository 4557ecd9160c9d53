"""Counts how evenly the ranks of ``cp`` share the attention of a run's first micro-batches, from boundaries alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.mixtures.order import Order
from quern.parallel.planning.context import Context
from quern.parallel.planning.segments import (
    deal,
    document_starts,
    gathered_segments,
    pairs_of_shards,
    ring_segments,
)
from quern.train.batches.corpus import Corpus
from quern.train.batches.loader import Loader, open_loader
from quern.train.batches.step_plan import cu_seqlens_of
from quern.train.config import TrainConfig

__all__ = ["imbalance", "shared_attention"]

MICRO_BATCHES = 256
"""That are looked at, at most."""


def shared_attention(config: TrainConfig, corpus: Corpus, order: Order, dp_size: int, context: Context) -> Any:
    """``micro_batches`` that were looked at, and over them the ``mean`` and the ``most`` of a rank's work in attention
    relative to the mean of its ``cp`` ranks, for a rank waits for the busiest; and ``keys``, the most that a rank
    copies for its stretches of queries, relative to a micro-batch's tokens. Writes nothing that stays."""
    if context.shards == 1:  # heads are all that is shared
        return {"micro_batches": 0, "mean": 1.0, "most": 1.0, "keys": 0.0}
    with tempfile.TemporaryDirectory(prefix="quern-index-") as folder:
        loader = open_loader(config, corpus, order, folder, 0, dp_size)
        rows = list(islice(_micro_batches(loader, config), MICRO_BATCHES))
    found, keys = zip(*(imbalance(own, config.seq_len, context) for own in rows), strict=True)
    return {"micro_batches": len(rows), "mean": float(np.mean(found)), "most": max(found), "keys": max(keys)}


def imbalance(cu_seqlens: NDArray[np.int64], seq_len: int, context: Context) -> tuple[float, float]:
    """The pairs of queries and keys of the shard that has most, relative to the mean of all; and the keys that the
    shard with the most copies at a time, relative to all tokens. ``cu_seqlens``: where documents start in the rows of a
    micro-batch laid end to end, then their tokens."""
    starts = document_starts(cu_seqlens)
    places_ABa = deal(starts, seq_len, context)
    pairs_A, shards = pairs_of_shards(places_ABa, starts), range(context.shards)
    if context.ring:
        copied = [len(ring_segments(places_ABa, starts, own, source).keys_U) for own in shards for source in shards]
    else:
        copied = [len(gathered_segments(places_ABa, starts, own).keys_U) for own in shards]
    return float(pairs_A.max() / pairs_A.mean()), max(copied) / len(starts)


def _micro_batches(loader: Loader, config: TrainConfig) -> Iterator[NDArray[np.int64]]:
    """``cu_seqlens`` of one after the other, of all data-parallel ranks."""
    for step in range(config.steps):
        plan, places_WMB = loader.plan(step)
        for places_B in places_WMB.reshape(-1, places_WMB.shape[2]):
            yield cu_seqlens_of(plan, places_B, config.seq_len, config.document_mask)
