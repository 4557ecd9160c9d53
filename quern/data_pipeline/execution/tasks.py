"""The interface of engines, which map a function over tasks, and the engine that runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

__all__ = ["MAX_DEATHS", "Death", "Engine", "InProcess", "OnDeath"]

R = TypeVar("R")

#: Deaths of one task without an ``on_death`` before the run gives up: a kill may be chance, a bug stays.
MAX_DEATHS = 3


@dataclass(frozen=True)
class Death:
    """How a worker process died while running a task."""

    lost_machine: bool = False
    """The whole machine went, or cannot be reached any more: nothing that the task did is to blame."""
    call_there: Callable[[Callable[..., Any], tuple[Any, ...]], Any] | None = None
    """Runs a function on the machine where it died; None: that machine is this one."""

    def ask(self, function: Callable[..., R], *args: Any) -> R | None:
        """``function(*args)`` on the machine where the process died; None when that is lost too."""
        if self.lost_machine:
            return None
        if self.call_there is None:
            return function(*args)
        found: R | None = self.call_there(function, args)
        return found


OnDeath = Callable[[int, tuple[Any, ...], Death], tuple[Any, ...]]


class Engine(Protocol):
    """Runs a function over tasks."""

    num_workers: int

    def counts(self) -> dict[str, int]:
        """``wanted``, ``up``, ``starting`` and ``busy`` workers."""
        ...

    def map(
        self,
        function: Callable[..., R],
        tasks: Sequence[tuple[Any, ...]],
        *,
        label: str,
        on_death: OnDeath | None = None,
    ) -> Iterator[tuple[int, R]]:
        """Run ``function(*task)`` for every task; yield (task index, result) as they finish, in any order.

        ``on_death(index, task, death)`` is called when the process that ran a task died; it returns the task to run
        instead or raises. Without it a task is repeated as it is, at most :data:`MAX_DEATHS` times. The first
        exception a task raises ends the map and is raised here. A process of which nothing is heard may still be at
        work while its task runs elsewhere: what a task writes must bear that.
        """
        ...


class InProcess:
    """Runs tasks one after the other in this process: for tests and for looking at one task in a debugger."""

    num_workers = 1

    def counts(self) -> dict[str, int]:
        """See :class:`Engine`."""
        return {"wanted": 1, "up": 1, "starting": 0, "busy": 1}

    def map(
        self,
        function: Callable[..., R],
        tasks: Sequence[tuple[Any, ...]],
        *,
        label: str,
        on_death: OnDeath | None = None,
    ) -> Iterator[tuple[int, R]]:
        """See :class:`Engine`."""
        for index, task in enumerate(tasks):
            yield index, function(*task)
