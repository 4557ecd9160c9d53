"""Assigns the samples of a step to ranks and micro-batches; the set of samples never changes.

Shape legend: G samples of a step, W ranks, M micro-batches a rank, B samples a micro-batch; G = W·M·B.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quern.words import counted

__all__ = ["balance", "check_divides", "round_robin"]


def check_divides(global_batch: int, world: int, micro_batch: int) -> str | None:
    """None where ranks and micro-batches divide the global batch; else what is wrong and what would fit."""
    unit = world * micro_batch
    if global_batch % unit == 0:
        return None
    below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
    fits = f"{below} or {above}" if below else f"{above}"
    message = (
        f"global_batch: expected a multiple of {unit} ({counted(world, 'data-parallel rank')} × micro_batch "
        f"{micro_batch}), got {global_batch}; {fits} would fit"
    )
    if global_batch % world == 0:
        share = global_batch // world
        sizes = [size for size in range(1, share + 1) if share % size == 0]
        message += f", or a micro_batch of {', '.join(map(str, sizes[:8]))}{' …' if len(sizes) > 8 else ''}"
    return message


def round_robin(global_batch: int, world: int, micro_batch: int) -> NDArray[np.int64]:
    """int64 [W, M, B], places in the global batch: place p goes to rank p mod W."""
    return np.arange(global_batch).reshape(-1, world).T.reshape(world, -1, micro_batch)


def balance(costs_G: NDArray[np.int64], world: int, micro_batch: int) -> NDArray[np.int64]:
    """int64 [W, M, B], places in the global batch, so that ranks wait for each other as little as possible.

    ``costs_G``: integers ≥ 0; a part that all samples have in common changes nothing. Ranks that gather parameters
    wait at every micro-batch, so the time of a step is the sum over m of the costliest m-th micro-batch of any rank.
    The samples, sorted by falling cost, are cut into M rounds of W·B alike ones, the costliest first; within a round
    each next W samples go to the ranks the other way round than these are loaded (LPT: Graham 1969, with equal
    counts). For B = 1 no assignment has a smaller sum. Last, the micro-batches of a round are dealt to the ranks the
    other way round than their totals so far, which balances whole steps where ranks wait only at a step's end.
    Equal costs are told apart by place: equal input, equal output.
    """
    if world == 1:  # no rank waits for another
        return round_robin(len(costs_G), world, micro_batch)
    order_G = np.argsort(-costs_G, kind="stable")
    places_MBW = order_G.reshape(-1, micro_batch, world)
    costs_MBW = costs_G[places_MBW]
    cells_MWB = np.empty((len(places_MBW), world, micro_batch), np.int64)
    loads_MW = np.zeros((len(places_MBW), world), np.int64)
    for b in range(micro_batch):
        lightest_MW = np.argsort(loads_MW, axis=1, kind="stable")
        np.put_along_axis(cells_MWB[:, :, b], lightest_MW, places_MBW[:, b], axis=1)
        np.put_along_axis(loads_MW, lightest_MW, np.take_along_axis(loads_MW, lightest_MW, 1) + costs_MBW[:, b], axis=1)
    heaviest_MW = np.argsort(-loads_MW, axis=1, kind="stable")
    falling_MW = np.take_along_axis(loads_MW, heaviest_MW, axis=1)
    dealt_MW = np.empty_like(heaviest_MW)
    totals_W = np.zeros(world, np.int64)
    for m, falling_W in enumerate(falling_MW):
        lightest_W = np.argsort(totals_W, kind="stable")
        dealt_MW[m, lightest_W] = heaviest_MW[m]
        totals_W[lightest_W] += falling_W
    cells_MWB = np.take_along_axis(cells_MWB, dealt_MW[:, :, None], axis=1)
    return np.sort(cells_MWB.transpose(1, 0, 2), axis=-1)
