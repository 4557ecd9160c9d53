"""Plans what a step reads and which rank computes it, from the order and the document boundaries alone.

The loader plans with it before a token is read, and lineage asks it afterwards: both are told the same.

Shape legend: N windows of a step (its global batch), L tokens a window, M documents that touch them; W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quern.train.batches.assignment import balance, round_robin
from quern.train.batches.boundaries import Documents

__all__ = ["StepPlan", "assign", "cu_seqlens_of", "plan_step"]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step before any token is read; N is the global batch, in the order of its places."""

    sources_N: U64
    epochs_N: U64
    windows_N: U64
    starts_N: I64
    """First token of the window in its stream."""
    rows_N: I64
    """Row in the arrays below, which run by source and start."""
    counts_R: I64
    """Documents that touch the row's window."""
    before_R: I64
    """Documents of the rows before."""
    starts_M: I64
    """Start in its window, clipped to [0, L]."""
    purged_M: NDArray[np.bool_]
    valid_R: I64
    costs_R: I64


def plan_step(
    samples: tuple[U64, U64, U64],
    num_sources: int,
    seq_len: int,
    document_mask: bool,
    documents_of: Callable[[int, I64], Documents],
) -> StepPlan:
    """The plan of a step whose (sources, epochs, windows) are ``samples``, each [N].

    ``documents_of(source, starts)``: the documents that touch windows of a source of the order, given by their first
    tokens, ascending.
    """
    sources_N, epochs_N, windows_N = samples
    starts_N = windows_N.astype(np.int64) * seq_len
    order_R = np.lexsort((starts_N, sources_N))
    rows_N = np.empty_like(order_R)
    rows_N[order_R] = np.arange(len(order_R))
    counts, starts, purged = [], [], []
    edges = np.searchsorted(sources_N[order_R], np.arange(num_sources + 1, dtype=np.uint64))
    for source in np.flatnonzero(np.diff(edges)).tolist():
        documents = documents_of(source, starts_N[order_R[edges[source] : edges[source + 1]]])
        counts.append(documents.counts_N)
        starts.append(documents.starts_M)
        purged.append(documents.purged_M)
    counts_R = np.concatenate(counts)
    starts_M, purged_M = np.maximum(np.concatenate(starts), 0), np.concatenate(purged)
    after_R = np.cumsum(counts_R)
    before_R = after_R - counts_R
    ends_M = np.empty_like(starts_M)
    ends_M[:-1] = starts_M[1:]
    ends_M[after_R - 1] = seq_len
    costs_R = np.add.reduceat(np.square(ends_M - starts_M), before_R)
    ends_M[after_R - 1] = seq_len + 1  # a window's last target is the token after its inputs
    lost_M = (starts_M > 0) & document_mask
    where = np.flatnonzero(purged_M)
    lost_M = lost_M.astype(np.int64)
    lost_M[where] = ends_M[where] - np.maximum(starts_M[where], 1)
    valid_R = seq_len - np.add.reduceat(lost_M, before_R)
    return StepPlan(
        sources_N, epochs_N, windows_N, starts_N, rows_N, counts_R, before_R, starts_M, purged_M, valid_R, costs_R
    )


def assign(plan: StepPlan, world: int, micro_batch: int, document_mask: bool) -> I64:
    """int64 [W, micro-batches, micro_batch]: places in the global batch."""
    if document_mask:
        return balance(plan.costs_R[plan.rows_N], world, micro_batch)
    return round_robin(len(plan.rows_N), world, micro_batch)


def cu_seqlens_of(plan: StepPlan, places: I64, seq_len: int, document_mask: bool) -> I64:
    """Where documents start in the windows at these places of the global batch, laid end to end, then their tokens: as
    the loader gives it of a micro-batch."""
    starts = []
    for number, row in enumerate(plan.rows_N[places].tolist()):
        own = plan.starts_M[plan.before_R[row] : plan.before_R[row] + plan.counts_R[row]]
        own = own[own < seq_len] if document_mask else own[:1]
        starts.append(own + number * seq_len)
    return np.append(np.concatenate(starts), len(places) * seq_len)
