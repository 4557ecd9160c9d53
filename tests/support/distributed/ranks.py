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

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from quern.parallel.local import LocalRanks, RankError
from support.processes import files_of

__all__ = ["KeptRanks", "RankError", "run_ranks", "start_ranks"]

PRELOAD = ("hypothesis", "pydantic", "pytest", "yaml")


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``function(*args)`` on each of ``world`` ranks of a gloo group; what they return, by rank.

    ``function`` stands at the top level of its file; ``args`` and results are picklable, results without DTensors.
    Collectives time out after three quarters of ``timeout_s``; at ``timeout_s`` every rank writes where it stands and
    is killed. Raises :class:`RankError`.
    """
    with start_ranks(world, function, timeout_s) as ranks:
        return _called(ranks, function, args)


class KeptRanks:
    """Called as :func:`run_ranks` is, for functions of one file that change nothing in their process for good: ranks
    stay from call to call, and are fresh after a failure. Use as a context manager.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._sets: dict[int, LocalRanks] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ranks in self._sets.values():
            ranks.close()

    def __call__(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        if world not in self._sets:
            self._sets[world] = start_ranks(world, function, self.timeout_s)
        try:
            return _called(self._sets[world], function, args)
        except RankError:
            self._sets.pop(world).close()
            raise


def start_ranks(world: int, function: Callable[..., Any], timeout_s: float = 60.0) -> LocalRanks:
    """Ranks that know the file of ``function``, for several calls."""
    return LocalRanks(world, timeout_s=timeout_s, files=files_of(function), preload=PRELOAD)


def _called(ranks: LocalRanks, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    results = ranks.call(function, *args)
    for rank, text in enumerate(ranks.output):
        if text:
            print(f"[rank {rank}] {text.rstrip()}")
    return results
