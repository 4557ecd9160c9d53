"""Ranks as threads of this process: an ``Agreement`` whose ranks exchange pickled values at a barrier.

What ranks say to each other is copied as a process group would copy it, and a rank that does not take part in a step
is an error within ``PATIENCE_S`` seconds, not a test that hangs.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

from quern.train.processes.agree import Agreement

PATIENCE_S = 60.0


class Meeting:
    """Where ``world`` ranks exchange values; ``steps`` counts how often they did,
    ``sizes`` has the bytes of each rank's value each time."""

    def __init__(self, world: int) -> None:
        self.world, self.steps = world, 0
        self.sizes: list[list[int]] = []
        self._said: list[bytes] = [b""] * world
        self._barrier = threading.Barrier(world, action=self._count, timeout=PATIENCE_S)

    def _count(self) -> None:
        self.steps += 1  # one arrival and one departure a step
        if self.steps % 2:
            self.sizes.append([len(said) for said in self._said])

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = pickle.dumps(value)
        self._barrier.wait()
        found = [pickle.loads(said) for said in self._said]
        self._barrier.wait()
        return found

    def leave(self) -> None:
        """A rank ends by an error; the others need not wait for it."""
        self._barrier.abort()


class ThreadAgreement(Agreement):
    """One rank's, over a :class:`Meeting`. ``inline``: :meth:`all_or_raise_with_keepalive` starts no thread."""

    def __init__(self, rank: int, meeting: Meeting, *, inline: bool = False) -> None:
        self.rank, self.world = rank, meeting.world
        self._meeting, self._inline = meeting, inline

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)

    def gather_on_rank0(self, value: Any) -> list[Any]:
        found = self.gather(value)
        return found if self.rank == 0 else []

    def broadcast_from_rank0(self, action: Callable[[], Any]) -> Any:
        return self.gather_results(lambda: action() if self.rank == 0 else None)[0]

    def all_or_raise_with_keepalive(self, action: Callable[[], Any]) -> Any:
        return self.all_or_raise(action) if self._inline else super().all_or_raise_with_keepalive(action)


def run_all(
    world: int, call: Callable[[ThreadAgreement], Any], *, inline: bool = True, meeting: Meeting | None = None
) -> list[Any]:
    """What ``call`` returns on each rank, or the exception it raises there. Threads are named ``rank N``."""
    meeting = meeting or Meeting(world)
    outcomes: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            outcomes[rank] = call(ThreadAgreement(rank, meeting, inline=inline))
        except Exception as error:
            outcomes[rank] = error
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), thread.name
    return outcomes


def results(outcomes: list[Any]) -> list[Any]:
    """The same, if no rank failed."""
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, threading.BrokenBarrierError):
            raise outcome
    return outcomes
