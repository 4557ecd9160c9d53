"""Runs a function on every rank of a process group: fresh processes, gloo, about 0.1 s to start.

Tests reach it through the fixtures of ``conftest.py``::

    def work(factor):                       # at a test module's top level: the ranks load the file by its path
        value = torch.tensor([float(dist.get_rank() * factor)])
        dist.all_reduce(value)
        return value.item()

    def test_sum(run_ranks):
        assert run_ranks(work, 4, 10) == [60.0] * 4
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from quern.parallel.local import LocalRanks, RankError
from support.processes import files_of
from support.programs import python

__all__ = ["RankError", "run_ranks"]

PRELOAD = ("hypothesis", "pydantic", "pytest", "yaml")


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``function(*args)`` on each of ``world`` ranks of a gloo group; what they return, by rank.

    ``function`` stands at the top level of its file; ``args`` and results are picklable, results without DTensors.
    Collectives time out after three quarters of ``timeout_s``; at ``timeout_s`` every rank writes where it stands and
    is killed. Raises :class:`RankError`.
    """
    multiprocessing.set_executable(python())  # of the server that ranks are forked from: it need not import torch
    with LocalRanks(world, timeout_s=timeout_s, files=files_of(function), preload=PRELOAD) as ranks:
        results = ranks.call(function, *args)
    for rank, text in enumerate(ranks.output):
        if text:
            print(f"[rank {rank}] {text.rstrip()}")
    return results
